"""Classifier-free guidance: the scale per stage by which the output follows the condition.

All published forms are one formula, guided = s * cond + (1 - s) * uncond, with a scale s per stage, which each form computes differently. A
scale of 1 runs only the conditional rows.
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
"""Rows of a guided request that run: conditional and unconditional ones, or only the rows of one cfg branch."""


@dataclass(frozen=True)
class Guidance:
    """Base of the forms. `logits` guides the output; `layers` guides hidden states after those blocks (negative: from the end)."""

    logits: bool = True
    layers: tuple[int, ...] = ()

    def scales(self, schedule: Schedule) -> tuple[float, ...]:
        """Returns one scale per stage. A longer tuple is allowed; its tail only decides if the second cfg branch runs."""
        raise NotImplementedError

    def excess(self, schedule: Schedule) -> tuple[float, ...]:
        """Returns each scale minus 1, without the rounding of the sum if a form can avoid it."""
        return tuple(scale - 1 for scale in self.scales(schedule))

    def with_strength(self, strength: float) -> Guidance:
        return replace(self, strength=strength)  # type: ignore[call-arg]


@dataclass(frozen=True)
class ConstantGuidance(Guidance):
    """The same scale at every stage (Infinity; FlexVAR's demo). 1 means without guidance."""

    strength: float = 1.0

    def scales(self, schedule: Schedule) -> tuple[float, ...]:
        return (self.strength,) * len(schedule)


@dataclass(frozen=True)
class RampGuidance(Guidance):
    """Guidance that grows with the stage (VAR, HART, STAR; FlexVAR's evaluation): scale 1 + strength * i / span. 0 means without guidance.

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
    """An explicit scale per stage."""

    values: tuple[float, ...] = ()

    def scales(self, schedule: Schedule) -> tuple[float, ...]:
        if len(self.values) < len(schedule):
            raise SettingError(f"guidance must be one number, or one per stage ({len(schedule)}); got {len(self.values)} guidance scales.")
        return self.values

    def with_strength(self, strength: float) -> Guidance:
        return ConstantGuidance(self.logits, self.layers, strength)


GuidanceLike = Guidance | float | Sequence[float] | None


def resolve_guidance(value: GuidanceLike, default: Guidance) -> Guidance:
    """Returns the guidance of an argument: a number keeps the model's published form, a list is one scale per stage, None is the published
    setting.
    """
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
    """Returns the guided rows [B, ...] of [2B, ...]. With only the conditional rows left, or scale 1, returns these."""
    if rows.shape[0] == batch or scale == 1:
        return rows[:batch]
    cond, uncond = rows.chunk(2)
    return scale * cond + (1 - scale) * uncond


class ResolvedGuidance:
    """Guidance fixed for one schedule: the rows that run, and the mixture of the two cfg branches."""

    def __init__(self, guidance: Guidance, schedule: Schedule, depth: int) -> None:
        for layer in guidance.layers:
            if not isinstance(layer, int) or not -depth < layer < depth:
                raise SettingError(
                    f"guidance layers must be blocks of this model, 0 to {depth - 1}, or negative from the end; got {layer}."
                )
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
        """Value that is equal if rows are guided in the same way at every stage."""
        return self.scales, self.excess, self.layers, self._logits, self._last, self._shares

    def with_decay(self, shares: Sequence[float]) -> ResolvedGuidance:
        """Returns the same guidance with each scale's excess above 1 times this share, one per stage. The rows that run stay the same."""
        if all(share == 1 for share in shares):
            return self
        weaker = copy.copy(self)
        weaker._shares = tuple(shares)
        above = zip(shares, self.excess, strict=False)  # a tail without stages stays as it is
        weaker.excess = (*(share * excess for share, excess in above), *self.excess[len(shares) :])
        weaker.scales = tuple(
            scale if excess == full else 1 + excess for scale, excess, full in zip(self.scales, weaker.excess, self.excess, strict=True)
        )
        return weaker

    def output_scale(self, stage: Stage) -> float:
        """Returns the scale for the output of a stage; 1 if only hidden states are guided."""
        return self.scales[stage.index] if self._logits else 1.0

    def on_logits(self, out: Tensor, stage: Stage, batch: int) -> Tensor:
        """Returns guided logits of the logits of all rows [R, ...]."""
        return mix(out, self.output_scale(stage), batch)

    def on_hidden(self, x: Tensor, stage: Stage, batch: int) -> Tensor:
        """Returns hidden states [R, N, C] with both halves replaced by their mixture."""
        scale = self.scales[stage.index]
        if x.shape[0] == batch or scale == 1:
            return x
        return mix(x, scale, batch).repeat(2, 1, 1)

    def guide_as_last(self, out: Tensor, stage: Stage, batch: int) -> Tensor:
        """Returns logits guided as at the last stage; if a method fades guidance, only by the share of `stage`."""
        share = self._shares[stage.index]
        scale = self._last if share == 1 else 1 + share * (self._last - 1)
        return mix(out, scale, batch) if self._logits else out[:batch]
