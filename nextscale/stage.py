"""Stages of a schedule, and the grid cells of a token tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels
from .errors import SizeError
from .varlen import VarlenLayout

Rows = slice | Tensor
"""Some rows of a batch: a slice, or their numbers [K] on the device."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One token map of the pyramid."""

    index: int
    height: int
    width: int
    start: int  # number of tokens of all earlier stages
    last: bool

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def cells(self) -> int:
        return self.height * self.width


class Schedule:
    """The stages of one image, coarse to fine.

    `extent` is the grid on which normalized positions are measured. It is the last stage, except for Infinity's small budgets, which keep
    the positions of the one-megapixel grid of the same aspect ratio.
    """

    def __init__(self, sizes: Sequence[int | tuple[int, int]], extent: tuple[int, int] | None = None) -> None:
        try:
            pairs: list[Any] = [(size, size) if isinstance(size, int) else tuple(size) for size in sizes]
        except TypeError:
            pairs = []
        if not pairs or not all(len(pair) == 2 and all(isinstance(side, int) and side >= 1 for side in pair) for pair in pairs):
            raise SizeError(f"a schedule must be a non-empty list of sides or (height, width) pairs, all at least 1; got {sizes!r}.")
        if pairs[0] != (1, 1):
            raise SizeError(f"the first stage must be the single start token (1, 1); got {pairs[0]}.")
        stages, start = [], 0
        for index, (height, width) in enumerate(pairs):
            stages.append(Stage(index, height, width, start, index == len(pairs) - 1))
            start += height * width
        self.stages = tuple(stages)
        self.sizes = tuple(stage.size for stage in stages)
        self.tokens = start
        self.extent = extent or pairs[-1]
        self._hash = hash((self.sizes, self.extent))

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the last token map."""
        return self.stages[-1].size

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: int) -> Stage:
        return self.stages[index]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Schedule) and (self.sizes, self.extent) == (other.sizes, other.extent))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Schedule({' '.join(f'{h}x{w}' for h, w in self.sizes)})"


def to_double(x: Tensor) -> Tensor:
    """Returns x in float64; on an Apple GPU, which has none, in float32."""
    return x.float() if x.device.type == "mps" else x.double()


def resize_area(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes maps [B, C, h, w] by area. The CPU does it for Apple GPUs, whose pooling takes divisible sizes only (torch before 2.11)."""
    return F.interpolate(x.cpu() if x.device.type == "mps" else x, size=size, mode="area").to(x.device)


def topk_indices_sorted(score: Tensor, keep: int) -> Tensor:
    """Returns the positions of the `keep` largest entries of every row of score [R, N], ascending: [R, keep]. Of equals the first wins."""
    if score.dtype == torch.float32 and kernels.available(score):
        return kernels.topk_indices_sorted(score, keep)
    return score.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(dim=1).values


def repeat_tail(x: Tensor, count: Tensor | None) -> Tensor:
    """Returns x [R, N, ...] with every entry beyond a row's `count` [R] replaced by the row's last real entry. None: all are real."""
    if count is None:
        return x
    place = torch.minimum(torch.arange(x.shape[1], device=x.device), count[:, None] - 1)  # [R, N]
    return x.gather(1, place.view(*place.shape, *[1] * (x.ndim - 2)).expand_as(x))


