"""Bits sampled from the logits of 0 and of 1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 1024

# Bytes for 4096 tokens of 32 bits: logits 1.0 MB and noise 1.0 MB in, bits 1.0 MB out (torch counts in int64): 3.1 MB, 0.7 us at 4.3 TB/s.
# Measured on an H200: 6.7 us, torch 127. It takes the place of a dozen small kernels per stage: sort, softmax, sum and comparison of the
# filter, masks, softmax, quotient and argmax of sampling. The noise stays torch's, whose generators the seeds belong to. So does adding the
# bits to the canvas: it is torch's own interpolation, once per stage, whose last bits the next stage reads.


@triton.jit(do_not_specialize=["count"])  # one program for all stages
def sample_bits_kernel(logits_ptr, noise_ptr, bits_ptr, count, unlikely, FILTERED: tl.constexpr, GPU: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    both = entry[:, None] * 2 + tl.arange(0, 2)[None, :]
    within = both < count * 2
    zero, one = tl.split(tl.load(logits_ptr + both, mask=within, other=0.0))
    zero_noise, one_noise = tl.split(tl.load(noise_ptr + both, mask=within, other=1.0))
    larger = tl.maximum(zero, one)
    if GPU:  # torch's exponential, to the last bit
        zero, one = libdevice.exp(zero - larger), libdevice.exp(one - larger)
    else:
        zero, one = tl.exp(zero - larger), tl.exp(one - larger)
    total = zero + one
    zero, one = tl.div_rn(zero, total), tl.div_rn(one, total)
    bit = tl.div_rn(one, one_noise) > tl.div_rn(zero, zero_noise)  # of equals the first, as argmax has it
    if FILTERED:
        bit = tl.where(tl.minimum(zero, one) <= unlikely, one > zero, bit)
    tl.store(bits_ptr + entry, bit.to(tl.int64), mask=entry < count)


def sample_bits(logits: Tensor, noise: Tensor, top_p: float = 0.0) -> Tensor:
    """Bits [...], 0 or 1 in int64, of float32 logits [..., 2] with unit exponential noise of the same shape: the choices of
    sampling.filter_logits and sampling.sample.

    top_p: 0, or above a half, so that of two that are equally likely both stay; else it would be chance which of them does.
    """
    logits, noise = logits.contiguous(), noise.contiguous()
    bits = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):
        sample_bits_kernel[(triton.cdiv(bits.numel(), BLOCK),)](
            logits, noise, bits, bits.numel(), 1 - top_p, FILTERED=top_p != 0, GPU=logits.is_cuda, BLOCK=BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return bits


def sample_bits_reference(logits: Tensor, noise: Tensor, top_p: float = 0.0) -> Tensor:
    chances = logits.softmax(dim=-1)
    if top_p != 0:
        unlikely = chances.sort(dim=-1).values[..., :1] <= 1 - top_p
        chances = chances.masked_fill(unlikely & (chances < chances.amax(dim=-1, keepdim=True)), 0.0)
    return (chances / noise).argmax(dim=-1)
