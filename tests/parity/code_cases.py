"""Cases of CoDe: two VARs of different size."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nextscale import Pipeline, RampGuidance, Sampling, Schedule, sampling
from nextscale.canvas import to_map
from nextscale.checkpoints import published_tensors
from nextscale.models import Var, VarConfig
from nextscale.models.context import ForwardContext
from nextscale.pipeline import Settings
from nextscale.schedules import SquareSchedules
from nextscale.stage import Tokens
from nextscale.text.prompts import ClassReader
from nextscale_research.methods import CoDe
from tests.parity.class_cases import VAR, var_tokenizer
from tests.parity.compare import Expected, Tolerance
from tests.parity.infinity_cases import every
from tests.parity.recipe import recipe_value
from tests.parity.settings import QUANTIZER, translated, understood
from tests.parity.supplied import with_both_cfg_branches, without_decoder
from tests.parity.trace import Call, StageTrace, calls_of
from tests.parity.weights import NETWORKS, fill, fill_with

FIXED = {"more_smooth": False}
SAID = {"draft_steps", "prefix_length", "cfg", "top_k", "top_p", "temperature", "temperature_note", "g_seed"}
LOGITS, LATENTS, IMAGE = Tolerance(2e-4, 1e-4), Tolerance(1e-4), Tolerance(1e-3)
SUBSAMPLE = "[:, :, ::2, ::2]"  # of an image, where a case says nothing else
REFINER = "refiner"


def replay_code(folder: Path, case: dict[str, Any], expected: Expected) -> None:
    said, config = case["code"], case["config"]
    understood(said, SAID, FIXED)
    schedule, draft = Schedule(config["patch_nums"]), said["draft_steps"]
    pipes = {part: build(folder, case, part) for part in ("drafter", "refiner")}
    drafter, refiner = pipes["drafter"], pipes["refiner"]
    drafter.partners.known[REFINER] = refiner
    stages, hooks = StageTrace(schedule), {}
    for part, pipe in pipes.items():
        hooks |= {f"{part} first": pipe.model.blocks[0], f"{part} last": pipe.model.blocks[-1]}
    layers = {f"layer {layer}": block for layer, block in enumerate(refiner.model.blocks)}
    noise = case["noise_max_abs_other_attention_kernel_and_2_threads"]["logits_cfg"]
    with calls_of(hooks | layers) as calls, drawn(expected, schedule, draft, noise, seeded=said["g_seed"] is not None):
        out = drafter(
            expected.input("labels"),
            seed=torch.Generator().manual_seed(said["g_seed"] or 0),
            size=schedule,
            guidance=RampGuidance(strength=said["cfg"]) if said["cfg"] else with_both_cfg_branches(RampGuidance(), schedule),
            method=CoDe(draft=draft, refiner=REFINER),
            top_k=of_stages(said["top_k"]),
            top_p=said["top_p"],
            temperature=of_stages(said["temperature"]),
            filter_first=True,
            on_stage=stages,
        )
    read: dict[str, Callable[[], Tensor]] = {}
    for place, done in enumerate(stages.done):
        part = "draft" if place < draft else "refine"
        if part == "refine" and done.stage.index < draft:
            continue  # read, not generated
        name = f"{part}.s{done.stage.index}"
        read |= {
            f"{name}.logits_cfg": lambda done=done: done.logits,
            f"{name}.tokens": lambda done=done: done.ids,
            f"{name}.fhat": partial(stages.latents.__getitem__, place),
        }
        if not done.stage.last:
            read[f"{name}.next_map"] = partial(next_map, stages, place)
    passes = calls["refiner first"][:2], calls["refiner last"][:2]
    assert sum(map(tokens_of, passes[0])) == said["prefix_length"], "prefix_length"
    read |= {
        "hub": lambda: torch.cat(stages.next_inputs[:draft], dim=1),
        "draft.s0.block0_in": lambda: calls["drafter first"][0].inputs[0],
        "refine.prefix.block0_in": lambda: torch.cat([call.inputs[0] for call in passes[0]], dim=1),
        "refine.prefix.logits_cond_uncond": lambda: torch.cat([raw_logits(refiner, call) for call in passes[1]], dim=1),
        "refine.prefix.cache_len": lambda: torch.tensor([sum(tokens_of(call) for call in calls[name][:2]) for name in layers]),
        "image": lambda: every((out.pixels.clamp(-1, 1) + 1) / 2, case.get("image_subsample", SUBSAMPLE)),
    }
    compare(expected, read)


def of_stages(said: Any) -> Any:
    """Returns a number for all stages, or a tuple with one per stage."""
    return tuple(said) if isinstance(said, list) else said


def tokens_of(call: Call) -> int:
    return call.inputs[0].shape[1]


def build(folder: Path, case: dict[str, Any], part: str) -> Pipeline:
    config = {**case["config"], **case["config"][part]}
    model = Var(VarConfig(**translated(config, VAR), **translated(config["vae"], QUANTIZER)))
    fill(model, folder, f"{case['weights']}/weights_{part}.safetensors", {})
    tokenizer = var_tokenizer(config["vae"])
    (salt,) = re.findall(r"salt='([^']+)'", case["weights_vae"])
    if case.get("vae_weights_left_out"):
        slots = {key: slot for key, slot in published_tensors(tokenizer, tokenizer.layout).items() if not re.fullmatch(NETWORKS, key)}
        fill_with(tokenizer, {key: torch.from_numpy(recipe_value(key, slot.shape, salt)) for key, slot in slots.items()}, NETWORKS)
        without_decoder(tokenizer)
    else:
        fill(tokenizer, folder, "", {"salt": salt})
    settings = Settings(SquareSchedules((tuple(config["patch_nums"]),)), RampGuidance(), Sampling())
    return Pipeline(model, tokenizer, ClassReader(model.config.classes), settings, part)


@contextmanager
def drawn(expected: Expected, schedule: Schedule, draft: int, noise: float, seeded: bool) -> Iterator[None]:
    """Draws codes with the seed, or with the stored numbers: the first whose cumulative probability exceeds the number.

    A code that rounding may have changed is the stored one. `noise` is the largest difference of a logit between two runs of the reference
    implementation.
    """
    names = iter([f"{'draft' if stage.index < draft else 'refine'}.s{stage.index}" for stage in schedule])
    by_seed = sampling.sample
    settled = 0

    def sample(logits: Tensor, exponential: Tensor) -> Tensor:
        nonlocal settled
        name, share = next(names), logits.softmax(dim=-1)
        if seeded:
            found, distance = by_seed(logits, exponential), lost_race(share, exponential)
        else:
            number = expected.input(f"{name}.uniform")[..., None]
            edges = share.double().cumsum(dim=-1)
            found, distance = (edges > number).byte().argmax(dim=-1), torch.maximum(edges - share - number, number - edges).clamp(min=0)
        if (stored := expected.tensors.get(f"{name}.tokens")) is None:
            return found
        near = (found != stored) & (distance.gather(-1, stored.long()[..., None])[..., 0] <= (4 if seeded else 2) * noise)
        settled += int(near.sum())
        return torch.where(near, stored.long(), found)

    with mock.patch.object(sampling, "sample", sample):
        yield
    if settled:
        warnings.warn(f"{settled} codes that rounding may have changed were settled as in the stored run", stacklevel=2)


def lost_race(share: Tensor, exponential: Tensor) -> Tensor:
    """Returns the amount that must be added to each code's logit for it to be drawn."""
    race = (share / exponential).log()
    return race.amax(dim=-1, keepdim=True) - race


def next_map(stages: StageTrace, place: int) -> Tensor:
    done = stages.done[place]
    generated = [number for number, one in enumerate(stages.done) if not one.stage.last]
    return to_map(stages.next_inputs[generated.index(place)], stages.schedule[done.stage.index + 1])


@torch.inference_mode()
def raw_logits(pipe: Pipeline, call: Call) -> Tensor:
    """Logits of all rows, from a pass through the last block."""
    ctx: ForwardContext = call.inputs[2]
    tokens: Tokens = call.inputs[1]
    return pipe.model.logits(call.output, tokens, ctx)


def compare(expected: Expected, read: dict[str, Callable[[], Tensor]]) -> None:
    for name, stored in expected.tensors.items():
        whole, _, step = name.partition(".sub")
        if whole not in read:
            continue
        actual = read[whole]()[:, :: int(step)] if step else read[whole]()
        if not stored.is_floating_point():
            expected.equal(name, actual)
        elif whole == "image":
            expected.close(name, actual, IMAGE)
        else:
            expected.close(name, actual, LOGITS if "logits" in whole or "block0" in whole else LATENTS)
