"""Packed rows of different length, so that layers that treat every token by itself run no padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Layout of the tokens of B images with different token counts: one image after another, T entries in total.

    Both rows of a guided pair have the same cells, so that hidden states are [F, T, C], one entry per cfg branch, instead of padded rows [F
    * B, N, C]. Entries after the last token are padding: they repeat that token, and their results are not read.
    """

    image: Tensor  # [T]
    place: Tensor  # [T], position among the tokens of its image
    cell: Tensor  # [T], on the grid; prefix tokens count up to -1
    cu_seqlens: Tensor  # [B + 1], the first entry of each image, and the end of the last; int32
    slots: Tensor  # [B * N], the entry of every position in a padded row
    width: int  # N

    @classmethod
    def of(cls, index: Tensor, count: Tensor, total: int, prefix: int = 0) -> VarlenLayout:
        """Returns the layout of padded rows with cells `index` [B, N], of which count[b] are real, after `prefix` tokens; `total`: T.

        Reads nothing back from the device. If `total` is too small, the last tokens are left out.
        """
        width = index.shape[1] + prefix
        counts = count.long() + prefix
        ends = counts.cumsum(dim=0)
        begins = ends - counts
        entry = torch.minimum(torch.arange(total, device=index.device), ends[-1] - 1)
        image = torch.searchsorted(ends, entry, right=True)
        place = entry - begins[image]
        cell = index[image, (place - prefix).clamp(min=0)]
        if prefix:
            cell = torch.where(place < prefix, place - prefix, cell)
        last = counts[:, None] - 1
        slots = begins[:, None] + torch.minimum(torch.arange(width, device=index.device), last)
        cu_seqlens = torch.cat([begins, ends[-1:]]).clamp(max=total).int()
        return cls(image, place, cell, cu_seqlens, slots.clamp(max=total - 1).flatten(), width)

    @property
    def images(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def total(self) -> int:
        return self.image.shape[0]

    def pack(self, rows: Tensor) -> Tensor:
        """Packs padded rows [F * B, N, ...] to [F, T, ...]."""
        return self._of_images(rows).index_select(1, self.image * self.width + self.place)

    def unpack(self, x: Tensor) -> Tensor:
        """Unpacks [F, T, ...] to padded rows [F * B, N, ...]."""
        return x.index_select(1, self.slots).unflatten(1, (self.images, self.width)).flatten(0, 1)

    def gather(self, grid: Tensor) -> Tensor:
        """Returns the entries of `grid` [F * B, cells, C] at the tokens: [F, T, C]."""
        return self._of_images(grid).index_select(1, self.image * grid.shape[1] + self.cell)

    def of_rows(self, values: Tensor) -> Tensor:
        """Returns values [F * B, 1, C] of rows for every token: [F, T, C]."""
        return self._of_images(values).index_select(1, self.image)

    def repeat_last(self, x: Tensor) -> Tensor:
        """Returns x [F, T, ...] with the last token's value at all padding."""
        entry = torch.arange(self.total, device=x.device)
        return x.index_select(1, torch.minimum(entry, self.cu_seqlens[-1] - 1))

    def row(self, branches: int) -> Tensor:
        """Returns the row of every entry among F * B, [F, T]."""
        return torch.arange(branches, device=self.image.device)[:, None] * self.images + self.image

    def without_prefix(self, x: Tensor, grid: VarlenLayout) -> Tensor:
        """Returns x [F, T, C] at the tokens on the grid, which are packed by `grid`."""
        prefix = self.width - grid.width
        entry = self.cu_seqlens[grid.image] + prefix + grid.place
        return x.index_select(1, entry.clamp(max=self.total - 1))

    def with_prefix(self, prefix: Tensor, x: Tensor, grid: VarlenLayout) -> Tensor:
        """Adds the tokens before the grid: [F * B, P, C] and x [F, T, C] packed by `grid` to this packing."""
        before = prefix.shape[1]
        both = torch.cat([self._of_images(prefix), x], dim=1)
        on_grid = self.images * before + grid.cu_seqlens[self.image] + self.place - before
        entry = torch.where(self.place < before, self.image * before + self.place, on_grid)
        return both.index_select(1, entry.clamp(max=both.shape[1] - 1))

    def _of_images(self, rows: Tensor) -> Tensor:
        """Returns [F * B, N, ...] as [F, B * N, ...]."""
        return rows.unflatten(0, (-1, self.images)).flatten(1, 2)
