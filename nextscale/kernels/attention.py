"""Attention kernel for rows of different lengths, known only on the device, and for few queries, where torch's kernels are slow."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .quantize import in_e4m3_range
from .reference import E4M3
from .shapes import MIN_SQUARE, power_of_two, require_shape

LOG2_E = 1.4426950408889634
MIN_DOT = 16  # minimum sides of a product on tensor cores
WIDE = 128  # more channels per head than this leave no room for three pipeline stages in the 99 KB of shared memory of many GPUs
SHORT = 128  # maximum number of keys that are read without pipelining (text)

# Times on an H200 for two rows of 16 heads of 128 channels in bfloat16. All rows have the same length. This kernel reads it from `lengths`;
# torch's kernels get only the valid keys, and no mask:
#   16 queries, 50 valid keys of 64 (text)          3.5 us, flash 5.8
#   4096 queries, 50 valid keys of 64 (text)         37 us, flash 38
#   307 queries, 1804 valid keys of 2521             33 us, flash 58, cuDNN 32
#   1228 queries, 7653 valid keys of 10521          367 us, flash 580, cuDNN 313
# cuDNN's attention for rows of different lengths does not support CUDA graph capture.


@triton.jit
def add_keys(q, keys_ptr, values_ptr, start, length, largest, total, out, keys_token, values_token, factor,
             CHANNELS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Adds a block of keys. largest: maximum of the base-2 exponents so far; total: sum of the exponentials; out: weighted values."""
    key = start + tl.arange(0, KEYS)
    channel = tl.arange(0, BLOCK)
    # Full blocks need no mask: the compiler removes masks that are always true.
    there = (key < length) if MASKED else (key >= 0)
    inside = channel < CHANNELS
    k = tl.load(keys_ptr + key[None, :] * keys_token + channel[:, None], mask=there[None, :] & inside[:, None], other=0.0)
    score = tl.dot(q, k)
    if MASKED:
        score = tl.where(there[None, :], score, float("-inf"))
    now = tl.maximum(largest, tl.max(score, axis=1) * factor)
    weight = tl.exp2(score * factor - now[:, None])
    faded = tl.exp2(largest - now)
    v = tl.load(values_ptr + key[:, None] * values_token + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    out = tl.dot(weight.to(v.dtype), v, out * faded[:, None])
    return now, total * faded + tl.sum(weight, axis=1), out


@triton.jit(do_not_specialize=["queries", "images", "known_length"])
def attend_lengths_kernel(
    q_ptr, keys_ptr, values_ptr, lengths_ptr, cu_seqlens_ptr, out_ptr, queries, images, known_length, factor, inverse,
    q_row, q_token, q_head, keys_row, keys_token, keys_head, values_row, values_token, values_head,
    RAGGED: tl.constexpr, PACKED: tl.constexpr, UNIT: tl.constexpr, QUANTIZED: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, BLOCK)
    source = row  # row of the queries
    end = queries
    if PACKED:
        source = row // images
        start = tl.load(cu_seqlens_ptr + row % images)
        end = tl.load(cu_seqlens_ptr + row % images + 1)
        query += start
    asked = (query < end)[:, None] & (channel < CHANNELS)[None, :]
    length = known_length
    if RAGGED:
        length = tl.load(lengths_ptr + row)
    if PACKED:
        length = tl.where(start + tl.program_id(0) * QUERIES < end, length, 0)  # without queries, read no keys
    keys_ptr += row * keys_row + head * keys_head
    values_ptr += row * values_row + head * values_head
    q = tl.load(q_ptr + source * q_row + head * q_head + query[:, None] * q_token + channel[None, :], mask=asked, other=0.0)
    if UNIT:
        wide = q.to(tl.float32)
        q = (wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / CHANNELS + EPS)[:, None]).to(q.dtype)
    largest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    out = tl.zeros([QUERIES, BLOCK], dtype=tl.float32)
    whole = length // KEYS * KEYS
    for start in tl.range(0, whole, KEYS, num_stages=STAGES):
        largest, total, out = add_keys(
            q, keys_ptr, values_ptr, start, length, largest, total, out, keys_token, values_token, factor, CHANNELS, False, BLOCK, KEYS
        )
    if whole < length:
        largest, total, out = add_keys(
            q, keys_ptr, values_ptr, whole, length, largest, total, out, keys_token, values_token, factor, CHANNELS, True, BLOCK, KEYS
        )
    written = ((source * queries + query[:, None]) * HEADS + head) * CHANNELS + channel[None, :]
    out = out / total[:, None]
    if QUANTIZED:
        out = in_e4m3_range(out * inverse)
    tl.store(out_ptr + written, out.to(out_ptr.dtype.element_ty), mask=asked)


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


