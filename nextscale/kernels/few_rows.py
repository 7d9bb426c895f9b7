"""A linear layer for few rows: programs share the inner dimension too, so that all multiprocessors read weights."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .few_rows_tiles import RowTile
from .overlap import after_previous, overlap
from .shapes import require_shape

# The weights are what counts: 2048 x 2048 in bfloat16 are 8.4 MB, 2.0 us at 4.26 TB/s, and 32 tiles of 64 columns on 132 multiprocessors.
# cuBLAS takes 5.4 us for 16 rows of these, 6.5 for 6144 x 2048 (25 MB, 5.9 us), 9.5 for 2048 x 8192 (34 MB, 7.9 us), captured on an H200.
# The times of this kernel are not measured yet.
# Programs read rows / columns times as many bytes of x, from the second cache, as of weights: many rows want many columns, and more splits.
COUNTERS = 4096  # tiles of one product, at most
ROOT_2_OVER_PI = 0.7978845608028654
CUBE = 0.044715


@triton.jit
def finished(total, bias_ptr, column, inside, BIASED: tl.constexpr, GELU: tl.constexpr, SLOPE: tl.constexpr, CUBE: tl.constexpr):
    """Bias and activation of sums [rows, columns] in float32."""
    if BIASED:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GELU:  # by its tanh formula: (1 + tanh(u)) / 2 is the sigmoid of 2u
        total = total / (1.0 + tl.exp(-2.0 * SLOPE * (total + CUBE * total * total * total)))
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, parts_ptr, arrived_ptr, out_ptr, rows, columns, depth, x_row,
    BIASED: tl.constexpr, GELU: tl.constexpr, SLOPE: tl.constexpr, CUBE: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, DEPTH_BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """One program per tile of the result and share of the inner dimension. The last one of a tile adds up what all have left, in order."""
    after_previous(OVERLAPPED)
    part = tl.program_id(1)
    row = tl.program_id(2) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    there, inside = row < rows, column < columns
    x_ptr += row[:, None] * x_row
    weight_ptr += column[None, :] * depth
    total = tl.zeros([ROW_BLOCK, COLUMN_BLOCK], dtype=tl.float32)
    first = part * (depth // DEPTH_BLOCK) // SPLITS * DEPTH_BLOCK
    last = (part + 1) * (depth // DEPTH_BLOCK) // SPLITS * DEPTH_BLOCK
    for start in tl.range(first, last, DEPTH_BLOCK, num_stages=STAGES):
        inner = start + tl.arange(0, DEPTH_BLOCK)
        x = tl.load(x_ptr + inner[None, :], mask=there[:, None], other=0.0)
        weight = tl.load(weight_ptr + inner[:, None], mask=inside[None, :], other=0.0)
        total = tl.dot(x, weight, total)
    both = there[:, None] & inside[None, :]
    place = row[:, None] * columns + column[None, :]
    if SPLITS == 1:
        y = finished(total, bias_ptr, column, inside, BIASED, GELU, SLOPE, CUBE)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=both)
    else:
        tl.store(parts_ptr + part * rows * columns + place, total, mask=both)
        arrived_ptr += tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have written before one says so
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([ROW_BLOCK, COLUMN_BLOCK], dtype=tl.float32)
            for one in tl.static_range(SPLITS):
                # Past the first cache, which knows nothing of other multiprocessors.
                total += tl.load(parts_ptr + one * rows * columns + place, mask=both, other=0.0, cache_modifier=".cg")
            y = finished(total, bias_ptr, column, inside, BIASED, GELU, SLOPE, CUBE)
            tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=both)
            tl.store(arrived_ptr, 0)  # for the next launch


def linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, tile: RowTile, *, gelu: bool = False) -> Tensor:
    """x [..., K] times weight [N, K], plus bias [N], optionally gelu by its tanh formula; in half precision, rounded once.

    Launches on one device share counters: those with splits must not run at the same time, as on two streams.
    """
    columns, depth = weight.shape
    if x.shape[-1] != depth:
        raise ValueError(f"x is {list(x.shape)} and the weight {list(weight.shape)}; expected rows of {depth}")
    if depth % tile.depth or tile.splits > depth // tile.depth:
        raise ValueError(f"{tile} does not divide {depth} into whole steps, at least one for each split")
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        raise ValueError(f"x and weight have one half-precision dtype; got {x.dtype} and {weight.dtype}")
    if bias is not None:
        require_shape("bias", bias, columns)
    flat, weight = x.reshape(-1, depth), weight.contiguous()
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows = flat.shape[0]
    grid = triton.cdiv(columns, tile.columns), tile.splits, triton.cdiv(rows, tile.rows)
    if grid[0] * grid[2] > COUNTERS:
        raise ValueError(f"{rows} rows of {columns} are {grid[0] * grid[2]} tiles; expected at most {COUNTERS}")
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    parts = arrived = None
    if tile.splits > 1:
        parts = torch.empty(tile.splits, rows, columns, dtype=torch.float32, device=x.device)
        arrived = counters(x.device)
    with torch.cuda.device_of(x):
        linear_few_rows_kernel[grid](
            flat, weight, bias, parts, arrived, out, rows, columns, depth, flat.stride(0),
            BIASED=bias is not None, GELU=gelu, SLOPE=ROOT_2_OVER_PI, CUBE=CUBE,
            ROW_BLOCK=tile.rows, COLUMN_BLOCK=tile.columns, DEPTH_BLOCK=tile.depth, SPLITS=tile.splits, STAGES=tile.stages,
            num_warps=tile.warps, **overlap(x),
        )  # fmt: skip
    return out


@cache
def counters(device: torch.device) -> Tensor:
    """Zeros, which every launch leaves as it found them; made before anything is captured, since what is captured runs once before."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def linear_few_rows_reference(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y
