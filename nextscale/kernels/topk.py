"""The tokens of a row with the largest scores: FastVAR selects these before every sublayer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shapes import power_of_two

# Two launches and a few kilobytes. Torch sorts twice, stably, for which it takes several launches each: with FastVAR's preset for
# infinity-2b 150 selections among 1024 or 1600 tokens a request. A token's rank is counted by comparing it with all others, 2.6 million
# comparisons for 1600 tokens: 5.3 us for two rows on an H200 (17 with 32 tokens a program and 256 compared at a time), and 1.7 to place
# them in order.

COMPARED = 2048  # tokens that a program compares its own with at a time, at most
OWN = 8  # tokens whose rank a program counts
ORDERED = 4096  # tokens that a program puts in order at a time, at most


@triton.jit
def sortable(score):
    """Whole numbers in the same order; both zeros are equal, and what is not a number is larger than all."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, 0x7FFFFFFF, ordered)


@triton.jit(do_not_specialize=["tokens", "keep"])
def topk_indices_rank_kernel(score_ptr, kept_ptr, tokens, keep, score_row, ROUNDS: tl.constexpr, OWN: tl.constexpr, COMPARED: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    scores = score_ptr + row * score_row
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    inside = own < tokens
    mine = sortable(tl.load(scores + own, mask=inside, other=0.0))
    rank = tl.zeros([OWN], dtype=tl.int32)
    for step in range(ROUNDS):
        other = step * COMPARED + tl.arange(0, COMPARED)
        theirs = sortable(tl.load(scores + other, mask=other < tokens, other=0.0))
        before = (theirs[None, :] > mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None]))
        rank += tl.sum((before & (other < tokens)[None, :]).to(tl.int32), axis=1)
    tl.store(kept_ptr + row * tokens + own, (rank < keep).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["tokens", "keep"])
def topk_indices_place_kernel(kept_ptr, out_ptr, tokens, keep, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found = 0
    for step in range(ROUNDS):
        token = step * BLOCK + tl.arange(0, BLOCK)
        kept = tl.load(kept_ptr + row * tokens + token, mask=token < tokens, other=0).to(tl.int32)
        place = found + tl.cumsum(kept, axis=0) - kept
        tl.store(out_ptr + row * keep + place, token.to(tl.int64), mask=kept != 0)
        found += tl.sum(kept, axis=0)


def rounds(tokens: int, at_a_time: int) -> int:
    """Rounds that cover all tokens; a power of two, so that few numbers of tokens need a kernel of their own."""
    return power_of_two(triton.cdiv(tokens, at_a_time))


def topk_indices_sorted(score: Tensor, keep: int) -> Tensor:
    """Positions of the `keep` largest entries of every row of score [R, N], float32, ascending: [R, keep]. Of equals the first is taken."""
    rows, tokens = score.shape
    if score.dtype != torch.float32 or not 0 <= keep <= tokens:
        raise ValueError(f"expected scores [R, N] in float32 and N to keep at most; got {list(score.shape)}, {score.dtype}, {keep}")
    out = torch.empty(rows, keep, dtype=torch.int64, device=score.device)
    if not out.numel():
        return out
    score = score if score.stride(1) == 1 else score.contiguous()
    kept = torch.empty(rows, tokens, dtype=torch.int8, device=score.device)
    all_tokens = max(power_of_two(tokens), 32)
    compared, block = min(all_tokens, COMPARED), min(all_tokens, ORDERED)
    with torch.cuda.device_of(score):
        topk_indices_rank_kernel[triton.cdiv(tokens, OWN), rows](
            score, kept, tokens, keep, score.stride(0), ROUNDS=rounds(tokens, compared), OWN=OWN, COMPARED=compared, num_warps=4
        )
        topk_indices_place_kernel[(rows,)](
            kept, out, tokens, keep, ROUNDS=rounds(tokens, block), BLOCK=block, num_warps=max(block // 256, 1)
        )
    return out


def topk_indices_sorted_reference(score: Tensor, keep: int) -> Tensor:
    order = score.argsort(dim=1, descending=True, stable=True)  # of equals the first
    return order[:, :keep].sort(dim=1).values
