"""Two-dimensional rotary positions: rows turn the first half of a head's channels, columns the second half."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stage import Schedule, Stage, Tokens

RopeMode = Literal["normalized", "raw", "resampled"]
RESAMPLED_SIDE = 128  # longer side of the table that the "resampled" mode shrinks


def grid_positions(
    stage: Stage, extent: tuple[int, int], mode: RopeMode = "normalized", device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Row and column of every cell in raster order, [cells] each; normalised ones are rounded to the cells of `extent`."""
    rows, columns = (torch.arange(side, device=device).float() for side in stage.size)
    if mode == "normalized":
        rows = (rows * (extent[0] / stage.height)).round()
        columns = (columns * (extent[1] / stage.width)).round()
    return rows.repeat_interleave(stage.width), columns.repeat(stage.height)


def rotations(rows: Tensor, columns: Tensor, head_dim: int) -> Tensor:
    """Unit complex numbers [cells, head_dim / 2] that turn the channel pairs of a token at these positions."""
    quarter = torch.arange(head_dim // 4, device=rows.device).float()
    speeds = 1.0 / 10000 ** (2 * quarter / (head_dim // 2))
    angles = torch.cat([torch.outer(rows, speeds), torch.outer(columns, speeds)], dim=1)
    return torch.polar(torch.ones_like(angles), angles)


def stage_rotations(
    stage: Stage, extent: tuple[int, int], head_dim: int, mode: RopeMode, device: torch.device | None = None
) -> Tensor:
    if mode != "resampled":
        return rotations(*grid_positions(stage, extent, mode, device), head_dim)
    longer, shorter = max(extent), int(RESAMPLED_SIDE / max(extent) * min(extent))
    size = (RESAMPLED_SIDE, shorter) if extent[0] == longer else (shorter, RESAMPLED_SIDE)
    table = Stage(0, *size, start=0, last=True)
    fine = torch.view_as_real(rotations(*grid_positions(table, size, "raw", device), head_dim))  # [cells, half, 2]
    fine = fine.flatten(1).T.unflatten(1, size)[None]  # [1, half * 2, h, w]
    coarse = F.interpolate(fine, size=stage.size, mode="bilinear", align_corners=True)
    return torch.view_as_complex(coarse[0].flatten(1).T.unflatten(1, (-1, 2)).contiguous())


class RopeTable:
    """The rotations of a whole schedule, computed once per request."""

    def __init__(self, schedule: Schedule, head_dim: int, mode: RopeMode, device: torch.device) -> None:
        tables = (stage_rotations(stage, schedule.extent, head_dim, mode, device) for stage in schedule)
        self.stages = tuple(table[None, :, None, None] for table in tables)  # [1, N, 1, 1, head_dim / 2] each

    def at(self, tokens: Tokens) -> Tensor:
        """Rotations of these tokens, [1 or R, N, 1, 1, head_dim / 2]."""
        rotation = self.stages[tokens.stage.index]
        return rotation if tokens.index is None else rotation[0, tokens.index]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns the channel pairs (2i, 2i + 1) of x [..., D], float32."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)
