"""What was computed for every cell, where a caller wants to see it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..stage import Tokens


class ComputedCells:
    """How many sublayers of the stage that runs were computed for every cell of every image."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.reported = False  # something was added since this was last set to False
        self._counts: Tensor | None = None  # [B, cells]

    def add(self, tokens: Tokens, rows: Tensor, sublayers: int, share: Tensor | None = None) -> None:
        """`sublayers` sublayers computed `rows` [R, N, C] for these tokens, in full or in a share [R]; the mean of both rows counts."""
        whole = tokens.unpack(torch.ones(*rows.shape[:2], 1, device=rows.device))
        values, tokens = tokens.on_grid(whole if share is None else whole * share[:, None, None])
        grid = tokens.scatter(values, values.new_zeros(whole.shape[0], tokens.stage.cells, 1))
        counts = sublayers * grid.view(-1, self.batch, tokens.stage.cells).mean(dim=0)
        self._counts = counts if self._counts is None else self._counts + counts
        self.reported = True

    def take(self, sublayers: int) -> Tensor | None:
        """The share of `sublayers` that was computed for every cell of the stage, [B, cells]; the next stage starts at zero."""
        counts, self._counts = self._counts, None
        return None if counts is None else counts / sublayers
