"""Local detail of images, and agreement of two maps: tensors in, tensors out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 127.5  # levels, of 255, per unit of a tensor in [-1, 1]
FEWEST_CELLS = 4  # fewer have no quarters and no meaningful correlation


def luminance(pixels: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [-1, 1] to gray [B, H, W] in levels from 0 to 255."""
    weights = torch.tensor([0.299, 0.587, 0.114], device=pixels.device)
    return torch.einsum("bchw,c->bhw", (pixels.float().clamp(-1, 1) + 1) * LEVELS, weights)


def local_detail(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Root mean square gradient of the luminance in every cell of a grid, levels per pixel: [B, cells]."""
    gray = luminance(pixels)
    down, right = gray.diff(dim=1).square(), gray.diff(dim=2).square()
    squared = F.pad(down, (0, 0, 0, 1)) + F.pad(right, (0, 1))
    return F.interpolate(squared[:, None], size=size, mode="area").flatten(1).sqrt()


def ranks(values: Tensor) -> Tensor:
    """Ranks within every row of [B, N], from 0; equal values share the mean of theirs."""
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    first, behind = torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
    return (first + behind - 1).double() / 2


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of every row of [B, N]: [B]; NaN for a constant row or too few cells."""
    if a.shape[1] < FEWEST_CELLS:
        return torch.full(a.shape[:1], torch.nan, dtype=torch.double, device=a.device)
    x, y = ranks(a.float()), ranks(b.float())
    x, y = x - x.mean(dim=1, keepdim=True), y - y.mean(dim=1, keepdim=True)
    return (x * y).sum(dim=1) / (x.square().sum(dim=1) * y.square().sum(dim=1)).sqrt()


def extreme_quarters(detail: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Means of `values` [B, N] over the quarter of the cells with the least and over that with the most detail: [B] each."""
    order = detail.argsort(dim=1)
    quarter = max(1, order.shape[1] // 4)
    return values.gather(1, order[:, :quarter]).mean(dim=1), values.gather(1, order[:, -quarter:]).mean(dim=1)
