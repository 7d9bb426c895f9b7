"""Errors of formats without any judge of images: logits of every stage for the same codes, and codes that change, on any weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextscale.methods import MethodLike
from nextscale.models.base import NextScaleModel
from nextscale.models.feed_forward import FeedForward
from nextscale.pipeline import Pipeline
from nextscale.request import SeedLike
from nextscale.schedules import SizeLike
from nextscale.stage import Stage

OUTLIERS = 4  # channels of every input


@dataclass(frozen=True, eq=False)
class Seen:
    """Outputs of a model for given codes, by stage."""

    logits: list[Tensor]  # guided
    ids: list[Tensor]  # sampled of them, with the same noise
    codes: tuple[Tensor, ...]  # that were put on the canvas


def generate_seen(
    pipe: Pipeline, prompts: Any, size: SizeLike, given: Sequence[Tensor] = (), seed: SeedLike = 0, method: MethodLike = None
) -> Seen:
    """Generates images; with `given` codes every stage reads those, whatever it samples itself."""
    logits: list[Tensor] = []
    ids: list[Tensor] = []

    def watch(preview: Any) -> None:
        logits.append(preview.done.logits.float().clone())
        ids.append(preview.done.ids.clone())

    def as_given(stage: Stage, codes: Tensor) -> Tensor:
        return given[stage.index] if given else codes

    output = pipe(prompts, seed=seed, size=size, method=method, smooth=False, on_stage=watch, decode=False, revise=as_given)
    return Seen(logits, ids, output.codes)


def stage_errors(found: Seen, expected: Seen) -> dict[str, list[float]]:
    """Returns by stage the relative error of the logits, and the share of codes, or of their bits, that are sampled differently."""
    pairs = list(zip(found.logits, expected.logits, strict=True))
    return {
        "logits": [round(float((ours - theirs).norm() / theirs.norm()), 5) for ours, theirs in pairs],
        "changed": [round(float((a != b).float().mean()), 5) for a, b in zip(found.ids, expected.ids, strict=True)],
    }


@torch.no_grad()
def plant_outliers(model: NextScaleModel, factor: float, channels: int = OUTLIERS, seed: int = 0) -> None:
    """Makes some channels of the inputs of all products `factor` times larger, and the weights that read them smaller by as much.

    What attention and norms give is the same; hidden states go through an activation, so that the model becomes another one of its kind.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> Tensor:
        return torch.randperm(count, generator=generator)[:channels].to(model.device)

    for block in model.stack:
        attention, ffn, dim = block.attention, block.feed_forward, model.block_config.dim
        values = some(dim)
        enlarge(attention.qkv.weight, 2 * dim + values, factor)
        enlarge(attention.qkv.bias, 2 * dim + values, factor)
        attention.proj.weight[:, values] /= factor
        if block.has_text:
            text = block.text_attention
            enlarge(text.kv.weight, dim + values, factor)
            enlarge(text.kv.bias, dim + values, factor)
            text.proj.weight[:, values] /= factor
            if block.text_norm.weight is not None:
                enlarge(block.text_norm.weight, values, factor)
                enlarge(block.text_norm.bias, values, factor)
                text.q.weight[:, values] /= factor
        if model.block_config.modulation == "shared":  # gains, scales and shifts, two each
            block.modulation_table[2:4, values] += factor - 1
            attention.qkv.weight[:, values] /= factor
            if isinstance(ffn, FeedForward):
                ffn.fc1.weight[:, values] /= factor
        if isinstance(ffn, FeedForward):
            hidden = some(ffn.fc2.in_features)
            enlarge(ffn.fc1.weight, hidden, factor)
            enlarge(ffn.fc1.bias, hidden, factor)
            ffn.fc2.weight[:, hidden] /= factor


def enlarge(parameter: Tensor, rows: Tensor, factor: float) -> None:
    parameter[rows] *= factor
