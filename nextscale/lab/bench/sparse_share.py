"""SparseVAR for random weights, whose images are noise with detail everywhere: a share takes the place of its threshold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...accel.method import MethodRun, RunSetup
from ...accel.sparsevar import SparseRun, SparseVAR
from ...canvas import Canvas
from ...stage import Stage


@dataclass(frozen=True)
class SparseVARShare(SparseVAR):
    """Each stage keeps the top `share` of its cells by change, and the anchors. One anchor in 16 cells makes 30 % of a quarter."""

    share: float = 0.25

    @property
    def label(self) -> str:
        return f"SparseVAR, top {self.share:.0%} by change and anchors"

    def start(self, setup: RunSetup) -> MethodRun:
        super().start(setup)  # refuses what does not fit
        return ShareRun(self, setup)


@dataclass(eq=False)
class ShareRun(SparseRun):
    settings: SparseVARShare

    def _score(self, stage: Stage, canvas: Canvas, left_out: Tensor | None) -> tuple[Tensor, Tensor] | None:
        score = super()._score(stage, canvas, left_out)
        return None if score is None else (score[0], all_but_topk(score[0], self.settings.share, left_out))


def all_but_topk(change: Tensor, share: float, left_out: Tensor | None) -> Tensor:
    """True for all of the cells [B, cells] but the top `share` by change; cells that were left out before are not among the top."""
    score = change if left_out is None else change.masked_fill(left_out, -torch.inf)
    top = score.topk(max(1, round(share * change.shape[1])), dim=1).indices
    return torch.ones_like(change, dtype=torch.bool).scatter(1, top, False)
