"""Queries and keys normalised and turned, keys and values put into the cache, and attention to it, in one kernel: for few tokens.

One program has all tokens of a row and a head, so that what it writes into the cache it can read again without waiting for others. That is
one launch of a dozen per block less in the first stages, where launches are what takes time. It computes what `rotate_into_cache` and
`attend_lengths` do, to the last bit. Its time is not measured yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import LOG2_E, SMALLEST_DOT, attend_lengths_reference, attended, tile_for
from .overlap import after_previous, overlap
from .rotate import checked, rotate_into_cache_reference, turned
from .shapes import SMALLEST_SQUARE, power_of_two, require_shape

MOST_TOKENS = 64  # queries that a program takes


@triton.jit(do_not_specialize=["start", "tokens", "known_length"])
def rotate_and_attend_kernel(
    qkv_ptr, temperature_ptr, rotation_ptr, index_ptr, starts_ptr, lengths_ptr, keys_ptr, values_ptr, out_ptr,
    start, tokens, known_length, factor, qkv_row, qkv_token, qkv_part, keys_row, keys_token, values_row, values_token,
    NORMALISED: tl.constexpr, TURNED: tl.constexpr, INDEXED: tl.constexpr, RAGGED: tl.constexpr,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    EPS: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAPPED)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, QUERIES)
    channel = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (channel < CHANNELS)[None, :]
    source = qkv_ptr + row * qkv_row + token[:, None] * qkv_token + head * CHANNELS + channel[None, :]
    q = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(source + qkv_part, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(source + 2 * qkv_part, mask=inside, other=0.0)
    cosine = 1.0
    sine = 0.0
    if TURNED:
        cell = token.to(tl.int64)
        if INDEXED:
            cell = tl.load(index_ptr + row * tokens + token, mask=token < tokens, other=0).to(tl.int64)
        both = tl.load(rotation_ptr + cell[:, None] * CHANNELS + channel[None, :], mask=inside, other=0.0)
        cosine, sine = tl.split(tl.reshape(both, [QUERIES, BLOCK // 2, 2]))
    temperature = 1.0
    if NORMALISED:
        temperature = tl.load(temperature_ptr + head)
    q = turned(q, cosine, sine, temperature, CHANNELS, NORMALISED, TURNED, EPS).to(out_ptr.dtype.element_ty)
    k = turned(k, cosine, sine, 1.0, CHANNELS, NORMALISED, TURNED, EPS)
    length = known_length
    first = start
    if RAGGED:
        first = tl.load(starts_ptr + row).to(tl.int32)
        length = tl.load(lengths_ptr + row)
    keys_ptr += row * keys_row + head * CHANNELS
    values_ptr += row * values_row + head * CHANNELS
    slot = (first + token)[:, None]
    tl.store(keys_ptr + slot * keys_token + channel[None, :], k.to(keys_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + slot * values_token + channel[None, :], v.to(values_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # all threads have written before any reads
    largest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    out = tl.zeros([QUERIES, BLOCK], dtype=tl.float32)
    whole = length // KEYS * KEYS
    for begun in tl.range(0, whole, KEYS, num_stages=STAGES):
        largest, total, out = attended(
            q, keys_ptr, values_ptr, begun, length, largest, total, out, keys_token, values_token, factor, CHANNELS, False, BLOCK, KEYS
        )
    if whole < length:
        largest, total, out = attended(
            q, keys_ptr, values_ptr, whole, length, largest, total, out, keys_token, values_token, factor, CHANNELS, True, BLOCK, KEYS
        )
    written = ((row * tokens + token[:, None]) * HEADS + head) * CHANNELS + channel[None, :]
    tl.store(out_ptr + written, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def rotate_and_attend(
    qkv: Tensor,
    temperature: Tensor | None,
    rotation: Tensor | None,
    index: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    lengths: int | Tensor,
    scale: float,
) -> Tensor:
    """qkv [R, N, 3, H, D] to [R, N, H * D], as `rotate_into_cache` and `attend_lengths` take their arguments; at most 64 tokens a row.

    start and lengths: numbers, or one per row [R] each. Half precision.
    """
    rows, tokens, _, heads, head_dim = qkv.shape
    if tokens > MOST_TOKENS:
        raise ValueError(f"at most {MOST_TOKENS} tokens of a row are taken; got {tokens}")
    if isinstance(start, Tensor) != isinstance(lengths, Tensor):
        raise ValueError("start and lengths are both numbers, or both of rows")
    qkv, temperature, table, index, starts = checked(qkv, temperature, rotation, index, keys, values, start)
    ends = lengths.contiguous() if isinstance(lengths, Tensor) else None
    if ends is not None:
        require_shape("lengths", ends, rows)
    length = lengths if isinstance(lengths, int) else keys.shape[1]
    out = torch.empty(rows, tokens, heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    queries, key_block, warps, stages = tile_for(length, head_dim)
    with torch.cuda.device_of(qkv):
        rotate_and_attend_kernel[heads, rows](
            qkv, temperature, table, index, starts, ends, keys, values, out,
            0 if starts is not None else start, tokens, length, scale * LOG2_E, *qkv.stride()[:3], *keys.stride()[:2], *values.stride()[:2],
            NORMALISED=temperature is not None, TURNED=table is not None, INDEXED=index is not None, RAGGED=starts is not None,
            HEADS=heads, CHANNELS=head_dim, BLOCK=max(power_of_two(head_dim), SMALLEST_DOT), QUERIES=queries, KEYS=key_block, STAGES=stages,
            EPS=SMALLEST_SQUARE, num_warps=warps, **overlap(qkv),
        )  # fmt: skip
    return out


def rotate_and_attend_reference(
    qkv: Tensor,
    temperature: Tensor | None,
    rotation: Tensor | None,
    index: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    lengths: int | Tensor,
    scale: float,
) -> Tensor:
    q = rotate_into_cache_reference(qkv, temperature, rotation, index, keys, values, start)
    return attend_lengths_reference(q, keys, values, lengths, scale)
