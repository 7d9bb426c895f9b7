"""Queries and keys normalised, turned to where their tokens are, and keys and values put into the cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .shapes import MIN_SQUARE, power_of_two, require_index, require_shape, warps_for

# Bytes for bfloat16 [2, 4096, 3, 16, 128]: 101 MB in, 101 MB out, 47 us at 4.3 TB/s. Torch moves 1007 MB in six to eight kernels, most of
# it queries and keys in float32: 234 us. Measured on an H200: 55 us, torch 559. One program per token, so that a rotation is read once for
# all heads; neighbouring channels are loaded together and parted in registers.


@triton.jit
def turned(x, cosine, sine, factor, head_dim, NORMALISED: tl.constexpr, TURNED: tl.constexpr, EPS: tl.constexpr):
    """x [heads, channels] in float32; cosine and sine [1, half]; factor [heads, 1] of unit vectors."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if NORMALISED:
        unit = tl.rsqrt(tl.sum(even * even + odd * odd, axis=1) / head_dim + EPS)[:, None] * factor
        even *= unit
        odd *= unit
    if TURNED:
        even, odd = even * cosine - odd * sine, even * sine + odd * cosine
    return tl.reshape(tl.join(even, odd), [x.shape[0], x.shape[1]])


@triton.jit(do_not_specialize=["start", "tokens", "images"])
def rotate_into_cache_kernel(
    qkv_ptr, temperature_ptr, rotation_ptr, index_ptr, starts_ptr, image_ptr, place_ptr, ends_ptr, q_ptr, keys_ptr, values_ptr,
    start, tokens, images, qkv_row, qkv_token, qkv_part, keys_row, keys_token, values_row, values_token,
    NORMALISED: tl.constexpr, TURNED: tl.constexpr, INDEXED: tl.constexpr, RAGGED: tl.constexpr, PACKED: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, CHANNEL_BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    channel = tl.arange(0, CHANNEL_BLOCK)[None, :]
    place = head * HEAD_DIM + channel  # [heads, channels]
    inside = (head < HEADS) & (channel < HEAD_DIM)
    if PACKED:
        inside &= token < tl.load(ends_ptr + images)  # nothing reads what is padding
    source = qkv_ptr + row * qkv_row + token * qkv_token + place
    q = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(source + qkv_part, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(source + 2 * qkv_part, mask=inside, other=0.0)
    cosine = 1.0
    sine = 0.0
    if TURNED:
        cell = token
        if INDEXED:
            cell = tl.load(index_ptr + (token if PACKED else row * tokens + token)).to(tl.int64)
        both = tl.load(rotation_ptr + cell * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0)
        cosine, sine = tl.split(tl.reshape(both, [1, CHANNEL_BLOCK // 2, 2]))
    temperature = 1.0
    if NORMALISED:
        temperature = tl.load(temperature_ptr + head, mask=head < HEADS, other=0.0)
    q = turned(q, cosine, sine, temperature, HEAD_DIM, NORMALISED, TURNED, EPS)
    tl.store(q_ptr + (row * tokens + token) * (HEADS * HEAD_DIM) + place, q.to(q_ptr.dtype.element_ty), mask=inside)
    k = turned(k, cosine, sine, 1.0, HEAD_DIM, NORMALISED, TURNED, EPS)
    owner = row  # of the cache
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
    temperature: Tensor | None,
    rotation: Tensor | None,
    index: Tensor | None,
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    *,
    packed: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Queries [R, N, H, D] of qkv [R, N, 3, H, D]; keys and values go to tokens `start` to `start + N` of keys, values [R, T, H, D].

    temperature: [H] or [H, 1], float32, what multiplies queries after both were made unit vectors; None: neither happens.
    rotation: complex64 [cells, D / 2] for the channel pairs (2i, 2i + 1); token n is cell index[r, n], or cell n without an index.
    start: a number, or one per row [R] where rows differ in length. Padding is written like any token.
    packed: (image [N], place [N], starts [B + 1]) where every row of qkv holds the tokens of B rows, each from its start to the next one's:
    keys, values and `start` have R * B rows, and token n of row r goes to place start + place[n] of row r * B + image[n]. The index is
    [1, N] then. Of what lies behind the last token nothing is written, nor are its queries.
    """
    rows, tokens, _, heads, head_dim = qkv.shape
    if qkv.stride()[-2:] != (head_dim, 1):
        qkv = qkv.contiguous()
    images = 1 if packed is None else keys.shape[0] // rows
    for name, store in (("keys", keys), ("values", values)):
        require_shape(name, store, rows * images, keys.shape[1], heads, head_dim)
    image, place, ends = packed or (None, None, None)
    for name, entries, expected in (("image", image, tokens), ("place", place, tokens), ("starts", ends, images + 1)):
        if entries is not None:
            require_shape(name, entries, expected)
    if temperature is not None:
        temperature = temperature.flatten().float().contiguous()
        require_shape("temperature", temperature, heads)
    table = None
    if rotation is not None:
        require_shape("rotation", rotation, rotation.shape[0] if index is not None else tokens, head_dim // 2)
        table = torch.view_as_real(rotation.resolve_conj().contiguous())  # cosine and sine side by side
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
            qkv, temperature, table, index, starts, image, place, ends, q, keys, values,
            0 if starts is not None else start, tokens, images, *qkv.stride()[:3], *keys.stride()[:2], *values.stride()[:2],
            NORMALISED=temperature is not None, TURNED=table is not None, INDEXED=index is not None, RAGGED=starts is not None,
            PACKED=packed is not None, EPS=MIN_SQUARE,
            HEADS=heads, HEAD_DIM=head_dim, HEAD_BLOCK=head_block, CHANNEL_BLOCK=channel_block,
            num_warps=warps_for(head_block * channel_block),
        )  # fmt: skip
    return q


def rotate_into_cache_reference(
    qkv: Tensor,
    temperature: Tensor | None,
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
    if temperature is not None:
        qk = F.rms_norm(qk, (head_dim,), eps=MIN_SQUARE)
    if rotation is not None:
        at = rotation[None] if index is None else rotation[index.long()]  # [1 or R, N, D / 2]
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)).contiguous())
        qk = torch.view_as_real(pairs * at[:, :, None, None]).flatten(-2)
    q, k = qk.unbind(2)
    if temperature is not None:
        q = q * temperature.view(heads, 1)
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
