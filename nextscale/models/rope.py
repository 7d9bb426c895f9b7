"""Two-dimensional rotary positions: where a token lies on the image rotates the channels of its queries and keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stage import Rows, Schedule, Stage, Tokens

RopeMode = Literal["normalized", "raw", "resampled"]
RESAMPLED_SIDE = 128  # longer side of the table that the "resampled" mode shrinks
THETA = 10000.0


class Rope(Protocol):
    """The turns of a whole schedule, computed once per request."""

    def apply_rotary(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Queries and keys x [R, N, 2, H, D], float32, turned to where their tokens are."""
        ...

    def rows(self, rows: Rows) -> Rope:
        """The same for some of the rows only."""
        ...


def raster(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates of a grid's rows [h] and columns [w] to those of every cell in raster order, [h * w] each."""
    return rows.repeat_interleave(columns.shape[0]), columns.repeat(rows.shape[0])


def steps(side: int, device: torch.device | None) -> Tensor:
    return torch.arange(side, device=device).float()


def grid_positions(
    stage: Stage, extent: tuple[int, int], mode: RopeMode = "normalized", device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Infinity's row and column of every cell, [cells] each; normalised ones are rounded to the cells of `extent`."""
    rows, columns = steps(stage.height, device), steps(stage.width, device)
    if mode == "normalized":
        rows = (rows * (extent[0] / stage.height)).round()
        columns = (columns * (extent[1] / stage.width)).round()
    return raster(rows, columns)


def spanned_positions(stage: Stage, span: float, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """STAR's: from 0 at the first cell of every stage to `span` at its last."""
    return raster(*(steps(side, device) / max(side - 1, 1) * span for side in stage.size))


def proportional_positions(stage: Stage, extent: tuple[int, int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """HART's: where the corner of a cell lies on the grid of the last stage, not rounded."""
    return raster(*(steps(side, device) / side * whole for side, whole in zip(stage.size, extent, strict=True)))


def inv_freq(count: int, theta: float, device: torch.device | None) -> Tensor:
    """Radians per unit of position, [count], from fast to slow."""
    return 1.0 / theta ** (torch.arange(count, device=device).float() / count)


def rotations(first: Tensor, second: Tensor, head_dim: int, theta: float = THETA) -> Tensor:
    """Unit complex numbers [cells, head_dim / 2]: `first` coordinates turn the first half of the channel pairs, `second` the rest."""
    by = inv_freq(head_dim // 4, theta, first.device)
    angles = torch.cat([torch.outer(first, by), torch.outer(second, by)], dim=1)
    angles = angles.cpu() if angles.device.type == "mps" else angles  # Apple GPUs multiply complex numbers, but have no polar
    return torch.polar(torch.ones_like(angles), angles).to(first.device)


def infinity_rotations(stage: Stage, extent: tuple[int, int], head_dim: int, mode: RopeMode, device: torch.device | None = None) -> Tensor:
    """Rows turn the first half of the pairs, columns the second."""
    if mode != "resampled":
        return rotations(*grid_positions(stage, extent, mode, device), head_dim)
    longer, shorter = max(extent), int(RESAMPLED_SIDE / max(extent) * min(extent))
    size = (RESAMPLED_SIDE, shorter) if extent[0] == longer else (shorter, RESAMPLED_SIDE)
    table = Stage(0, *size, start=0, last=True)
    fine = torch.view_as_real(rotations(*grid_positions(table, size, "raw", device), head_dim))  # [cells, half, 2]
    fine = fine.flatten(1).T.unflatten(1, size)[None]  # [1, half * 2, h, w]
    coarse = F.interpolate(fine, size=stage.size, mode="bilinear", align_corners=True)
    return torch.view_as_complex(coarse[0].flatten(1).T.unflatten(1, (-1, 2)).contiguous())


def star_rotations(stage: Stage, head_dim: int, span: float, theta: float, device: torch.device | None = None) -> Tensor:
    """Columns turn the first half of the pairs, rows the second."""
    rows, columns = spanned_positions(stage, span, device)
    return rotations(columns, rows, head_dim, theta)


class InterleavedRope:
    """Turns the channel pairs (2i, 2i + 1), alike in all rows (Infinity, STAR). A prefix stays as it is."""

    def __init__(self, stages: Iterable[Tensor]) -> None:
        """`stages`: rotations [cells, head_dim / 2] of every stage."""
        self.stages = tuple(table[None, :, None, None] for table in stages)  # [1, N, 1, 1, head_dim / 2] each

    def at(self, tokens: Tokens) -> Tensor:
        """Rotations of these tokens, [1 or R, N, 1, 1, head_dim / 2]; of packed ones [1, T, 1, 1, head_dim / 2]."""
        rotation = self.stages[tokens.stage.index]
        if tokens.index is not None and tokens.packing is None:
            rotation = rotation[0, tokens.index]
        if tokens.prefix:
            rotation = torch.cat([rotation.new_ones(rotation.shape[0], tokens.prefix, *rotation.shape[2:]), rotation], dim=1)
        return rotation if tokens.packing is None else rotation[:, tokens.prefix + tokens.packing.cell]

    def table(self, stage: Stage) -> Tensor:
        """Rotations of all cells of a stage, [cells, head_dim / 2]."""
        return self.stages[stage.index][0, :, 0, 0]

    def apply_rotary(self, x: Tensor, tokens: Tokens) -> Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.at(tokens)).flatten(-2)

    def rows(self, rows: Rows) -> InterleavedRope:
        return self


@dataclass(frozen=True, eq=False)
class GridPlaces:
    """HART's rows and columns of the cells of all stages but the first, one stage after another: [sum of cells] each."""

    rows: Tensor
    columns: Tensor
    cells: tuple[int, ...]  # of these stages

    @classmethod
    def of(cls, schedule: Schedule, device: torch.device | None = None) -> GridPlaces:
        later = schedule.stages[1:]
        places = [proportional_positions(stage, schedule.extent, device) for stage in later]
        rows, columns = ([place[axis] for place in places] or [torch.empty(0, device=device)] for axis in (0, 1))
        return cls(torch.cat(rows), torch.cat(columns), tuple(stage.cells for stage in later))


class RotateHalfRope:
    """HART: channels i and i + D / 2 are partners; the image's positions begin where the text's end, which differs from row to row.

    On the grid the first half of the channels takes its angles from the cell's row and the second half from its column, so partners
    disagree and lengths change: not a rotation, but what the published weights were trained with.
    """

    def __init__(self, tables: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`tables`: cosines and sines [R, tokens, 1, 1, D] of every stage, the text's in place of the first stage's."""
        self.tables = tuple(tables)

    @classmethod
    def over_text_and_grid(cls, places: GridPlaces, head_dim: int, text_positions: Tensor) -> RotateHalfRope:
        """`text_positions` [R, T]; the last one is where the row's image begins."""
        half, quarter = (inv_freq(head_dim // part, THETA, text_positions.device) for part in (2, 4))
        text = (text_positions[..., None] * half).repeat(1, 1, 2)
        begin = text_positions[:, -1:, None]  # [R, 1, 1]
        by_row, by_column = (((along[:, None] + begin) * quarter).repeat(1, 1, 2) for along in (places.rows, places.columns))
        angles = torch.cat([text, torch.cat([by_row, by_column], dim=-1)], dim=1)[:, :, None, None]
        sizes = (text.shape[1], *places.cells)
        return cls(zip(angles.cos().split(sizes, dim=1), angles.sin().split(sizes, dim=1), strict=True))

    def at(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these tokens, [R, N, 1, 1, D] each; of packed ones [F, T, 1, 1, D]."""
        cosines, sines = self.tables[tokens.stage.index]
        if tokens.index is None:
            return cosines, sines
        if tokens.packing is not None:
            row, place = tokens.packing.row(cosines.shape[0] // tokens.packing.images), tokens.prefix + tokens.packing.cell
            return cosines[row, place], sines[row, place]
        row = torch.arange(tokens.index.shape[0], device=tokens.index.device)[:, None]
        before = torch.arange(tokens.prefix, device=tokens.index.device).expand(row.shape[0], -1)
        place = torch.cat([before, tokens.prefix + tokens.index], dim=1)
        return cosines[row, place], sines[row, place]

    def apply_rotary(self, x: Tensor, tokens: Tokens) -> Tensor:
        cosines, sines = self.at(tokens)
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * cosines, torch.cat([-second, first], dim=-1), sines)

    def rows(self, rows: Rows) -> RotateHalfRope:
        return RotateHalfRope((cosines[rows], sines[rows]) for cosines, sines in self.tables)
