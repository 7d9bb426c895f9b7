"""Classifier-free guidance: how strongly each stage follows the condition.

All published forms are one formula, guided = s * cond + (1 - s) * uncond, with a scale s per stage; they differ in how s follows from
the stage. A scale of 1 is the conditional rows alone.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from .errors import SettingError
from .stage import Schedule, Stage
from .validation import is_finite, is_number, require

LARGEST_SCALE = 1e4  # guided logits stay far from float32's overflow at 3e38

CfgBranch = Literal["cond", "uncond"]
CfgBranches = Literal["both", "cond", "uncond"]
"""Which rows of a guided request run: conditional and unconditional ones, or only those of one cfg branch."""


@dataclass(frozen=True)
class Guidance:
    """Base of the forms. `logits` guides the output; `layers` guides hidden states after those blocks (negative: from the end)."""

    logits: bool = True
    layers: tuple[int, ...] = ()

    def scales(self, schedule: Schedule) -> tuple[float, ...]:
        """One scale per stage; a longer tuple is allowed, its tail only decides whether the second cfg branch runs at all."""
        raise NotImplementedError

    def excess(self, schedule: Schedule) -> tuple[float, ...]:
        """How far each scale lies above 1, without the rounding of the sum where a form knows better."""
        return tuple(scale - 1 for scale in self.scales(schedule))

    def with_strength(self, strength: float) -> Guidance:
        return replace(self, strength=strength)  # type: ignore[call-arg]


@dataclass(frozen=True)
class ConstantGuidance(Guidance):
    """The same scale at every stage (Infinity; FlexVAR's demo). 1 is no guidance."""

    strength: float = 1.0

    def scales(self, schedule: Schedule) -> tuple[float, ...]:
        return (self.strength,) * len(schedule)


@dataclass(frozen=True)
class RampGuidance(Guidance):
    """Guidance that grows with the stage (VAR, HART, STAR; FlexVAR's evaluation): scale 1 + strength * i / span. 0 is no guidance.

    `span` is the last stage's index, at most `longest_span`. Stages wider than `full_above` take the full strength at once. With
    `last_repeats` the last stage is guided like the one before it (HART).
    """

    strength: float = 0.0
    longest_span: int | None = None
    full_above: int | None = None
    last_repeats: bool = False

    def scales(self, schedule: Schedule) -> tuple[float, ...]:
        return tuple(1 + above for above in self.excess(schedule))

    def excess(self, schedule: Schedule) -> tuple[float, ...]:
        span = len(schedule) - 1
        if self.longest_span is not None:
            span = min(span, self.longest_span)
        above = tuple(self.strength * self._share(stage, max(span, 1)) for stage in schedule)
        return (*above[:-1], above[-2]) if self.last_repeats and len(above) > 1 else above

    def _share(self, stage: Stage, span: int) -> float:
        if self.full_above is not None and max(stage.size) > self.full_above:
            return 1.0
        return stage.index / span


@dataclass(frozen=True)
class StageGuidance(Guidance):
    """One scale per stage, written out."""

    values: tuple[float, ...] = ()

    def scales(self, schedule: Schedule) -> tuple[float, ...]:
        if len(self.values) < len(schedule):
            raise SettingError(f"{len(self.values)} guidance scales for {len(schedule)} stages: give one per stage, or a single number")
        return self.values

    def with_strength(self, strength: float) -> Guidance:
        return ConstantGuidance(self.logits, self.layers, strength)


GuidanceLike = Guidance | float | Sequence[float] | None


def resolve_guidance(value: GuidanceLike, default: Guidance) -> Guidance:
    """A number keeps the model's published form at that strength; a list is one scale per stage; None is the published setting."""
    if value is None:
        return default
    if isinstance(value, Guidance):
        return value
    numbers = value if isinstance(value, Sequence) else [value]
    good = not isinstance(value, str) and all(is_finite(number) and number >= 0 for number in numbers)
    require(good, "guidance", "a number of at least 0, a list of one per stage, or a Guidance", value)
    if not isinstance(value, Sequence):
        return default.with_strength(float(value))
    return StageGuidance(default.logits, default.layers, tuple(float(scale) for scale in value))


def mix(rows: Tensor, scale: float, batch: int) -> Tensor:
    """The two halves of [2B, ...] as one [B, ...]; with only the conditional rows left, or scale 1, these as they are."""
    if rows.shape[0] == batch or scale == 1:
        return rows[:batch]
    cond, uncond = rows.chunk(2)
    return scale * cond + (1 - scale) * uncond


class ResolvedGuidance:
    """Guidance fixed for one schedule: which rows run, and how the two cfg branches become one."""

    def __init__(self, guidance: Guidance, schedule: Schedule, depth: int) -> None:
        for layer in guidance.layers:
            if not isinstance(layer, int) or not -depth < layer < depth:
                raise SettingError(f"guidance after block {layer}: this model has blocks 0 to {depth - 1} (negative counts from the end)")
        self.scales = tuple(guidance.scales(schedule))
        if not all(is_number(scale) and abs(scale) <= LARGEST_SCALE for scale in self.scales):
            raise SettingError(f"guidance scales must be numbers from {-LARGEST_SCALE:g} to {LARGEST_SCALE:g}; got {self.scales!r}")
        self.excess = tuple(guidance.excess(schedule))
        self.needs_both = any(scale != 1 for scale in self.scales)
        self.layers = frozenset(layer % depth for layer in guidance.layers)
        self._logits = guidance.logits
        self._last = self.scales[len(schedule) - 1]
        self._shares = (1.0,) * len(schedule)

    @property
    def key(self) -> Hashable:
        """Equal where rows are guided in the same way at every stage."""
        return self.scales, self.excess, self.layers, self._logits, self._last, self._shares

    def with_decay(self, shares: Sequence[float]) -> ResolvedGuidance:
        """The same guidance with this share, one per stage, of what its scale has above 1. Which rows run does not change."""
        if all(share == 1 for share in shares):
            return self
        weaker = copy.copy(self)
        weaker._shares = tuple(shares)
        above = zip(shares, self.excess, strict=False)  # a tail that no stage has stays as it is
        weaker.excess = (*(share * excess for share, excess in above), *self.excess[len(shares) :])
        weaker.scales = tuple(
            scale if excess == full else 1 + excess for scale, excess, full in zip(self.scales, weaker.excess, self.excess, strict=True)
        )
        return weaker

    def output_scale(self, stage: Stage) -> float:
        """Scale for the output of a stage; 1 where only hidden states are guided."""
        return self.scales[stage.index] if self._logits else 1.0

    def on_logits(self, out: Tensor, stage: Stage, batch: int) -> Tensor:
        """Logits of all rows [R, ...] to guided ones [B, ...]."""
        return mix(out, self.output_scale(stage), batch)

    def on_hidden(self, x: Tensor, stage: Stage, batch: int) -> Tensor:
        """Hidden states [R, N, C] with both halves replaced by their mixture."""
        scale = self.scales[stage.index]
        if x.shape[0] == batch or scale == 1:
            return x
        return mix(x, scale, batch).repeat(2, 1, 1)

    def guide_as_last(self, out: Tensor, stage: Stage, batch: int) -> Tensor:
        """Logits guided as at the last stage, whatever the stage; where a method fades guidance, by the share of `stage` alone."""
        share = self._shares[stage.index]
        scale = self._last if share == 1 else 1 + share * (self._last - 1)
        return mix(out, scale, batch) if self._logits else out[:batch]
