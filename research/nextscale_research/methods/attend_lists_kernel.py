"""Attention in which neighboring queries read the same list of keys, and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nextscale.kernels.attention import LOG2_E, MIN_DOT
from nextscale.kernels.shapes import power_of_two

from .attend_lists import attend_lists_reference as attend_lists_reference  # in its own file: it also runs without Triton
from .attend_lists import require_lists

QUERIES, KEYS = 64, 64  # that a program takes at a time


@triton.jit(do_not_specialize=["queries", "groups", "listed"])
def attend_lists_kernel(
    q_ptr, keys_ptr, values_ptr, lists_ptr, counts_ptr, out_ptr, queries, groups, listed, factor,
    q_row, q_token, q_head, keys_row, keys_token, keys_head, values_row, values_token, values_head, list_row, list_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    tiles = tl.cdiv(GROUP, QUERIES)
    group = tl.program_id(0) // tiles
    within = (tl.program_id(0) % tiles) * QUERIES + tl.arange(0, QUERIES)
    query = group * GROUP + within
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    asked = ((within < GROUP) & (query < queries))[:, None] & inside[None, :]
    mine = (row * list_row + head * list_head) * groups + group
    count = tl.load(counts_ptr + mine)
    lists_ptr += mine * listed
    keys_ptr += row * keys_row + head * keys_head
    values_ptr += row * values_row + head * values_head
    q = tl.load(q_ptr + row * q_row + head * q_head + query[:, None] * q_token + channel[None, :], mask=asked, other=0.0)
    largest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    out = tl.zeros([QUERIES, BLOCK], dtype=tl.float32)
    for start in tl.range(0, count, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)
        there = place < count
        key = tl.load(lists_ptr + place, mask=there, other=0).to(tl.int64)
        k = tl.load(keys_ptr + key[None, :] * keys_token + channel[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        score = tl.where(there[None, :], tl.dot(q, k), float("-inf"))
        now = tl.maximum(largest, tl.max(score, axis=1) * factor)
        weight = tl.exp2(score * factor - now[:, None])
        faded = tl.exp2(largest - now)
        v = tl.load(values_ptr + key[:, None] * values_token + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        out = tl.dot(weight.to(v.dtype), v, out * faded[:, None])
        total = total * faded + tl.sum(weight, axis=1)
        largest = now
    written = ((row * queries + query[:, None]) * HEADS + head) * CHANNELS + channel[None, :]
    tl.store(out_ptr + written, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=asked)


def attend_lists(q: Tensor, keys: Tensor, values: Tensor, lists: Tensor, counts: Tensor, group: int, scale: float) -> Tensor:
    """q [R, N, H, D] over keys and values [R, T, H, D]: `group` queries after another read the keys that their list names: [R, N, H * D].

    lists: [R or 1, H or 1, groups, M], int32, key numbers; the first counts [R or 1, H or 1, groups] are read, at least 1.
    """
    require_lists(q, keys, values, lists, counts, group)
    rows, queries, heads, channels = q.shape
    if any(x.stride(3) != 1 for x in (q, keys, values)) or not lists.is_contiguous() or not counts.is_contiguous():
        raise ValueError("channels and lists must be contiguous")
    out = torch.empty(rows, queries, heads * channels, dtype=q.dtype, device=q.device)
    groups, by_head = lists.shape[2], int(lists.shape[1] > 1)
    with torch.cuda.device_of(q):
        attend_lists_kernel[groups * triton.cdiv(group, QUERIES), heads, rows](
            q, keys, values, lists, counts, out, queries, groups, lists.shape[3], scale * LOG2_E,
            *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], lists.shape[1] if lists.shape[0] > 1 else 0, by_head,
            GROUP=group, HEADS=heads, CHANNELS=channels, BLOCK=max(power_of_two(channels), MIN_DOT),
            QUERIES=QUERIES, KEYS=KEYS, STAGES=3 if channels <= 128 else 2, num_warps=4,
        )  # fmt: skip
    return out
