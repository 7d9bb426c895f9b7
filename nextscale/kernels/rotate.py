"""Normalizes and rotates queries and keys, and writes keys and values into the KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .shapes import MIN_SQUARE, power_of_two, require_index, require_shape, warps_for

# For bfloat16 [2, 4096, 3, 16, 128] this reads and writes 101 MB each, 47 us at 4.3 TB/s. Torch moves 1007 MB in six to eight kernels, most
# of it queries and keys in float32, 234 us. Measured on an H200: 55 us, torch 559. One program per token reads a rotation once for all
# heads; both channels of a pair are loaded together and split in registers.


@triton.jit
def rotate_pairs(x, cosine, sine, factor, head_dim, NORMALIZED: tl.constexpr, ROTATED: tl.constexpr, EPS: tl.constexpr):
    """Normalizes and rotates x [heads, channels] in float32; cosine and sine are [1, half], factor [heads, 1]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if NORMALIZED:
        unit = tl.rsqrt(tl.sum(even * even + odd * odd, axis=1) / head_dim + EPS)[:, None] * factor
        even *= unit
        odd *= unit
    if ROTATED:
        even, odd = even * cosine - odd * sine, even * sine + odd * cosine
    return tl.reshape(tl.join(even, odd), [x.shape[0], x.shape[1]])


