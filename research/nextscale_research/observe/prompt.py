"""Observation 3: late stages hardly depend on the prompt (StageVAR, section 3.2).

An image is generated again with something replaced from stage k on: earlier stages get the codes of the first time, and the noise
stays the same. What replaces what:
    none      the unconditional branch alone (StageVAR's guidance of 0)
    unguided  the conditional branch alone
    other     the prompt of another image
    seed      other noise, the same prompt: how much there is left to decide at all
A late stage changes little whatever it reads, so the first three mean something only beside the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nextscale.guidance import ResolvedGuidance
from nextscale.methods.method import Method, Plans, StagePlan
from nextscale.metrics import Lpips
from nextscale.models.base import NextScaleModel
from nextscale.pipeline import Output, Pipeline
from nextscale.request import Revise
from nextscale.stage import Schedule

from .detail import LEVELS
from .numbers import Curve, Effect, Prompt
from .verdicts import late_stages

Replacement = Literal["none", "unguided", "other", "seed"]
SEED_STEP = 1_000_003  # from an image's seed to the one that replaces it: beyond its neighbors' seeds


@dataclass(frozen=True)
class Baseline:
    """Some images before anything was replaced, and their inputs."""

    prompts: list[Any]
    seeds: list[int]
    output: Output


@dataclass(frozen=True)
class OneBranch(Method):
    """One of the two cfg branches alone, at all stages."""

    branch: Literal["cond", "uncond"]

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return (StagePlan(cfg_branches=self.branch if guided else "both"),) * len(schedule)


def keeping_until(switch: int, codes: Sequence[Tensor]) -> Revise | None:
    """Gives stages before `switch` these codes. Without codes no stage needs the host, and the request can be captured."""
    return (lambda stage, sampled: codes[stage.index] if stage.index < switch else sampled) if switch else None


def replacements(pipeline: Pipeline, schedule: Schedule, others: bool) -> list[Replacement]:
    """The replacements that this model allows: without guidance there is one branch only, with a single prompt no other."""
    guided = ResolvedGuidance(pipeline.settings.guidance, schedule, len(pipeline.model.blocks)).needs_both
    return [*(("none", "unguided") if guided else ()), *(("other",) if others else ()), "seed"]


def spread_switches(stages: int, number: int) -> list[int]:
    """Stages from the first, where everything is replaced, to the first late one, which the claims are about; at most all stages."""
    if number >= stages:
        return list(range(stages))
    return sorted({round(index * late_stages(stages)[0] / max(number - 1, 1)) for index in range(number)})


def other_prompts(prompts: Sequence[Any]) -> list[Any] | None:
    """The next prompt that is not its own for every image; None if all are the same."""
    if all(prompt == prompts[0] for prompt in prompts):
        return None
    turns = ([*prompts[index + 1 :], *prompts[:index]] for index in range(len(prompts)))
    return [next(other for other in turn if other != own) for own, turn in zip(prompts, turns, strict=True)]


def generate_again(
    pipeline: Pipeline, first: Baseline, others: list[Any] | None, replacement: Replacement, switch: int, schedule: Schedule
) -> Output:
    """The same images with something replaced from stage `switch` on."""
    prompts, seeds, method = first.prompts, first.seeds, Method()
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
    return pipeline(prompts, seed=seeds, size=schedule, method=method, revise=keeping_until(switch, first.output.codes))


def moved(first: Output, again: Output, switch: int, lpips: Lpips | None) -> dict[str, Tensor]:
    """Returns the distance that each image has moved, by measure: [B] each."""
    a, b = first.pixels.clamp(-1, 1), again.pixels.clamp(-1, 1)
    found = {
        "rms": (a - b).square().mean(dim=(1, 2, 3)).sqrt() * LEVELS,
        "codes": changed_codes(first.codes[switch:], again.codes[switch:]),
    }
    if lpips is not None:
        found["lpips"] = lpips(a, b)
    return {name: values.double().cpu() for name, values in found.items()}


def changed_codes(first: Sequence[Tensor], again: Sequence[Tensor]) -> Tensor:
    """Share of the codes of some stages that differ, [B]: bits where codes are bits, the likeliest code where they are mixtures."""
    pairs = [((a.argmax(-1), b.argmax(-1)) if a.is_floating_point() else (a, b)) for a, b in zip(first, again, strict=True)]
    return torch.cat([(a != b).flatten(1) for a, b in pairs], dim=1).double().mean(dim=1)


Moves = dict[Replacement, list[dict[str, Tensor]]]
"""What `moved` found for the images of one request: by replacement, per switch."""


def summary(calls: Sequence[Moves], switches: Sequence[int]) -> Prompt:
    """Means over the images of all requests."""

    def curve(replacement: Replacement, measure: str) -> Curve:
        return Curve.of(torch.cat([torch.stack([switch[measure] for switch in call[replacement]], dim=1) for call in calls]))

    effects: dict[str, Effect] = {}
    for replacement, per_switch in calls[0].items():
        lpips = curve(replacement, "lpips") if "lpips" in per_switch[0] else None
        effects[replacement] = Effect(curve(replacement, "rms"), curve(replacement, "codes"), lpips)
    return Prompt(list(switches), effects)
