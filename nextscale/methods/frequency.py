"""Which cells of a token map have high frequencies, and which anchor propagates to each of the others: tensors in, tensors out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]
ResizeMode = Literal["bilinear", "nearest", "nearest-exact"]

SMALLEST_LENGTH = 1e-12  # only keeps a zero vector from dividing by zero
ROUNDING = 1e-5  # cosine similarities that differ by less are equal; float32 products of 4096 numbers differ by up to 1e-6


@dataclass(frozen=True, slots=True)
class GridMap:
    """Values [B, cells, C] of every cell of a stage."""

    values: Tensor
    size: Size

    def at(self, size: Size, mode: ResizeMode = "bilinear") -> Tensor:
        """The values resized to another stage, [B, cells, C]. They are always in new memory, and those of a cell are adjacent."""
        grid = self.values.unflatten(1, self.size).permute(0, 3, 1, 2)  # channels last, which the result then is too
        return F.interpolate(grid, size=size, mode=mode).permute(0, 2, 3, 1).flatten(1, 2)


# --- where the detail is


def feature_change(before: Tensor, after: Tensor) -> Tensor:
    """Mean squared change of every token's features [R, N, C] by a block, [R, N], in float32 (SparseVAR, eq. 1)."""
    return (after.float() - before.float()).square().mean(dim=-1)


def image_change(before: Tensor, after: Tensor, size: Size) -> Tensor:
    """Mean absolute change between two versions of images [B, 3, H, W] in every cell of a grid, [B, cells].

    A smaller first version is enlarged (FlexVAR's images grow with the stage).
    """
    if before.shape != after.shape:
        before = F.interpolate(before, size=after.shape[2:], mode="bilinear")
    return F.interpolate((after - before).abs().mean(dim=1, keepdim=True), size=size, mode="area").flatten(1)


def neighbour_similarity(vectors: Tensor, size: Size) -> Tensor:
    """Mean cosine similarity of every cell's vector [B, cells, V] to those of the cells around it, up to eight: [B, cells]."""
    grid = F.normalize(vectors, dim=-1).unflatten(1, size)
    height, width = size
    total = grid.new_zeros(grid.shape[:3])
    number = grid.new_zeros(grid.shape[1:3])
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):  # every pair of neighbours once
        here = (slice(0, height - down), slice(max(0, -right), width - max(0, right)))
        there = (slice(down, height), slice(max(0, right), width - max(0, -right)))
        similarity = (grid[:, *here] * grid[:, *there]).sum(dim=-1)
        for cells in (here, there):
            total[:, *cells] += similarity
            number[cells] += 1
    return (total / number.clamp(min=1)).flatten(1)


def largest(values: Tensor, left_out: Tensor | None) -> Tensor:
    """The largest of every image's values [B, cells] at cells that were not left out before, [B, 1]."""
    return (values if left_out is None else values.masked_fill(left_out, -torch.inf)).amax(dim=1, keepdim=True)


def in_steps(values: Tensor) -> Tensor:
    """Values [B, cells] in whole steps of `ROUNDING` times the largest of their image: those that differ by rounding alone are equal.

    Where a map is enlarged many cells have the same value, and a sum rounds differently in every batch.
    """
    most = values.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    return (values / most / ROUNDING).round()


def low_change(change: Tensor, tau: float, left_out: Tensor | None = None) -> Tensor:
    """Which cells [B, cells] change by less than `tau` times the largest change of their image (SparseVAR, eq. 2)."""
    return change < tau * largest(change, left_out)


def high_similarity(similarity: Tensor, tau: float, left_out: Tensor | None = None) -> Tensor:
    """Which cells [B, cells] are more similar to their neighbours than `tau` times the largest similarity of their image."""
    return similarity > tau * largest(similarity, left_out)


def share_above(change: Tensor, tau: float, most: Tensor) -> Tensor:
    """Share of the cells [B, cells] of every image that change by more than `tau` times `most` [B, 1] or [1, 1]: [B], float32."""
    return (change / most > tau).float().mean(dim=1)


def largest_cells(values: Tensor, count: Tensor) -> Tensor:
    """Marks the `count` [B] cells of every image with the largest `values` [B, cells]. Of equal ones the later are taken."""
    rank = values.argsort(dim=1, stable=True).argsort(dim=1)
    return rank >= values.shape[1] - count[:, None]


# --- which anchor propagates to which cell


def anchor_cells(size: Size, alpha: int, device: torch.device, edges: bool = False) -> Tensor:
    """Cell numbers of the top left token of every alpha x alpha window; windows at the right and lower edge may be cut.

    With `edges` the last row and the last column have anchors too.
    """
    rows, columns = (anchor_places(side, alpha, device, edges) for side in size)
    return (rows[:, None] * size[1] + columns).flatten()


def anchor_places(side: int, alpha: int, device: torch.device, edges: bool) -> Tensor:
    """Rows or columns that have anchors, ascending. They are made on the device, so that a graph can be captured."""
    places = torch.arange(0, side, min(alpha, side), device=device)
    return torch.cat([places, torch.full_like(places[:1], side - 1)]) if edges and (side - 1) % alpha else places


def anchor_count(size: Size, alpha: int, edges: bool = False) -> int:
    """The number of anchors on a grid."""
    return math.prod(-(-side // alpha) + (edges and (side - 1) % alpha > 0) for side in size)


def best_anchor(vectors: Tensor, anchors: Tensor, size: Size, nearest: int | None = None) -> tuple[Tensor, Tensor]:
    """Finds for every cell of `vectors` [B, cells, V] the most similar of the cells `anchors` [A], by cosine (SparseVAR, eq. 3).

    Returns the similarity and the number of that anchor's cell, [B, cells] each. Of equally similar anchors the nearest is taken: where
    vectors were copied from a common anchor a stage earlier, many are equal, and rounding must not decide. `nearest` is how many anchors
    are compared, those nearest to the cell on the grid; None compares all.
    """
    candidates = F.normalize(vectors[:, anchors], dim=-1)
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=SMALLEST_LENGTH)
    similarity = (vectors @ candidates.transpose(1, 2)).div_(lengths)  # [B, cells, A]
    nearness = anchor_order(anchors, size)
    if nearest is not None and nearest < len(anchors):
        similarity = similarity.masked_fill_(nearness > nearness.sort(dim=1).values[:, nearest - 1 : nearest], -torch.inf)
    best = similarity.amax(dim=-1, keepdim=True)
    chosen = nearness.where(similarity >= best - ROUNDING, nearness.amax() + 1).argmin(dim=-1)
    return best[..., 0], anchors[chosen]


def anchor_order(anchors: Tensor, size: Size) -> Tensor:
    """Numbers [cells, A] that order the anchors [A] by their distance from every cell; of equally distant ones the first comes first."""
    cells = torch.arange(size[0] * size[1], device=anchors.device)[:, None]
    down, right = cells // size[1] - anchors // size[1], cells % size[1] - anchors % size[1]
    return (down**2 + right**2) * len(anchors) + torch.arange(len(anchors), device=anchors.device)
