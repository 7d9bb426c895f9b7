"""Keys and values to 8 bits and back: whole numbers, and a scale per token and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8_tokens import LARGEST, SMALLEST_SCALE, require_stores
from .int8_tokens import dequantize_tokens_reference as dequantize_tokens_reference  # apart from here: they run where there is no Triton
from .int8_tokens import quantize_tokens_reference as quantize_tokens_reference
from .shapes import power_of_two, require_shape, warps_for

# Bytes for bfloat16 [2, 6425, 16, 128], keys alone: back from 8 bits 27 MB in, 53 MB out, 19 us at 4.3 TB/s; the copy of keys in half
# precision that it takes the place of at the last stage moves 105 MB. One program per token, as in `rotate_into_cache`.


@triton.jit(do_not_specialize=["start"])
def quantize_tokens_kernel(
    source_ptr, starts_ptr, numbers_ptr, scales_ptr, start, source_row, source_token, numbers_row, numbers_token, scales_row, scales_token,
    RAGGED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, CHANNEL_BLOCK: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) + start
    if RAGGED:
        token += tl.load(starts_ptr + row).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)
    channel = tl.arange(0, CHANNEL_BLOCK)[None, :]
    place = head[:, None] * HEAD_DIM + channel  # [heads, channels]
    inside = (head[:, None] < HEADS) & (channel < HEAD_DIM)
    x = tl.load(source_ptr + row * source_row + token * source_token + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) / MOST, LEAST)  # [heads]
    rounded = tl.floor(x / scale[:, None] + 0.5)
    rounded = tl.minimum(tl.maximum(rounded, -MOST), MOST)
    tl.store(numbers_ptr + row * numbers_row + token * numbers_token + place, rounded.to(tl.int8), mask=inside)
    tl.store(scales_ptr + row * scales_row + token * scales_token + head, scale, mask=head < HEADS)


@triton.jit
def dequantize_tokens_kernel(
    numbers_ptr, scales_ptr, out_ptr, numbers_row, numbers_token, scales_row, scales_token, out_row, out_token,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, CHANNEL_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)
    channel = tl.arange(0, CHANNEL_BLOCK)[None, :]
    place = head[:, None] * HEAD_DIM + channel  # [heads, channels]
    inside = (head[:, None] < HEADS) & (channel < HEAD_DIM)
    numbers = tl.load(numbers_ptr + row * numbers_row + token * numbers_token + place, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + row * scales_row + token * scales_token + head, mask=head < HEADS, other=0.0)
    tl.store(out_ptr + row * out_row + token * out_token + place, (numbers * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def quantize_tokens(source: Tensor, start: int | Tensor, new: int, numbers: Tensor, scales: Tensor) -> None:
    """Writes entries `start` to `start + new` of every row of source [R, T, H, D] to the same places of a store.

    numbers: int8 [R, S, H, D], channels of a head from -127 to 127 times its scale; scales: float32 [R, S, H]. start: a number, or one per
    row [R]. T and S may differ.
    """
    require_stores(source, start, new, numbers, scales)
    require_heads(source, numbers, scales)
    rows, _, heads, head_dim = source.shape
    starts = start.contiguous() if isinstance(start, Tensor) else None
    head_block, channel_block = power_of_two(heads), power_of_two(head_dim)
    with torch.cuda.device_of(source):
        quantize_tokens_kernel[new, rows](
            source, starts, numbers, scales, 0 if starts is not None else start,
            *source.stride()[:2], *numbers.stride()[:2], *scales.stride()[:2],
            RAGGED=starts is not None, HEADS=heads, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, CHANNEL_BLOCK=channel_block,
            MOST=float(LARGEST), LEAST=SMALLEST_SCALE, num_warps=warps_for(head_block * channel_block),
        )  # fmt: skip


def dequantize_tokens(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes numbers [R, T, H, D] times their scales [R, T, H] to out [R, T, H, D]."""
    rows, tokens, heads, head_dim = out.shape
    require_shape("numbers", numbers, *out.shape)
    require_shape("scales", scales, rows, tokens, heads)
    require_heads(out, numbers, scales)
    if not tokens:
        return
    head_block, channel_block = power_of_two(heads), power_of_two(head_dim)
    with torch.cuda.device_of(out):
        dequantize_tokens_kernel[tokens, rows](
            numbers, scales, out, *numbers.stride()[:2], *scales.stride()[:2], *out.stride()[:2],
            HEADS=heads, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, CHANNEL_BLOCK=channel_block,
            num_warps=warps_for(head_block * channel_block),
        )  # fmt: skip


def require_heads(*tensors: Tensor) -> None:
    """ValueError unless the heads of a token, and their channels, lie side by side."""
    for x in tensors:
        if x.stride()[2:] != ((x.shape[3], 1) if x.ndim == 4 else (1,)):
            raise ValueError(f"heads and channels must lie side by side; got strides {x.stride()}")
