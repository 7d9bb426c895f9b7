"""Skipping stages: the simplest acceleration, and the baseline that every other method has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..stage import Schedule
from ..validation import is_int, require, require_stages
from .method import DENSE, Method, Plans, StagePlan

if TYPE_CHECKING:
    from ..models.base import NextScaleModel


@dataclass(frozen=True)
class SkipStages(Method):
    """Skips stages. The image is decoded at full size from the other stages.

    last: how many of the last stages are skipped.
    stages: indices of further ones, from 1. A later stage that runs makes up for a part of what one of these would have added.
    """

    last: int = 0
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_int(self.last):
            raise SettingError(f"last is how many of the last stages are skipped, a whole number from 0; got {self.last!r}")
        object.__setattr__(self, "stages", stage_indices(self.stages))
        if 0 in self.stages:
            raise SettingError(f"stages {list(self.stages)}: stage 0 is a single token that everything starts from; skip others")

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        if self.last >= len(schedule):
            raise SettingError(f"cannot skip {self.last} of {len(schedule)} stages: choose 0 to {len(schedule) - 1}")
        skipped = {*present_stages(self.stages, schedule), *range(len(schedule) - self.last, len(schedule))}
        return tuple(StagePlan(skip=True) if stage.index in skipped else DENSE for stage in schedule)


def stage_indices(stages: Sequence[int]) -> tuple[int, ...]:
    """Returns checked stage indices in order, each once."""
    good = isinstance(stages, Sequence) and all(map(is_int, stages))
    require(good, "stages", "a tuple of stage indices from 0", stages)
    return tuple(sorted({int(stage) for stage in stages}))


def present_stages(stages: Sequence[int], schedule: Schedule) -> Sequence[int]:
    """Returns these stage indices; raises SettingError if the schedule does not have them."""
    require_stages("stages", stages, len(schedule))
    return stages
