"""Example pictures of what is measured, on sheets of small tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

TILE = 128  # pixels, the longer side
GAP = 4
BRIGHTEST = 0.98  # share of a map's cells that are not cut to white


def image_tile(pixels: Tensor) -> Tensor:
    """An image [3, H, W] in [-1, 1] to a small one, [3, h, w] in [0, 1], on the CPU."""
    factor = TILE / max(pixels.shape[1:])
    size = [max(1, round(side * factor)) for side in pixels.shape[1:]]
    small = F.interpolate((pixels[None].float().clamp(-1, 1) + 1) / 2, size=size, mode="area" if factor < 1 else "nearest-exact")
    return small[0].cpu()


def map_tile(values: Tensor, size: tuple[int, int], tile: tuple[int, int]) -> Tensor:
    """A map [cells] in grey, as bright as it is large there: [3, h, w]."""
    values = values.float().view(1, 1, *size)
    bright = values / values.flatten().quantile(BRIGHTEST).clamp(min=1e-12)
    return F.interpolate(bright.clamp(0, 1), size=tile, mode="nearest-exact")[0].expand(3, -1, -1).cpu()


def sheet(rows: Sequence[Sequence[Tensor]]) -> Image.Image:
    """Rows of tiles of equal size [3, h, w] on white."""
    height, width = rows[0][0].shape[1:]
    columns = max(len(row) for row in rows)
    page = torch.ones(3, len(rows) * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for down, row in enumerate(rows):
        for right, tile in enumerate(row):
            y, x = down * (height + GAP), right * (width + GAP)
            page[:, y : y + height, x : x + width] = tile
    return Image.fromarray(np.rint(page.permute(1, 2, 0).numpy() * 255).astype(np.uint8))
