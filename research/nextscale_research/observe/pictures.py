"""Example images, on sheets of small tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

TILE = 128  # pixels, the longer side
GAP, LETTERS = 4, 13
BRIGHTEST = 0.98  # share of a map's cells that are not cut to white


def image_tile(pixels: Tensor) -> Tensor:
    """An image [3, H, W] in [-1, 1] to a small one, [3, h, w] in [0, 1], on the CPU."""
    factor = TILE / max(pixels.shape[1:])
    size = [max(1, round(side * factor)) for side in pixels.shape[1:]]
    small = F.interpolate((pixels[None].float().clamp(-1, 1) + 1) / 2, size=size, mode="area" if factor < 1 else "nearest-exact")
    return small[0].cpu()


def map_tile(values: Tensor, size: tuple[int, int], tile: tuple[int, int]) -> Tensor:
    """A map [cells] in gray, brighter where it is larger: [3, h, w]."""
    values = values.float().view(1, 1, *size)
    bright = values / values.flatten().quantile(BRIGHTEST).clamp(min=1e-12)
    return F.interpolate(bright.clamp(0, 1), size=tile, mode="nearest-exact")[0].expand(3, -1, -1).cpu()


def sheet(rows: Sequence[tuple[str, Sequence[Tensor]]], columns: Sequence[str]) -> Image.Image:
    """Named rows of tiles of equal size [3, h, w] on white, under the names of the columns."""
    font = ImageFont.load_default(LETTERS)
    height, width = rows[0][1][0].shape[1:]
    left, top = round(max(font.getlength(name) for name, _ in rows)) + 2 * GAP, LETTERS + 2 * GAP
    page = Image.new("RGB", (left + len(columns) * (width + GAP), top + len(rows) * (height + GAP)), "white")
    pen = ImageDraw.Draw(page)
    for right, name in enumerate(columns):
        pen.text((left + right * (width + GAP), GAP), name, "black", font)
    for down, (name, tiles) in enumerate(rows):
        y = top + down * (height + GAP)
        pen.text((GAP, y), name, "black", font)
        for right, tile in enumerate(tiles):
            levels = np.rint(tile.permute(1, 2, 0).numpy() * 255).astype(np.uint8)
            page.paste(Image.fromarray(levels), (left + right * (width + GAP), y))
    return page
