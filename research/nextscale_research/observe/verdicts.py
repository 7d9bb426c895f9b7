"""Verdicts on each claim in words, from the numbers: a claim holds or it does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .numbers import Curve, Effect, Numbers, Observations

Topic = Literal["frequency", "blocks", "prompt", "rank"]

LATE_SHARE = 4  # the last quarter of the stages is late: 40, 48 and 64 of Infinity's thirteen, as in StageVAR
COARSE, FINE = 1 / 32, 1 / 8  # cycles per pixel: periods of more than 32 pixels, and of less than 8

# Where a claim begins to hold: our choices.
DETAIL_RATIO = 2.0  # change of the detailed quarter against the smooth quarter
FINE_RATIO = 4.0  # share of the fine power that is replaced against the coarse power
CLEAR_CORRELATION = 0.3  # least correlation of a block's map with the detail, and least difference of two blocks' correlations
PROMPT_SHARE = 0.2  # share of the effect of another prompt from the start
LOW_RANK = 0.25  # share of the possible rank, at ALPHA; StageVAR found 0.177 for Infinity-2B
ALPHA = 0.96


@dataclass(frozen=True)
class Verdict:
    """A verdict on a claim of a paper for this model, with its numbers."""

    topic: Topic
    claim: str
    holds: bool | None  # None: not measured
    text: str


def verdicts(found: Observations) -> list[Verdict]:
    return [
        detail_verdict(found),
        spectrum_verdict(found),
        block_verdict(found),
        blocks_differ(found),
        *prompt_verdicts(found),
        rank_verdict(found),
    ]


def late_stages(stages: int) -> range:
    """The last quarter of the stages: at least one, never the first."""
    return range(min(stages - max(1, stages // LATE_SHARE), stages - 1), stages)


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float:
    """Mean of the known values; NaN if there is none."""
    real = known(values)
    return sum(real) / len(real) if real else math.nan


def late_mean(curve: Curve, stages: range) -> float:
    return mean(curve.mean[stage] for stage in stages)


def ratio(a: float, b: float) -> float:
    """a / b: infinite where only b is zero, NaN where either is NaN or both are zero."""
    return math.inf if b == 0 and a > 0 else a / b if b else math.nan


def at_least(value: float, bound: float) -> bool | None:
    """Returns True if the value reaches the bound; None without a value."""
    return None if math.isnan(value) else value >= bound


def named(found: Observations, stages: Sequence[int]) -> str:
    first, last = (f"{height}x{width}" for height, width in (found.stages[stages[0]], found.stages[stages[-1]]))
    return f"stage {stages[0]} ({first})" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]} ({first} to {last})"


def detail_verdict(found: Observations) -> Verdict:
    late = late_stages(len(found.stages))
    numbers = found.frequency
    smooth, detailed = late_mean(numbers.smooth, late), late_mean(numbers.detailed, late)
    times = ratio(detailed, smooth)
    return Verdict(
        "frequency",
        "late stages change mostly detailed regions",
        at_least(times, DETAIL_RATIO),
        f"{named(found, late)}: the most detailed quarter of the image changes {times:.1f} times as much as the smoothest quarter"
        f" ({detailed:.1f} against {smooth:.1f} of 255 levels); rank correlation of change and detail"
        f" {late_mean(numbers.correlation, late):.2f}, with the detail before the stage {late_mean(numbers.foreseen, late):.2f}",
    )


def replaced_power(found: Observations, stages: range, coarse: bool) -> float:
    """Power that the stages add to coarse or fine bands, against the power of the image there."""
    numbers = found.frequency
    lower = [0.0, *numbers.edges]
    upper = [*numbers.edges, math.inf]
    bands = [band for band in range(len(lower)) if (upper[band] <= COARSE if coarse else lower[band] >= FINE)]
    added = sum(known(numbers.power[stage][band] for stage in stages for band in bands))
    return ratio(added, sum(known(numbers.image_power[band] for band in bands)))


def spectrum_verdict(found: Observations) -> Verdict:
    late = late_stages(len(found.stages))
    coarse, fine = replaced_power(found, late, coarse=True), replaced_power(found, late, coarse=False)
    return Verdict(
        "frequency",
        "the coarse part has converged before the late stages",
        at_least(ratio(fine, coarse), FINE_RATIO),
        f"{named(found, late)}: what is added has {coarse:.1%} of the image's power at periods of more than {1 / COARSE:.0f} pixels, and"
        f" {fine:.0%} of it at less than {1 / FINE:.0f} pixels",
    )


def block_correlations(found: Observations) -> list[float]:
    late = late_stages(len(found.stages))
    return [late_mean(curve, late) for curve in found.blocks.correlation]


def extremes(values: Sequence[float]) -> tuple[int, int]:
    """Returns the places of the largest and the smallest number without NaN; 0 and 0 if all are NaN."""
    places = [place for place, value in enumerate(values) if not math.isnan(value)] or [0]
    return max(places, key=lambda place: values[place]), min(places, key=lambda place: values[place])


def block_verdict(found: Observations) -> Verdict:
    late = late_stages(len(found.stages))
    agreement = block_correlations(found)
    most, _ = extremes(agreement)
    ahead = [late_mean(curve, late) for curve in found.blocks.foresight]
    best, _ = extremes(ahead)
    return Verdict(
        "blocks",
        "some blocks act where the image has detail",
        at_least(agreement[most], CLEAR_CORRELATION),
        f"{named(found, late)}: block {most} agrees best with the detail of the image (rank correlation {agreement[most]:.2f}); what"
        f" a stage will change is predicted best by block {best} one stage earlier ({ahead[best]:.2f}), which is"
        f" SparseVAR(blocks={best})",
    )


def blocks_differ(found: Observations) -> Verdict:
    late = late_stages(len(found.stages))
    agreement = block_correlations(found)
    most, least = extremes(agreement)
    return Verdict(
        "blocks",
        "blocks differ in where they act",
        at_least(agreement[most] - agreement[least], CLEAR_CORRELATION),
        f"{named(found, late)}: rank correlation of a block's change with the detail from {agreement[least]:.2f}"
        f" (block {least}) to {agreement[most]:.2f} (block {most})",
    )


def late_switch(found: Observations) -> int | None:
    """Place of the first switch to a late stage; None if there is none."""
    late = late_stages(len(found.stages))
    return next((place for place, stage in enumerate(found.prompt.switches) if stage in late), None)


def distances(effect: Effect) -> tuple[Curve, str]:
    """The better measure of the two, and its unit."""
    return (effect.rms, "levels") if effect.lpips is None else (effect.lpips, "LPIPS")


def distance(effect: Effect, place: int) -> float:
    return mean([distances(effect)[0].mean[place]])


TITLES = {"none": "without the prompt", "unguided": "without guidance", "other": "with another prompt"}


def prompt_verdicts(found: Observations) -> list[Verdict]:
    place = late_switch(found)
    effects = found.prompt.effects
    whole = effects.get("other", effects["seed"])
    reference = "another prompt" if "other" in effects else "another seed"
    results = []
    for name, title in TITLES.items():
        claim = f"late stages generated {title} give nearly the same image"
        if name not in effects or place is None:
            results.append(Verdict("prompt", claim, None, "not measured: it needs two different prompts, a guided model and a late switch"))
            continue
        moved, resampled, at_start = distance(effects[name], place), distance(effects["seed"], place), distance(whole, 0)
        share = ratio(moved, at_start)
        beside = f"{ratio(moved, resampled):.2f} times what another seed does" if resampled > 0 else "another seed changes nothing"
        text = (
            f"{title} from {named(found, [found.prompt.switches[place]])} on: the image moves by {moved:.3g} {distances(effects[name])[1]},"
            f" {share:.0%} of what {reference} from the start does; from the same stage on, {beside};"
            f" {mean([effects[name].codes.mean[place]]):.0%} of the later codes differ"
        )
        results.append(Verdict("prompt", claim, at_least(-share, -PROMPT_SHARE), text))
    return results


def rank_verdict(found: Observations) -> Verdict:
    numbers, late = found.rank, late_stages(len(found.stages))
    curves = numbers.ranks[numbers.alphas.index(ALPHA)]
    shares = [late_mean(shares_of(curve, numbers.full), late) for curve in curves]
    tokens = mean(late_mean(shares_of(curve, [height * width for height, width in found.stages]), late) for curve in curves)
    return Verdict(
        "rank",
        "features of late stages have low rank",
        at_least(-mean(shares), -LOW_RANK),
        f"{named(found, late)}: {mean(shares):.0%} of the possible directions hold {ALPHA:.0%} of the energy of the blocks' inputs"
        f" ({min(shares):.0%} to {max(shares):.0%} by block), as many as {tokens:.1%} of the tokens",
    )


def shares_of(curve: Curve, whole: Sequence[int]) -> Curve:
    def divided(values: Numbers) -> Numbers:
        return [None if value is None else value / most for value, most in zip(values, whole, strict=True)]

    return Curve(divided(curve.mean), divided(curve.error))