@triton.jit(do_not_specialize=["start", "tokens", "images"])
def rotate_into_cache_kernel(
    qkv_ptr, logit_scale_ptr, rotation_ptr, index_ptr, starts_ptr, image_ptr, place_ptr, ends_ptr, q_ptr, keys_ptr, values_ptr,
    start, tokens, images, qkv_row, qkv_token, qkv_part, keys_row, keys_token, values_row, values_token,
    NORMALIZED: tl.constexpr, ROTATED: tl.constexpr, INDEXED: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, CHANNEL_BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    channel = tl.arange(0, CHANNEL_BLOCK)[None, :]
    place = head * HEAD_DIM + channel  # [heads, channels]
    inside = (head < HEADS) & (channel < HEAD_DIM)
    if PACKED:
        inside &= token < tl.load(ends_ptr + images)  # padding is not read
    source = qkv_ptr + row * qkv_row + token * qkv_token + place
    q = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(source + qkv_part, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(source + 2 * qkv_part, mask=inside, other=0.0)
    cosine = 1.0
    sine = 0.0
    if ROTATED:
        cell = token
        if INDEXED:
            cell = tl.load(index_ptr + (token if PACKED else row * tokens + token)).to(tl.int64)
        both = tl.load(rotation_ptr + cell * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0)
        cosine, sine = tl.split(tl.reshape(both, [1, CHANNEL_BLOCK // 2, 2]))
    logit_scale = 1.0
    if NORMALIZED:
        logit_scale = tl.load(logit_scale_ptr + head, mask=head < HEADS, other=0.0)
    q = rotate_pairs(q, cosine, sine, logit_scale, HEAD_DIM, NORMALIZED, ROTATED, EPS)
    tl.store(q_ptr + (row * tokens + token) * (HEADS * HEAD_DIM) + place, q.to(q_ptr.dtype.element_ty), mask=inside)
    k = rotate_pairs(k, cosine, sine, 1.0, HEAD_DIM, NORMALIZED, ROTATED, EPS)
    owner = row  # row of the cache
    slot = token + start
    if PACKED:
        owner = row * images + tl.load(image_ptr + token).to(tl.int64)
        slot = tl.load(place_ptr + token).to(tl.int64) + start
    if RAGGED:
        slot += tl.load(starts_ptr + owner).to(tl.int64)
    tl.store(keys_ptr + owner * keys_row + slot * keys_token + place, k.to(keys_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + owner * values_row + slot * values_token + place, v.to(values_ptr.dtype.element_ty), mask=inside)


def rotate_into_cache(
    qkv: Tensor,
    logit_scale: Tensor | None,
    rotation: Tensor | None,
    index: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    *,
    packed: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns queries [R, N, H, D] of qkv [R, N, 3, H, D]; writes keys and values to entries `start` to `start + N` of the cache.

    Args:
        logit_scale: [H] or [H, 1], float32, factor of the queries after queries and keys are normalized. None: neither is done.
        rotation: complex64 [cells, D / 2] for the channel pairs (2i, 2i + 1). None: no rotation.
        index: [R, N], cell of every token. None: token n is cell n.
        keys, values: the cache, [R, T, H, D]. Padding tokens are written like others.
        start: first cache entry, or one per row, [R].
        packed: (image [N], place [N], cu_seqlens [B + 1]) if every row of qkv holds the tokens of B rows. The cache and `start` then have
            R * B rows, `index` is [1, N], and token n of row r is written to entry start + place[n] of row r * B + image[n]. Nothing is
            written for tokens after the last row.
    """
    rows, tokens, _, heads, head_dim = qkv.shape
    if qkv.stride()[-2:] != (head_dim, 1):
        qkv = qkv.contiguous()
    images = 1 if packed is None else keys.shape[0] // rows
    for name, store in (("keys", keys), ("values", values)):
        require_shape(name, store, rows * images, keys.shape[1], heads, head_dim)
    image, place, ends = packed or (None, None, None)
    for name, entries, expected in (("image", image, tokens), ("place", place, tokens), ("cu_seqlens", ends, images + 1)):
        if entries is not None:
            require_shape(name, entries, expected)
    if logit_scale is not None:
        logit_scale = logit_scale.flatten().float().contiguous()
        require_shape("logit_scale", logit_scale, heads)
    table = None
    if rotation is not None:
        require_shape("rotation", rotation, rotation.shape[0] if index is not None else tokens, head_dim // 2)
        table = torch.view_as_real(rotation.resolve_conj().contiguous())  # cosine and sine interleaved
    if index is not None:
        index = require_index(index, rows if packed is None else 1)
        require_shape("index", index, index.shape[0], tokens)
    starts = start.contiguous() if isinstance(start, Tensor) else None
    if starts is not None:
        require_shape("start", starts, rows * images)
    q = torch.empty(rows, tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    head_block, channel_block = power_of_two(heads), power_of_two(head_dim)
    with torch.cuda.device_of(qkv):
        rotate_into_cache_kernel[tokens, rows](
            qkv, logit_scale, table, index, starts, image, place, ends, q, keys, values,
            0 if starts is not None else start, tokens, images, *qkv.stride()[:3], *keys.stride()[:2], *values.stride()[:2],
            NORMALIZED=logit_scale is not None, ROTATED=table is not None, INDEXED=index is not None, RAGGED=starts is not None,
            PACKED=packed is not None, EPS=MIN_SQUARE,
            HEADS=heads, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, CHANNEL_BLOCK=channel_block,
            num_warps=warps_for(head_block * channel_block),
        )  # fmt: skip
    return q


def rotate_into_cache_reference(
    qkv: Tensor,
    logit_scale: Tensor | None,
    rotation: Tensor | None,
    index: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    *,
    packed: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    rows, tokens, _, heads, head_dim = qkv.shape
    qk = qkv[:, :, :2].to(torch.promote_types(qkv.dtype, torch.float32))
    if logit_scale is not None:
        qk = F.rms_norm(qk, (head_dim,), eps=MIN_SQUARE)
    if rotation is not None:
        at = rotation[None] if index is None else rotation[index.long()]  # [1 or R, N, D / 2]
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous())
        qk = torch.view_as_real(pairs * at[:, :, None, None]).flatten(-2)
    q, k = qk.unbind(2)
    if logit_scale is not None:
        q = q * logit_scale.view(heads, 1)
    for store, new in ((keys, k), (values, qkv[:, :, 2])):
        if packed is not None:
            image, place = (part[: int(packed[2][-1])] for part in packed[:2])
            row = torch.arange(rows, device=store.device)[:, None] * (store.shape[0] // rows) + image
            store[row, place + (start[row] if isinstance(start, Tensor) else start)] = new[:, : len(image)].to(store.dtype)
        elif isinstance(start, Tensor):
            row, slot = torch.arange(rows, device=start.device)[:, None], torch.arange(tokens, device=start.device)
            store[row, start[:, None] + slot] = new.to(store.dtype)
        else:
            store.narrow(1, start, tokens).copy_(new)
    return q.to(qkv.dtype)
