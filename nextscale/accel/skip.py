"""Leaving out the last stages: the simplest way to be faster, and the baseline that every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..stage import Schedule, Stage
from .method import DENSE, Method, RunSetup, StagePlan

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel


@dataclass(frozen=True)
class SkipStages(Method):
    """Skips the last `last` stages; the image is decoded from what the earlier ones drew, at full size."""

    last: int = 0

    def start(self, setup: RunSetup) -> Method:
        return _Run(self.forecast(setup.model, setup.schedule))

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        if not 0 <= self.last < len(schedule):
            raise SettingError(f"cannot skip {self.last} of {len(schedule)} stages: choose 0 to {len(schedule) - 1}")
        return (DENSE,) * (len(schedule) - self.last) + (StagePlan(skip=True),) * self.last


@dataclass(frozen=True)
class _Run(Method):
    plans: tuple[StagePlan, ...]

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return self.plans[stage.index]
