"""Dropping guidance: late stages run one row per image instead of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from ..guidance import CfgBranch
from ..stage import Schedule
from ..validation import is_int, require, require_choice
from .method import Method, Plans, StagePlan

if TYPE_CHECKING:
    from ..models.base import NextScaleModel


@dataclass(frozen=True)
class DropGuidance(Method):
    """Runs only the rows of one cfg branch from a stage on. A request without guidance stays the same.

    first_stage: index of the first stage without guidance. None: the last two stages run without it. The number of stages, or any larger
        number, never drops guidance.
    kept_rows: the branch that continues. "cond", the conditional rows, is a guidance scale of 1: a negative prompt acts on the early
        stages only. "uncond" is StageVAR's choice: the late stages are generated from the empty prompt, or from the negative one. Both
        cost the same; "cond" is nearer to dense generation on nano (LPIPS 0.032 against 0.044 from stage 11 on).
    fade: number of stages before `first_stage` over which the scale falls evenly to 1: `DropGuidance(11, fade=2)` multiplies the excess of
        the scale above 1 by 2/3 at stage 9 and by 1/3 at stage 10. These stages still run both rows, at full cost. Only with "cond".
    """

    first_stage: int | None = None
    kept_rows: CfgBranch = "cond"
    fade: int = 0

    def __post_init__(self) -> None:
        require(self.first_stage is None or is_int(self.first_stage), "first_stage", "a stage index from 0", self.first_stage)
        require_choice("kept_rows", self.kept_rows, get_args(CfgBranch))
        require(is_int(self.fade), "fade", "a number of stages from 0", self.fade)
        require(not self.fade or self.kept_rows == "cond", "kept_rows", '"cond" with fade, since the scale fades to 1', self.kept_rows)

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        first = max(1, len(schedule) - 2) if self.first_stage is None else self.first_stage
        require(self.fade <= first, "fade", f"at most {first}, the stages before the first without guidance", self.fade)
        return tuple(self._plan(first - stage.index) if guided else StagePlan() for stage in schedule)

    def _plan(self, before: int) -> StagePlan:
        """Returns the plan of the stage that is this number of stages before the first without guidance."""
        if before <= 0:
            return StagePlan(cfg_branches=self.kept_rows)
        return StagePlan(guidance_decay=before / (self.fade + 1) if before <= self.fade else 1.0)
