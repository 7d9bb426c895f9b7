"""Compute masks: the share of the network that ran for each cell."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stage import Tokens


class ComputedCells:
    """Counts the sublayers that were computed for every cell of every image at the current stage."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.reported = False  # set by `add`; callers reset it
        self._counts: Tensor | None = None  # [B, cells]

    def add(self, tokens: Tokens, rows: Tensor, sublayers: int, share: Tensor | None = None) -> None:
        """Counts `sublayers` sublayers computed on `rows` [R, N, C], weighted by `share` [R] if given; averages the CFG branches."""
        whole = tokens.unpack(torch.ones(*rows.shape[:2], 1, device=rows.device))
        values, tokens = tokens.on_grid(whole if share is None else whole * share[:, None, None])
        grid = tokens.scatter(values, values.new_zeros(whole.shape[0], tokens.stage.cells, 1))
        counts = sublayers * grid.view(-1, self.batch, tokens.stage.cells).mean(dim=0)
        self._counts = counts if self._counts is None else self._counts + counts
        self.reported = True

    def take(self, sublayers: int) -> Tensor | None:
        """Returns the computed share of `sublayers` for every cell, [B, cells], and resets the counts."""
        counts, self._counts = self._counts, None
        return None if counts is None else counts / sublayers
