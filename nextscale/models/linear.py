"""The linear layers of blocks: torch's products, and our own kernel for few rows where it was measured to be faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels.few_rows_tiles import TILES, RowTile, row_tile


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        tile = tile_of(x, self)
        return super().forward(x) if tile is None else kernels.linear_few_rows(x, self.weight, self.bias, tile)


def tile_of(x: Tensor, linear: nn.Linear) -> RowTile | None:
    """How our kernel shares out the product of x [..., K] with these weights; None where torch computes it."""
    if not TILES or x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != linear.weight.dtype or not kernels.available(x):
        return None
    return row_tile(x.numel() // x.shape[-1], linear.out_features, linear.in_features)
