"""Two-dimensional rotary position embeddings (RoPE)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stage import Rows, Schedule, Stage, Tokens

RopeMode = Literal["normalized", "raw", "resampled"]
RESAMPLED_SIDE = 128  # longer side of the table that "resampled" interpolates
THETA = 10000.0


class Rope(Protocol):
    """Rotary position embeddings of all stages of a schedule, computed once per request."""

    def apply_rotary(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Rotates float32 queries and keys x [R, N, 2, H, D] by the positions of their tokens."""
        ...

    def rows(self, rows: Rows) -> Rope:
        """Returns the same embeddings for a subset of the rows."""
        ...


def raster(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Expands the coordinates of grid rows [h] and columns [w] to all cells in raster order, [h * w] each."""
    return rows.repeat_interleave(columns.shape[0]), columns.repeat(rows.shape[0])


def steps(side: int, device: torch.device | None) -> Tensor:
    return torch.arange(side, device=device).float()


def grid_positions(
    stage: Stage, extent: tuple[int, int], mode: RopeMode = "normalized", device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Returns Infinity's row and column of every cell, [cells] each; "normalized" rounds them to the cells of `extent`."""
    rows, columns = steps(stage.height, device), steps(stage.width, device)
    if mode == "normalized":
        rows = (rows * (extent[0] / stage.height)).round()
        columns = (columns * (extent[1] / stage.width)).round()
    return raster(rows, columns)


def spanned_positions(stage: Stage, span: float, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Returns STAR's positions, [cells] each: evenly spaced from 0 to `span` at every stage."""
    return raster(*(steps(side, device) / max(side - 1, 1) * span for side in stage.size))


def proportional_positions(stage: Stage, extent: tuple[int, int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Returns HART's positions, [cells] each: the corner of a cell in units of the last stage's grid, not rounded."""
    return raster(*(steps(side, device) / side * whole for side, whole in zip(stage.size, extent, strict=True)))


def inv_freq(count: int, theta: float, device: torch.device | None) -> Tensor:
    """Returns the angular frequencies in radians per unit of position, [count], in descending order."""
    return 1.0 / theta ** (torch.arange(count, device=device).float() / count)


def rotations(first: Tensor, second: Tensor, head_dim: int, theta: float = THETA) -> Tensor:
    """Returns unit complex numbers [cells, head_dim / 2]; `first` sets the angles of the first half, `second` of the rest."""
    by = inv_freq(head_dim // 4, theta, first.device)
    angles = torch.cat([torch.outer(first, by), torch.outer(second, by)], dim=1)
    angles = angles.cpu() if angles.device.type == "mps" else angles  # torch.polar is not implemented on MPS
    return torch.polar(torch.ones_like(angles), angles).to(first.device)


def infinity_rotations(stage: Stage, extent: tuple[int, int], head_dim: int, mode: RopeMode, device: torch.device | None = None) -> Tensor:
    """Returns Infinity's rotations [cells, head_dim / 2]: rows rotate the first half of the channel pairs, columns the second."""
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
    """Returns STAR's rotations [cells, head_dim / 2]: columns rotate the first half of the channel pairs, rows the second."""
    rows, columns = spanned_positions(stage, span, device)
    return rotations(columns, rows, head_dim, theta)


class InterleavedRope:
    """RoPE over the channel pairs (2i, 2i + 1), equal in all rows (Infinity, STAR). Prefix tokens are not rotated."""

    def __init__(self, stages: Iterable[Tensor]) -> None:
        """`stages`: rotations [cells, head_dim / 2] of every stage."""
        self.stages = tuple(table[None, :, None, None] for table in stages)  # [1, N, 1, 1, head_dim / 2] each

    def at(self, tokens: Tokens) -> Tensor:
        """Returns the rotations of these tokens, [1 or R, N, 1, 1, head_dim / 2]; [1, T, 1, 1, head_dim / 2] if packed."""
        rotation = self.stages[tokens.stage.index]
        if tokens.index is not None and tokens.packing is None:
            rotation = rotation[0, tokens.index]
        if tokens.prefix:
            rotation = torch.cat([rotation.new_ones(rotation.shape[0], tokens.prefix, *rotation.shape[2:]), rotation], dim=1)
        return rotation if tokens.packing is None else rotation[:, tokens.prefix + tokens.packing.cell]

    def table(self, stage: Stage) -> Tensor:
        """Returns the rotations of all cells of a stage, [cells, head_dim / 2]."""
        return self.stages[stage.index][0, :, 0, 0]

    def apply_rotary(self, x: Tensor, tokens: Tokens) -> Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.at(tokens)).flatten(-2)

    def rows(self, rows: Rows) -> InterleavedRope:
        return self


@dataclass(frozen=True, eq=False)
class GridPlaces:
    """HART's row and column positions of the cells of all stages but the first, concatenated: [sum of cells] each."""

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
    """HART's RoPE: channels i and i + D / 2 form a pair; image positions start at the end of the row's text.

    On the grid, the cell's row sets the angles of the first half of the channels and its column sets the second half. The two channels
    of a pair therefore use different angles, which is not a rotation, but the published weights were trained with it.
    """

    def __init__(self, tables: Iterable[tuple[Tensor, Tensor]]) -> None:
        """`tables`: cosines and sines [R, tokens, 1, 1, D] of every stage; the first stage has the text's."""
        self.tables = tuple(tables)

    @classmethod
    def over_text_and_grid(cls, places: GridPlaces, head_dim: int, text_positions: Tensor) -> RotateHalfRope:
        """Builds the tables from `text_positions` [R, T]; image positions start at each row's last text position."""
        half, quarter = (inv_freq(head_dim // part, THETA, text_positions.device) for part in (2, 4))
        text = (text_positions[..., None] * half).repeat(1, 1, 2)
        begin = text_positions[:, -1:, None]  # [R, 1, 1]
        by_row, by_column = (((along[:, None] + begin) * quarter).repeat(1, 1, 2) for along in (places.rows, places.columns))
        angles = torch.cat([text, torch.cat([by_row, by_column], dim=-1)], dim=1)[:, :, None, None]
        sizes = (text.shape[1], *places.cells)
        return cls(zip(angles.cos().split(sizes, dim=1), angles.sin().split(sizes, dim=1), strict=True))

    def at(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Returns the cosines and sines of these tokens, [R, N, 1, 1, D] each; [F, T, 1, 1, D] if packed."""
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
