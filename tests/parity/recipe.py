"""Weights given by recipe, so that large files need not be stored: values that follow from key, shape and salt, or from a seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = (1 << 64) - 1


def unit_noise(key: str, count: int, salt: str) -> np.ndarray:
    """Returns uniform numbers of variance 1: splitmix64 of consecutive counters that start at a checksum of salt and key."""
    start = (zlib.crc32(f"{salt}/{key}".encode()) << 32) & WORD
    with np.errstate(over="ignore"):
        state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(start)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    share = (state >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return (2.0 * share - 1.0) * math.sqrt(3.0)


def spread(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Returns standard deviation and mean of a parameter."""
    *_, parent, last = ("", *key.split("."))
    weight = last == "weight"
    if key == "class_emb.weight":
        return 1.0, 0.0
    if key in ("pos_start", "pos_1LC", "lvl_embed.weight"):
        return 0.1, 0.0
    if key.startswith("word_embed."):
        return (0.1 / math.sqrt(shape[1]) if weight else 0.05), 0.0
    if key in ("encoder.conv_in.weight", "decoder.conv_in.weight"):
        return 0.1 / math.sqrt(9 * shape[1]), 0.0
    if key in ("encoder.conv_in.bias", "decoder.conv_in.bias"):
        return 0.02, 0.0
    if key == "quantize.embedding.weight":
        return 0.8, 0.0
    if last in ("q_bias", "v_bias", "zero_k_bias"):
        return 0.3, 0.0
    if last == "ada_gss":
        return 0.4, 0.0
    if "ada_lin" in key:
        return (0.5 / math.sqrt(shape[1]) if weight else 0.3), 0.0
    if key == "head.weight":
        return 3.0 / math.sqrt(shape[1]), 0.0
    if parent.startswith("norm"):
        return 0.2, (1.0 if weight else 0.0)
    if key == "decoder.conv_out.weight":
        return 0.8 / math.sqrt(9 * shape[1]), 0.0
    if weight:
        return 1.0 / math.sqrt(math.prod(shape[1:])), 0.0
    if last == "bias":
        return 0.15, 0.0
    raise KeyError(f"the recipe says nothing about {key}")


def recipe_value(key: str, shape: tuple[int, ...], salt: str) -> np.ndarray:
    """Returns the float32 value of a published parameter."""
    noise = unit_noise(key, math.prod(shape), salt).reshape(shape)
    if key.endswith("scale_mul_1H11"):
        value = math.log(4.0) + 0.5 * noise
        if key.startswith("blocks.1."):
            value[0, 0, 0, 0] = 5.2  # above ln 100
        return value.astype(np.float32)
    deviation, mean = spread(key, shape)
    return (mean + deviation * noise).astype(np.float32)


def drawn_value(normal: Tensor, mean: float, deviation: float, factors: Sequence[float] = (1.0,), half: bool = False) -> Tensor:
    """Returns normal numbers, shifted and scaled. `factors`: of equal parts along the first axis. `half`: rounded to float16."""
    value = deviation * normal + mean
    value = torch.cat([part * factor for part, factor in zip(value.chunk(len(factors)), factors, strict=True)])
    return value.half().float() if half else value


def drawn_weights(seed: int, tensors: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Weights whose normal numbers come from one generator, in this order; "values" are written out, though numbers were drawn for them.

    Torch computes them in another way where a processor lacks vector instructions: last bits differ then, which tolerances cover.
    Of weights rounded to float16 those are "replaced" whose last bits decide.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, entry in tensors.items():
        how = dict(entry)
        replaced = how.pop("replaced", {})
        normal = torch.randn(how.pop("shape"), generator=generator)
        weights[key] = torch.tensor(how["values"]).view(normal.shape) if "values" in how else drawn_value(normal, **how)
        replace_(weights[key], replaced)
    return weights


def replace_(tensor: Tensor, replaced: dict[str, float]) -> None:
    """Writes values at positions of the flattened tensor."""
    for position, value in replaced.items():
        tensor.view(-1)[int(position)] = value


def diffusion_noise(seed: int, rows: int, channels: int, steps: int) -> dict[str, Tensor]:
    """Returns the noise of HART's diffusion: the start, and each step's for the conditional half. Numbers are drawn for both halves."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(rows, channels, generator=generator)
    noise = [torch.randn(2, rows, channels, generator=generator)[0] for _ in range(steps)]
    return {"diff.noise_init": start, "diff.noise_steps": torch.stack(noise)}


def projections(seed: int, tensors: dict[str, dict[str, Any]], half: bool = True) -> dict[str, Tensor]:
    """StageVAR's projections Q [1, cells, rank] by name, rounded to float16, each after the numbers that choose its representatives."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, how in tensors.items():
        cells, rank = how["shape"]
        torch.rand(cells, dtype=torch.float64, generator=generator)  # takes as much off the stream as exponential numbers do
        found[name] = torch.randn(1, cells, rank, generator=generator) * rank**-0.5
        found[name] = found[name].half() if half else found[name]
        replace_(found[name], how.get("replaced", {}))
    return found


RECIPES = {"diffusion_noise": diffusion_noise, "projections": projections}


def drawn_tensors(recipes: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Returns the random numbers that a compact case does not store."""
    return {name: tensor for kind, settings in recipes.items() for name, tensor in RECIPES[kind](**settings).items()}
