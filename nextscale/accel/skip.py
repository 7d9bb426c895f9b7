"""Skipping the last stages: the simplest acceleration, and the baseline that every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checks import is_whole
from ..errors import SettingError
from ..stage import Schedule
from .method import DENSE, Method, Plans, StagePlan

if TYPE_CHECKING:
    from ..models.base import NextScaleModel


@dataclass(frozen=True)
class SkipStages(Method):
    """Skips the last `last` stages. The image is decoded at full size from what the earlier stages generated."""

    last: int = 0

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        if not is_whole(self.last) or self.last >= len(schedule):
            raise SettingError(f"cannot skip {self.last} of {len(schedule)} stages: choose 0 to {len(schedule) - 1}")
        return (DENSE,) * (len(schedule) - self.last) + (StagePlan(skip=True),) * self.last
