"""Indices of the tokens with the largest scores, which FastVAR selects before every sublayer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import power_of_two

# One launch with little traffic; torch would run two stable sorts of several launches each. FastVAR's preset for infinity-2b makes 150
# selections among 1024 or 1600 tokens per request. One program per row keeps all scores in registers and finds the smallest selected score
# two bits at a time, in 16 rounds that count the scores above three thresholds. Comparing all pairs of tokens took 17 us for a pair of rows
# of 4096 tokens on an H200, but grew with the batch.

MAX_TOKENS = 16384  # per row and program; longer rows are sorted by torch


@triton.jit
def sortable(score):
    """Maps floats to integers in the same order. Both zeros are equal, and NaN is the largest."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, 0x7FFFFFFF, ordered)


@triton.jit(do_not_specialize=["tokens", "keep"])
def topk_indices_kernel(score_ptr, out_ptr, tokens, keep, score_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < tokens
    scores = sortable(tl.load(score_ptr + row * score_row + token, mask=inside, other=0.0)).to(tl.int64) + 0x80000000  # 32 bits, unsigned
    scores = tl.where(inside, scores, -1)
    least = tl.zeros([], dtype=tl.int64)  # largest threshold that at least `keep` scores reach
    for step in range(16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * step)
        reached = (scores >= least + unit).to(tl.int64)
        reached += (scores >= least + 2 * unit).to(tl.int64) << 20
        reached += (scores >= least + 3 * unit).to(tl.int64) << 40
        count = tl.sum(reached, axis=0)
        higher = ((count & 0xFFFFF) >= keep).to(tl.int64) + (((count >> 20) & 0xFFFFF) >= keep).to(tl.int64)
        least += (higher + ((count >> 40) >= keep).to(tl.int64)) * unit
    above = scores > least
    equal = scores == least
    first = tl.cumsum(equal.to(tl.int32), axis=0)  # ties: lowest index first
    kept = above | (equal & (first <= keep - tl.sum(above.to(tl.int32), axis=0)))
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(out_ptr + row * keep + place, token.to(tl.int64), mask=kept)


def topk_indices_sorted(score: Tensor, keep: int) -> Tensor:
    """Returns the indices [R, keep] of the largest entries of each row of score [R, N], float32, in ascending order. Ties: lowest first."""
    rows, tokens = score.shape
    if tokens > MAX_TOKENS:
        return topk_indices_sorted_reference(score, keep)
    out = torch.empty(rows, keep, dtype=torch.int64, device=score.device)
    if not out.numel():
        return out
    score = score if score.stride(1) == 1 else score.contiguous()
    block = max(power_of_two(tokens), 32)
    with torch.cuda.device_of(score):
        topk_indices_kernel[(rows,)](score, out, tokens, keep, score.stride(0), BLOCK=block, num_warps=min(max(block // 128, 1), 32))
    return out


def topk_indices_sorted_reference(score: Tensor, keep: int) -> Tensor:
    order = score.argsort(dim=1, descending=True, stable=True)  # ties: lowest index first
    return order[:, :keep].sort(dim=1).values
