"""FastVAR's restoration: computed tokens use new values, all others the resized values of an earlier stage."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .shapes import dense_channels, per_row, power_of_two, require_index, require_shape, warps_for

# For bfloat16 [2, 4096, 2048] with half of the tokens computed and a memory of 24 x 24: base in 34 MB, update 17 MB, memory 5 MB
# (overlapping reads come from the L2 cache), result 34 MB; 89 MB in total, 21 us at 4.3 TB/s. Torch gathers, adds, resizes and scatters
# 293 MB. Measured on an H200: 40 us, torch 216. Each program handles one token and looks it up in the ascending index by bisection.


@triton.jit(do_not_specialize=["tokens", "kept", "memory_height", "memory_width", "height", "width"])
def restore_tokens_kernel(
    memory_ptr, fresh_ptr, index_ptr, base_ptr, gate_ptr, cells_ptr, out_ptr,
    tokens, kept, memory_height, memory_width, height, width,
    memory_row, memory_token, fresh_row, fresh_token, base_row, base_token, gate_row,
    BASED: tl.constexpr, GATED: tl.constexpr, CELLS: tl.constexpr, STEPS: tl.constexpr,
    TALLEST: tl.constexpr, WIDEST: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0)  # 32-bit, for faster divisions below
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    base = tl.zeros([BLOCK], dtype=tl.float32)
    if BASED:  # loaded before the search, to overlap with it
        base = tl.load(base_ptr + row * base_row + token.to(tl.int64) * base_token + channel, mask=inside, other=0.0).to(tl.float32)
    own = index_ptr + row * kept
    before = tl.zeros([], dtype=tl.int32)  # number of computed tokens before this one
    for step in tl.static_range(STEPS):
        further = before + (1 << (STEPS - 1 - step))
        entry = tl.load(own + further - 1, mask=further <= kept, other=0)
        before = tl.where((further <= kept) & (entry < token), further, before)
    found = tl.load(own + before, mask=before < kept, other=-1) == token
    value = tl.zeros([BLOCK], dtype=tl.float32)
    if found:
        value = tl.load(fresh_ptr + row * fresh_row + before.to(tl.int64) * fresh_token + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        cell = token
        if CELLS:
            cell = tl.load(cells_ptr + row * tokens + token).to(tl.int32)
        y = cell // width
        x = cell % width
        top = y * memory_height // height
        bottom = ((y + 1) * memory_height + height - 1) // height
        left = x * memory_width // width
        right = ((x + 1) * memory_width + width - 1) // width
        for down in tl.static_range(TALLEST):
            for across in tl.static_range(WIDEST):
                there = (top + down < bottom) & (left + across < right)
                place = (top + down) * memory_width + left + across
                value += tl.load(
                    memory_ptr + row * memory_row + place.to(tl.int64) * memory_token + channel, mask=inside & there, other=0.0
                ).to(tl.float32)  # fmt: skip
        value *= 1.0 / ((bottom - top) * (right - left)).to(tl.float32)
    if GATED:
        value *= tl.load(gate_ptr + row * gate_row + channel, mask=inside, other=0.0).to(tl.float32)
    out = (base + value).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * tokens + token) * CHANNELS + channel, out, mask=inside)


@cache
def widest_window(source: int, target: int) -> int:
    """Returns the maximum number of `source` cells that area resizing averages for one of `target` cells."""
    return max(-(-(i + 1) * source // target) - i * source // target for i in range(target))


def restore_tokens(
    memory: Tensor,
    size: tuple[int, int],
    grid: tuple[int, int],
    fresh: Tensor,
    index: Tensor,
    *,
    base: Tensor | None = None,
    gate: Tensor | None = None,
    cells: Tensor | None = None,
) -> Tensor:
    """Returns memory [R, h * w, C] of grid `size`, area-resized to `grid`, with fresh [R, K, C] at positions `index` [R, K].

    Args:
        index: positions in ascending order, as returned by `Tokens.top`; repeated positions mean the same token.
        gate: [R, 1, C], factor of both inputs.
        base: [R, N, C], added to the result.
        cells: [R, N], grid cells of the tokens. None: all cells in raster order.
    """
    rows, _, channels = memory.shape
    require_shape("memory", memory, rows, size[0] * size[1], channels)
    index = require_index(index, rows)
    kept = index.shape[1]
    require_shape("fresh", fresh, rows, kept, channels)
    tokens = grid[0] * grid[1]
    if cells is not None:
        cells = require_index(cells, rows)
        tokens = cells.shape[1]
    if base is not None:
        require_shape("base", base, rows, tokens, channels)
        base = dense_channels(base)
    gate = None if gate is None else per_row(gate, rows, channels)
    memory, fresh = dense_channels(memory), dense_channels(fresh)
    out = torch.empty(rows, tokens, channels, dtype=fresh.dtype, device=fresh.device)
    block = power_of_two(channels)
    with torch.cuda.device_of(fresh):
        restore_tokens_kernel[tokens, rows](
            memory, fresh, index, base, gate, cells, out,
            tokens, kept, *size, *grid,
            *memory.stride()[:2], *fresh.stride()[:2], *((0, 0) if base is None else base.stride()[:2]),
            0 if gate is None else gate.stride(0),
            BASED=base is not None, GATED=gate is not None, CELLS=cells is not None, STEPS=(grid[0] * grid[1]).bit_length(),
            TALLEST=widest_window(size[0], grid[0]), WIDEST=widest_window(size[1], grid[1]), CHANNELS=channels, BLOCK=block,
            num_warps=warps_for(block),
        )  # fmt: skip
    return out


def restore_tokens_reference(
    memory: Tensor,
    size: tuple[int, int],
    grid: tuple[int, int],
    fresh: Tensor,
    index: Tensor,
    *,
    base: Tensor | None = None,
    gate: Tensor | None = None,
    cells: Tensor | None = None,
) -> Tensor:
    channels = memory.shape[-1]

    def at(x: Tensor, places: Tensor) -> Tensor:
        return x.gather(1, places[..., None].expand(-1, -1, channels).long())

    resized = F.interpolate(memory.transpose(1, 2).unflatten(2, size), size=grid, mode="area").flatten(2).transpose(1, 2)
    if cells is not None:
        resized = at(resized, cells)
    if gate is not None:
        resized, fresh = gate * resized, gate * fresh
    if base is not None:
        resized, fresh = base + resized, at(base, index) + fresh
    return resized.scatter(1, index[..., None].expand(-1, -1, channels).long(), fresh)