@dataclass(slots=True)
class Tokens:
    """The grid cells of an [R, N, C] tensor. `index` is None in the dense case: every cell in raster order.

    With rows of different length, `count` is the number of real entries of a row; the tail repeats the row's last real token, so that
    writing it twice changes nothing. `prefix` tokens that are not on the grid precede the others: text that is read together with the first
    stage (HART), or a summary of the prompt (STAR's refiner). The grid's own operations refuse them; see `on_grid`. With a `packing` hidden
    states of rows of different length follow one another, [F, T, C]; everything else has padded rows.
    """

    stage: Stage
    index: Tensor | None = None  # [R, N] cell numbers
    count: Tensor | None = None  # [R]
    prefix: int = 0
    packing: VarlenLayout | None = None  # the same for all cfg branches

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a row, padding included."""
        return self.prefix + (self.stage.cells if self.index is None else self.index.shape[1])

    def on_grid(self, x: Tensor) -> tuple[Tensor, Tokens]:
        """Returns hidden states x and these tokens without the prefix."""
        if not self.prefix:
            return x, self
        grid = self.with_prefix(0)
        if self.packing is not None and grid.packing is not None:
            return self.packing.without_prefix(x, grid.packing), grid
        return x[:, self.prefix :], grid

    def prepend(self, prefix: Tensor, x: Tensor) -> Tensor:
        """Returns hidden states x of these tokens without the prefix, with `prefix` [R, P, C] at the start of every row."""
        grid = self.with_prefix(0)
        if self.packing is not None and grid.packing is not None:
            return self.packing.with_prefix(prefix, x, grid.packing)
        return torch.cat([prefix, x], dim=1)

    def take(self, selection: Tensor, count: Tensor | None = None) -> Tokens:
        """Returns the tokens at `selection` [R, K], positions within this set."""
        self._require_grid()
        return Tokens(self.stage, selection if self.index is None else self.index.gather(1, selection), count)

    def top(self, score: Tensor, keep: int | Tensor, num_tokens: int | None = None) -> tuple[Tensor, Tokens]:
        """Returns the best tokens of each row by `score` [R, N], in raster order, and their positions within this set.

        Keeps `keep` of every row, or keep[r] of row r, padded to `num_tokens`. Reads nothing back from the device.
        """
        self._require_grid()
        if self.count is not None:
            padding = torch.arange(score.shape[1], device=score.device) >= self.count[:, None]
            score = score.masked_fill(padding, float("-inf"))
        if isinstance(keep, int):
            selection = topk_indices_sorted(score, keep)
            return selection, self.take(selection)
        order = score.argsort(dim=1, descending=True, stable=True)  # of equals the first, so that padding changes nothing
        if num_tokens is None:
            raise ValueError("rows that keep different numbers of tokens need a common num_tokens")
        best = order[:, :num_tokens]
        slot = torch.arange(num_tokens, device=score.device)
        # Sorting with the surplus pushed to the end puts the kept ones first, in raster order.
        kept = best.masked_fill(slot >= keep[:, None], score.shape[1]).sort(dim=1).values
        selection = kept.gather(1, torch.minimum(slot, keep[:, None] - 1))
        return selection, self.take(selection, keep.int())  # int32, as the caches of all layers take it

    def gather(self, grid: Tensor) -> Tensor:
        """Returns the entries of `grid` [R or 1, cells, C] at these tokens: [R, N, C]."""
        self._require_grid()
        if self.index is None:
            return grid
        rows = grid.expand(self.index.shape[0], -1, -1)
        return rows.gather(1, self.index[..., None].expand(-1, -1, grid.shape[-1]))

    def scatter(self, values: Tensor, grid: Tensor) -> Tensor:
        """Returns a copy of `grid` [R, cells, C] with `values` [R, N, C] written at these tokens."""
        self._require_grid()
        if self.index is None:
            return values
        return grid.scatter(1, self.index[..., None].expand(-1, -1, values.shape[-1]), values)

    def with_prefix(self, prefix: int) -> Tokens:
        tokens = Tokens(self.stage, self.index, self.count, prefix)
        if self.packing is None or prefix == self.prefix:
            return replace(tokens, packing=self.packing)
        return tokens.packed(self.packing.images, self.packing.total + self.packing.images * (prefix - self.prefix))

    def repeat(self, times: int) -> Tokens:
        """Returns the same cells for several times as many rows."""
        if self.index is None:
            return self
        count = None if self.count is None else self.count.repeat(times)
        return Tokens(self.stage, self.index.repeat(times, 1), count, self.prefix, self.packing)

    def rows(self, rows: slice) -> Tokens:
        """Returns these tokens for some of the rows; if they are packed, for the rows of a cfg branch."""
        if self.index is None:
            return self
        return Tokens(self.stage, self.index[rows], None if self.count is None else self.count[rows], self.prefix, self.packing)

    # --- packed rows

    def packed(self, images: int, total: int) -> Tokens:
        """Returns the same tokens, with the hidden states of `images` rows one after another in `total` entries."""
        assert self.index is not None
        count = self.count
        if count is None:
            count = torch.full(self.index.shape[:1], self.index.shape[1], dtype=torch.int32, device=self.index.device)
        return replace(self, count=count, packing=VarlenLayout.of(self.index[:images], count[:images], total, self.prefix))

    def unpacked(self) -> Tokens:
        return self if self.packing is None else replace(self, packing=None)

    def pack(self, rows: Tensor) -> Tensor:
        """Returns padded rows [R, N, ...] in the layout of these tokens' hidden states."""
        return rows if self.packing is None else self.packing.pack(rows)

    def unpack(self, x: Tensor) -> Tensor:
        """Returns hidden states, or values per token, as padded rows [R, N, ...]."""
        return x if self.packing is None else self.packing.unpack(x)

    def of_rows(self, values: Tensor) -> Tensor:
        """Returns values [R, 1, C] of rows in a shape that broadcasts to hidden states."""
        return values if self.packing is None else self.packing.of_rows(values)

    def rows_of(self, x: Tensor) -> int:
        """Returns the number of rows of hidden states x."""
        return x.shape[0] * (1 if self.packing is None else self.packing.images)

    def branch_size(self, images: int) -> int:
        """Returns the number of entries on the first axis of hidden states of a cfg branch with this number of images."""
        return images if self.packing is None else 1

    @property
    def whole(self) -> bool:
        """Returns True if every cell of the stage is among these, in any order."""
        return self.count is None and self.num_tokens == self.prefix + self.stage.cells

    def aligned(self, other: Tokens) -> bool:
        """Returns True if these tokens are known to be among the others without comparing cells."""
        return other is self or (other.index is None and self.index is None)

    def move(self, values: Tensor, target: Tokens) -> Tensor:
        """Returns values [R, N, ...] of these tokens at the tokens of `target` [R, M, ...], zero at tokens that are not among these."""
        if self.aligned(target):
            return values
        flat = values.flatten(2) if values.ndim > 2 else values[..., None]
        grid = self.scatter(flat, flat.new_zeros(flat.shape[0], self.stage.cells, flat.shape[2]))
        moved = target.gather(grid)
        return moved.view(*moved.shape[:2], *values.shape[2:])

    def _require_grid(self) -> None:
        if self.prefix:
            raise ValueError(f"{self.prefix} tokens of stage {self.stage.index} are not on its grid and cannot be selected among its cells")
