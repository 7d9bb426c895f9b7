"""Observation 3: late stages hardly depend on the prompt (StageVAR, section 3.2).

An image is drawn again with something replaced from stage k on: earlier stages get the codes of the first drawing, and random numbers
stay the same. What replaces what:
    none      the branch without a prompt, alone (StageVAR's guidance of 0)
    unguided  the branch with the prompt, alone
    other     the prompt of another image
    seed      other random numbers, the same prompt: how much there is left to decide at all
A late stage changes little whatever it reads, so the first three mean something only beside the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...accel.method import Method, StagePlan
from ...guidance import GuidedRows
from ...models.base import NextScaleModel
from ...pipeline import Output, Pipeline
from ...request import Revise
from ...stage import Schedule, Stage
from ..metrics import Lpips
from .detail import LEVELS
from .numbers import Curve, Effect, Prompt
from .verdicts import late_stages

if TYPE_CHECKING:
    from ...canvas import Canvas

Replacement = Literal["none", "unguided", "other", "seed"]
SEED_STEP = 1_000_003  # from an image's seed to the one that replaces it: beyond those of its neighbours


@dataclass(frozen=True)
class Drawn:
    """The first drawing of some images."""

    prompts: list[Any]
    seeds: list[int]
    output: Output


@dataclass(frozen=True)
class OneBranch(Method):
    """One of the two branches alone, at all stages."""

    branch: Literal["cond", "uncond"]

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        return (StagePlan(cfg_branches=self.branch),) * len(schedule)

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return StagePlan(cfg_branches=self.branch)


def keeping_until(switch: int, codes: Sequence[Tensor]) -> Revise:
    """Stages before `switch` get these codes."""
    return lambda stage, drawn: codes[stage.index] if stage.index < switch else drawn


def replacements(pipeline: Pipeline, schedule: Schedule, others: bool) -> list[Replacement]:
    """Those that this model allows: without guidance there is one branch only, with a single prompt no other."""
    guided = GuidedRows(pipeline.settings.guidance, schedule, len(pipeline.model.blocks)).needs_both
    return [*(("none", "unguided") if guided else ()), *(("other",) if others else ()), "seed"]


def spread_switches(stages: int, number: int) -> list[int]:
    """Evenly from the first stage, where all is replaced, to the first late one, where all of which a claim speaks is; or all stages."""
    if number >= stages:
        return list(range(stages))
    return sorted({round(index * late_stages(stages)[0] / max(number - 1, 1)) for index in range(number)})


def other_prompts(prompts: Sequence[Any]) -> list[Any] | None:
    """For every image the next prompt that is not its own; None if all are the same."""
    if all(prompt == prompts[0] for prompt in prompts):
        return None
    turns = ([*prompts[index + 1 :], *prompts[:index]] for index in range(len(prompts)))
    return [next(other for other in turn if other != own) for own, turn in zip(prompts, turns, strict=True)]


def draw_again(
    pipeline: Pipeline, drawn: Drawn, others: list[Any] | None, replacement: Replacement, switch: int, schedule: Schedule
) -> Output:
    prompts, seeds, method = drawn.prompts, drawn.seeds, Method()
    match replacement:
        case "none":
            method = OneBranch("uncond")
        case "unguided":
            method = OneBranch("cond")
        case "other":
            assert others is not None
            prompts = others
        case "seed":
            seeds = [seed + SEED_STEP for seed in seeds]
    return pipeline(prompts, seed=seeds, size=schedule, method=method, revise=keeping_until(switch, drawn.output.codes))


def moved(first: Output, again: Output, switch: int, lpips: Lpips | None) -> dict[str, Tensor]:
    """How far each image is from its first drawing, [B] each."""
    a, b = first.pixels.clamp(-1, 1), again.pixels.clamp(-1, 1)
    found = {
        "rms": (a - b).square().mean(dim=(1, 2, 3)).sqrt() * LEVELS,
        "codes": changed_codes(first.codes[switch:], again.codes[switch:]),
    }
    if lpips is not None:
        found["lpips"] = lpips(a, b)
    return {name: values.double().cpu() for name, values in found.items()}


def changed_codes(first: Sequence[Tensor], again: Sequence[Tensor]) -> Tensor:
    """Share of the codes of some stages that differ, [B]; of bits for bit codes, of the likeliest code for mixtures."""
    pairs = [((a.argmax(-1), b.argmax(-1)) if a.is_floating_point() else (a, b)) for a, b in zip(first, again, strict=True)]
    return torch.cat([(a != b).flatten(1) for a, b in pairs], dim=1).double().mean(dim=1)


Moves = dict[Replacement, list[dict[str, Tensor]]]
"""Of one call: by replacement, per switch, what `moved` found."""


def summary(calls: Sequence[Moves], switches: Sequence[int]) -> Prompt:
    def curve(replacement: Replacement, measure: str) -> Curve:
        return Curve.of(torch.cat([torch.stack([switch[measure] for switch in call[replacement]], dim=1) for call in calls]))

    effects: dict[str, Effect] = {}
    for replacement, per_switch in calls[0].items():
        lpips = curve(replacement, "lpips") if "lpips" in per_switch[0] else None
        effects[replacement] = Effect(curve(replacement, "rms"), curve(replacement, "codes"), lpips)
    return Prompt(list(switches), effects)