def tile_for(keys: int, channels: int) -> Tile:
    """Returns the tile sizes for rows of at most this number of keys."""
    if keys <= SHORT:
        return Tile(64, 32, 4, 1)
    return Tile(64, 64, 4, 3) if channels <= WIDE else Tile(64, 32, 4, 2)


def attend_lengths(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | int,
    scale: float,
    *,
    unit: bool = False,
    cu_seqlens: Tensor | None = None,
    longest: int | None = None,
    e4m3_scale: float | None = None,
) -> Tensor:
    """Returns attention of q [R, N, H, D] to the first lengths[r] keys and values [R, T, H, D] of each row: [R, N, H * D].

    Args:
        lengths: [R], int32, each from 1 to T, or an int for all rows. Later keys and values are not read.
        unit: normalize queries first, like `models.attention.unit_vectors`, rounding as if it were a separate operation.
        cu_seqlens: [B + 1], int32. Queries [F, N, H, D] are then packed: row f * B + b of the F * B = R rows has queries
            q[f, cu_seqlens[b] : cu_seqlens[b + 1]]. Output after the last one is undefined.
        longest: maximum number of queries of a packed row.
        e4m3_scale: divide the result by this and round it to e4m3.
    """
    branches, num_queries, heads, channels = q.shape
    images = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, room = branches * images, keys.shape[1]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.int().contiguous()
    for name, store in (("keys", keys), ("values", values)):
        require_shape(name, store, rows, room, heads, channels)
    ragged, length = (lengths, room) if isinstance(lengths, Tensor) else (None, lengths)  # length: of all rows, or the maximum
    if ragged is not None:
        require_shape("lengths", ragged, rows)
    out = torch.empty(branches, num_queries, heads * channels, dtype=q.dtype if e4m3_scale is None else E4M3, device=q.device)
    queries, key_block, warps, stages = tile_for(length, channels)
    with torch.cuda.device_of(q):
        attend_lengths_kernel[triton.cdiv(longest or num_queries, queries), heads, rows](
            q, keys, values, ragged, cu_seqlens, out, num_queries, images, length, scale * LOG2_E, 1 / (e4m3_scale or 1.0),
            *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            RAGGED=ragged is not None, PACKED=cu_seqlens is not None, UNIT=unit, QUANTIZED=e4m3_scale is not None, EPS=MIN_SQUARE,
            HEADS=heads, CHANNELS=channels, BLOCK=max(power_of_two(channels), MIN_DOT),
            QUERIES=queries, KEYS=key_block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return out


def attend_lengths_reference(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | int, scale: float, *, unit: bool = False, cu_seqlens: Tensor | None = None
) -> Tensor:
    if unit:
        wide = q.to(torch.promote_types(q.dtype, torch.float32))
        q = F.rms_norm(wide, wide.shape[-1:], eps=MIN_SQUARE).to(q.dtype)
    if cu_seqlens is not None:
        return attend_packed_reference(q, keys, values, lengths, scale, cu_seqlens.tolist())
    if isinstance(lengths, int):
        lengths = torch.full((q.shape[0],), lengths, device=q.device)
    there = (torch.arange(keys.shape[1], device=lengths.device) < lengths[:, None])[:, None, None]
    # Masked keys and values may be infinite or NaN, and 0 * inf is NaN.
    keys, values = (x.masked_fill(~there[:, 0, 0, :, None, None], 0) for x in (keys, values))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=there, scale=scale)
    return out.transpose(1, 2).flatten(2)


def attend_packed_reference(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | int, scale: float, cu_seqlens: list[int]) -> Tensor:
    out = q.new_zeros(*q.shape[:2], q.shape[2] * q.shape[3])
    for row in range(keys.shape[0]):
        branch, image = divmod(row, len(cu_seqlens) - 1)
        asked, one = slice(cu_seqlens[image], cu_seqlens[image + 1]), slice(row, row + 1)
        length = lengths if isinstance(lengths, int) else lengths[one]
        out[branch, asked] = attend_lengths_reference(q[branch, asked][None], keys[one], values[one], length, scale)[0]
    return out
