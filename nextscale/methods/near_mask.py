"""Mask-driven sparsity: late stages of an edit compute only the cells near the mask. New for next-scale models.

For other models KV-Edit, InstGenIE and NEP do related things.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..edit import EditCanvas
from ..errors import SettingError
from ..stage import Schedule, Stage, Tokens
from ..validation import is_int, require, require_stages
from .method import Method, MethodRun, Plans, RunSetup, StagePlan, TokenCounts
from .sparsevar import first_late
from .token_ops import marked_tokens, require_own_text, with_counts

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel


@dataclass(frozen=True)
class NearMask(Method):
    """Leaves cells away from the mask of an edit out of late stages: they keep the image's codes.

    Early stages run in full and carry the context. `Pipeline.edit` adds this method if there is a mask.

    first_stage: index of the first reduced stage. None is the same as in SparseVAR, 10 of 13 for Infinity.
    margin: cells around the mask that are computed too, as context. On nano a wider margin brings edits nearer to those with all cells, at
        a higher cost; an earlier first stage does not.
    """

    first_stage: int | None = None
    margin: int = 2

    exclusive = frozenset({"tokens"})
    data_dependent = True

    def __post_init__(self) -> None:
        require(self.first_stage is None or is_int(self.first_stage, 1), "first_stage", "a stage index from 1", self.first_stage)
        require(is_int(self.margin), "margin", "a number of cells from 0", self.margin)

    def first_reduced(self, model: NextScaleModel, schedule: Schedule) -> int:
        if self.first_stage is None:
            return max(1, first_late(model, schedule))
        require_stages("first_stage", [self.first_stage], len(schedule))
        return self.first_stage

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        first = self.first_reduced(model, schedule)
        # The number of all cells, too: spans that need every cell are refused before anything runs.
        return tuple(StagePlan(num_tokens=max(1, round(kept * one.cells)) if one.index >= first else None) for one in schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        require_own_text(setup.model, setup.batch, "NearMask keeps other tokens")
        return NearMaskRun(self.margin, self.first_reduced(setup.model, setup.schedule))


@dataclass(eq=False)
class NearMaskRun(MethodRun):
    margin: int
    first: int
    kept: Tensor | None = None  # [B, cells] of the stage that runs; None: all cells
    room: TokenCounts | None = None

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        if not isinstance(canvas, EditCanvas):
            raise SettingError("NearMask needs the mask of an edit: call pipe.edit(image, prompt, mask=...), or choose another method.")
        self.kept = None
        if stage.index < self.first:
            return None
        kept = canvas.edit.near(stage, self.margin)
        kept[:, 0] |= ~kept.any(dim=1)  # a stage runs at least one cell
        self.kept = kept
        return kept.sum(dim=1)

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        self.room = counts
        return with_counts(planned, stage, counts)

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        if self.kept is None or self.room is None or self.room.fewest == tokens.stage.cells:
            return tokens
        return marked_tokens(tokens.stage, self.kept, self.room)
