"""Which products of few rows our kernel computes, and with which tiles: data, measured by `benchmarks.small_stages`.

What is not listed is cuBLAS's. A tile depends on the number of rows and on the weights alone, so that equal requests give equal bits.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class RowTile(NamedTuple):
    """How a product x [M, K] times weights [N, K] is shared out among programs."""

    rows: int  # of x that a program takes
    columns: int  # of the result that a program computes
    depth: int  # of K that it takes at a time; divides K
    splits: int  # programs that share the K of one tile
    warps: int
    stages: int  # loads on their way at a time


TILES: dict[tuple[int, int], dict[int, RowTile | None]] = {}
"""Of weights [N, K]: numbers of rows, ascending, with the tile for up to so many; None is cuBLAS. Empty: a GPU has not run them yet."""


def row_tile(rows: int, columns: int, depth: int) -> RowTile | None:
    """The tile for this product; None where it is not ours."""
    tiles = TILES.get((columns, depth))
    if not tiles:
        return None
    bounds = [*tiles]
    place = bisect_left(bounds, rows)
    return tiles[bounds[place]] if place < len(bounds) else None
