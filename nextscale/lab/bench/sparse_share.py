"""SparseVAR where random weights draw noise, which has detail everywhere: a share takes the place of its threshold."""

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
    """Each stage keeps this share of its cells, those that change most, and the anchors. With an anchor in 16 cells, 0.25 is about 30 %."""

    share: float = 0.25

    @property
    def label(self) -> str:
        return f"SparseVAR, the liveliest {self.share:.0%} and anchors"

    def start(self, setup: RunSetup) -> MethodRun:
        super().start(setup)  # refuses what does not fit
        return ShareRun(self, setup)


@dataclass(eq=False)
class ShareRun(SparseRun):
    settings: SparseVARShare

    def _score(self, stage: Stage, canvas: Canvas, left_out: Tensor | None) -> tuple[Tensor, Tensor] | None:
        score = super()._score(stage, canvas, left_out)
        return None if score is None else (score[0], all_but_topk(score[0], self.settings.share, left_out))


def all_but_topk(detail: Tensor, share: float, left_out: Tensor | None) -> Tensor:
    """Cells [B, cells] without the liveliest of those that were not left out before."""
    score = detail if left_out is None else detail.masked_fill(left_out, -torch.inf)
    liveliest = score.topk(max(1, round(share * detail.shape[1])), dim=1).indices
    return torch.ones_like(detail, dtype=torch.bool).scatter(1, liveliest, False)
