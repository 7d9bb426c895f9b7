"""The numbers of all observations: small enough to keep in a file, and all that figures, tables and verdicts are made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.errors import SettingError

FORMAT = 1
Numbers = list[float | None]


@dataclass(frozen=True)
class Curve:
    """Means over the images, one per stage, and their standard errors; None where no image has a value."""

    mean: Numbers
    error: Numbers

    @classmethod
    def of(cls, values: Tensor) -> Curve:
        """Averages [images, stages]; NaN is missing. The error of a single image is None."""
        values = values.double().cpu()
        number = values.isfinite().sum(dim=0)
        mean = values.nanmean(dim=0)
        spread = (values - mean).square().nansum(dim=0) / (number - 1).clamp(min=1)
        error = torch.where(number > 1, (spread / number).sqrt(), torch.nan)
        return cls(plain(mean), plain(error))


def plain(values: Tensor) -> Numbers:
    """Values for JSON, which has neither NaN nor infinity: both become None."""
    return [value if abs(value) < float("inf") else None for value in values.tolist()]


@dataclass(frozen=True)
class Frequency:
    """Places and fineness of each stage's change of the image. Stage 0 has nothing before it, and no values."""

    smooth: Curve  # mean absolute change of the quarter of the cells with the least detail, in levels of 255
    detailed: Curve  # the same of the quarter with the most detail
    correlation: Curve  # rank correlation of a cell's change with its detail in the final image
    foreseen: Curve  # the same with its detail in the image before the stage, which a method can know
    edges: list[float]  # between the bands, cycles per pixel
    power: list[Numbers]  # [stage][band], power that the stage adds, in squared levels
    image_power: Numbers  # [band], power of the final image without its mean


@dataclass(frozen=True)
class Blocks:
    """Places where each block acts: one curve per block."""

    correlation: list[Curve]  # rank correlation of a token's change (SparseVAR, eq. 1) with the detail of its cell in the final image
    foresight: list[Curve]  # the same of its change one stage earlier with the image's change by the stage: what SparseVAR relies on
    distance: list[Curve]  # the same of the distance of its input from the mean (FastVAR, eq. 4) with the detail
    strength: list[Curve]  # mean squared change by the block, against the mean square of its input


@dataclass(frozen=True)
class Effect:
    """Distances that the final image moves when something is replaced from a stage on: one entry per switch."""

    rms: Curve  # root mean square difference of the pixels, in levels of 255
    codes: Curve  # share of the codes or bits of that stage and later ones that differ
    lpips: Curve | None  # of images that are large enough for it


@dataclass(frozen=True)
class Prompt:
    """Effects of replacing the prompt, the guidance or the seed from a stage on."""

    switches: list[int]  # the first stage with the replacement
    effects: dict[str, Effect]  # by replacement; see prompt.py


@dataclass(frozen=True)
class Rank:
    """Numbers of directions of the inputs of the blocks: `ranks[a][b]` is for the energy share alphas[a] at block layers[b]."""

    images: int
    layers: list[int]
    alphas: list[float]
    ranks: list[list[Curve]]
    full: list[int]  # per stage the largest possible rank, min(tokens, channels)


@dataclass(frozen=True)
class Observations:
    """All numbers of one `python -m nextscale_research observe`."""

    about: dict[str, Any]  # model, machine, settings
    stages: list[list[int]]  # (height, width) of every token map
    frequency: Frequency
    blocks: Blocks
    prompt: Prompt
    rank: Rank


def to_json(found: Observations) -> str:
    return json.dumps({"format": FORMAT, **asdict(found)}, ensure_ascii=False, allow_nan=False) + "\n"


def read_observations(file: Path) -> Observations:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"{file} cannot be read as the numbers of `python -m nextscale_research observe`: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SettingError(f"{file} is not an observations.json of this version: run `python -m nextscale_research observe` again")
    try:
        found = from_content(content)
        require_whole(found)
        return found
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SettingError(f"{file} lacks numbers or holds others ({error}): run `python -m nextscale_research observe` again") from error


def from_content(content: dict[str, Any]) -> Observations:
    frequency, blocks, prompt, rank = (content[name] for name in ("frequency", "blocks", "prompt", "rank"))
    curves = ("smooth", "detailed", "correlation", "foreseen")
    return Observations(
        content["about"],
        content["stages"],
        Frequency(**frequency | {name: Curve(**frequency[name]) for name in curves}),
        Blocks(**{name: read_curves(several) for name, several in blocks.items()}),
        Prompt(prompt["switches"], {name: read_effect(effect) for name, effect in prompt["effects"].items()}),
        Rank(**rank | {"ranks": [read_curves(several) for several in rank["ranks"]]}),
    )


def require_whole(found: Observations) -> None:
    """Raises ValueError unless every list has an entry for each stage, block, band or switch."""
    frequency, blocks, prompt, rank = found.frequency, found.blocks, found.prompt, found.rank
    stages, bands, depth = len(found.stages), len(frequency.edges) + 1, len(blocks.correlation)
    effects = [curve for effect in prompt.effects.values() for curve in (effect.rms, effect.codes, effect.lpips) if curve is not None]
    per_block = [blocks.correlation, blocks.foresight, blocks.distance, blocks.strength]
    per_stage = [frequency.smooth, frequency.detailed, frequency.correlation, frequency.foreseen]
    per_stage += [curve for curves in (*per_block, *rank.ranks) for curve in curves]
    lengths: list[tuple[int, Sequence[Sequence[Any]]]] = [
        (stages, [frequency.power, rank.full]),
        (bands, [*frequency.power, frequency.image_power]),
        (depth, per_block),
        (len(rank.alphas), [rank.ranks]),
        (len(rank.layers), rank.ranks),
        (stages, [curve.mean for curve in per_stage]),
        (len(prompt.switches), [curve.mean for curve in effects]),
    ]
    if stages < 2 or not depth or "seed" not in prompt.effects or not rank.layers:
        raise ValueError(f"{stages} stages, {depth} blocks, replaced: {', '.join(prompt.effects) or 'nothing'}")
    for expected, lists in lengths:
        if wrong := [len(one) for one in lists if len(one) != expected]:
            raise ValueError(f"{wrong[0]} entries where {expected} were expected")


def read_curves(several: Sequence[dict[str, Any]]) -> list[Curve]:
    return [Curve(**curve) for curve in several]


def read_effect(effect: dict[str, Any]) -> Effect:
    lpips = effect["lpips"]
    return Effect(Curve(**effect["rms"]), Curve(**effect["codes"]), None if lpips is None else Curve(**lpips))
