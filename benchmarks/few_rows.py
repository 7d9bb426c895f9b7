"""Products of few rows: cuBLAS and our kernel with the tiles that promise most, on the weights of a model's blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.kernels.few_rows_tiles import RowTile
from nextscale.models.block_config import BlockConfig

from .captured import captured_ms

ROWS = (2, 8, 32, 72, 128, 288, 512, 800)
MULTIPROCESSORS, TFLOPS, MEMORY_TB_S, CACHE_TB_S = 132, 600, 4.26, 7.0  # an H200's; the last is a guess: they only order candidates
COLD_BYTES = 256 * 2**20  # of weights in turns, several times the second cache, as a model's blocks are
MOST_SETS = 32
SHARED_BYTES = 180 * 2**10  # of a program's loads on their way
CANDIDATES = 5  # shapes of tiles that are timed of every product
DEPTHS = (128, 64, 256)  # the usual one first
BOUND = 1e-2  # relative error in bfloat16
WORTH = 0.97  # of cuBLAS's time, at most, to be listed


@dataclass(frozen=True)
class Product:
    """x [M, K] times weights [N, K]."""

    name: str
    columns: int
    depth: int
    gelu: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.columns * self.depth


def products(block: BlockConfig) -> tuple[Product, ...]:
    """Those of a block with biases; the projections of attention and the queries to a text are alike."""
    dim, hidden = block.dim, block.hidden_dim
    return (
        Product("qkv", 3 * dim, dim),
        Product("proj", dim, dim),
        Product("fc1", hidden, dim, gelu=True),
        Product("fc2", dim, hidden),
    )


def candidates(one: Product, rows: int) -> list[RowTile]:
    """The tiles with the least predicted time.

    The prediction knows nothing of how deep a step is: the usual depth is tried of several, other depths of the first.
    """
    blocks = (max(16, 1 << (rows - 1).bit_length()),) if rows <= 128 else (64, 128)
    found = {}
    for block, columns, splits in product(blocks, (16, 32, 64, 128, 256), (1, 2, 4, 8)):
        if tiles := [tile for depth in DEPTHS if (tile := tile_of(one, block, columns, splits, depth)) is not None]:
            found[tuple(tiles)] = predicted_us(one, rows, tiles[0])
    best = sorted(found, key=lambda tiles: found[tiles])
    return [*best[0], *(tiles[0] for tiles in best[1:CANDIDATES])]


def tile_of(one: Product, rows: int, columns: int, splits: int, depth: int) -> RowTile | None:
    """None where it does not fit the product or a multiprocessor."""
    stages = SHARED_BYTES // (2 * depth * (rows + columns))
    if one.depth % depth or one.depth < depth * splits or stages < 2:
        return None
    return RowTile(rows, columns, depth, splits, 8 if rows * columns >= 128 * 64 else 4, min(stages, 6))


def predicted_us(one: Product, rows: int, tile: RowTile) -> float:
    """Of weights from memory, of all that is read through the second cache, and of multiplying the longest; with idle multiprocessors."""
    down = math.ceil(rows / tile.rows)
    programs = math.ceil(one.columns / tile.columns) * tile.splits * down
    rounds = max(1.0, programs / MULTIPROCESSORS) if programs > 3 * MULTIPROCESSORS else math.ceil(programs / MULTIPROCESSORS)
    idle = rounds * MULTIPROCESSORS / programs
    of_x = one.bytes * rows / tile.columns
    of_parts = 0 if tile.splits == 1 else 8 * tile.splits * rows * one.columns
    reading = idle * max(one.bytes / MEMORY_TB_S, (down * one.bytes + of_x + of_parts) / CACHE_TB_S) / 1e6
    multiplying = rounds * 2 * tile.rows * tile.columns * one.depth / tile.splits / (TFLOPS * 1e6 / MULTIPROCESSORS)
    return max(reading, multiplying) + (tile.splits > 1)


Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def runs(one: Product, rows: int) -> Iterator[tuple[str, RowTile | None, Run]]:
    from nextscale.kernels.few_rows import linear_few_rows

    if one.gelu:
        yield "cublasLt", None, lambda x, w, b: torch._addmm_activation(b, x, w.t(), use_gelu=True)
        yield "cublas, gelu", None, lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh")
    else:
        yield "cublas", None, F.linear
    for tile in candidates(one, rows):
        yield "x".join(map(str, tile)), tile, partial(ours, linear_few_rows, tile, one.gelu)


def ours(kernel: Callable[..., Tensor], tile: RowTile, gelu: bool, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return kernel(x, w, b, tile, gelu=gelu)


def timed(one: Product, rows: int) -> dict[str, Any]:
    """Microseconds of every candidate on weights that come from memory, and of which the fastest is right."""
    from nextscale.kernels.few_rows import linear_few_rows_reference

    sets = max(1, min(MOST_SETS, COLD_BYTES // one.bytes))
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, one.depth, generator=generator, device="cuda").bfloat16()
    weights = torch.randn(sets, one.columns, one.depth, generator=generator, device="cuda").div_(math.sqrt(one.depth)).bfloat16()
    biases = torch.randn(sets, one.columns, generator=generator, device="cuda").bfloat16()
    expected = linear_few_rows_reference(x.double(), weights[0].double(), biases[0].double(), gelu=one.gelu)
    found: dict[str, Any] = {}
    tiles: dict[str, RowTile | None] = {}
    for name, tile, run in runs(one, rows):
        try:
            error = relative_error(run, x, weights[0], biases[0], expected)
            us = 1000 * captured_ms(lambda run=run: [run(x, w, b) for w, b in zip(weights, biases, strict=True)]) / sets
        except Exception as failure:  # a tile that does not fit says so; the others go on
            found[name] = {"error": f"{type(failure).__name__}: {failure}".splitlines()[0][:160]}
            continue
        tiles[name] = tile
        found[name] = {"us": round(us, 2), "tb_s": round(one.bytes / us / 1e6, 3), "relative_error": float(f"{error:.1e}")}
    times = {name: found[name]["us"] for name in tiles}
    theirs = min(us for name, us in times.items() if tiles[name] is None)
    fastest = min(times, key=lambda name: times[name])
    tile = tiles[fastest] if times[fastest] <= WORTH * theirs else None
    return {"candidates": found, "fastest": fastest, "us": times[fastest], "cublas_us": theirs, "tile": tile, "bytes": one.bytes}


def relative_error(run: Run, x: Tensor, weight: Tensor, bias: Tensor, expected: Tensor) -> float:
    """Against float64; a second run must give the same bits."""
    first, second = run(x, weight, bias), run(x, weight, bias)
    error = ((first.double() - expected).norm() / expected.norm()).item()
    if not error < BOUND:
        raise ArithmeticError(f"relative error {error:.2e}, more than {BOUND}")
    if not torch.equal(first, second):
        raise ArithmeticError("two runs differ")
    return error
