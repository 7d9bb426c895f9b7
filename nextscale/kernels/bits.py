"""From the logits of bits to drawn bits and their signs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 1024

# Bytes for two rows of 4096 tokens of 32 bits: logits 2.1 MB, noise 1.0 MB in; bits 1.0 MB (torch counts in int64), signs 0.5 MB, guided
# logits 1.0 MB out: 5.8 MB, 1.3 us at 4.3 TB/s. What it saves are the launches of about ten small kernels per stage. The noise stays
# torch's, whose generators the seeds belong to. So does adding signs to the canvas: it is torch's own interpolation of 0.5 MB, once per
# stage, whose last bits the next stage reads.


@triton.jit
def bit_update_kernel(
    logits_ptr, noise_ptr, bits_ptr, signs_ptr, guided_ptr, count, scale, rest, temperature, size,
    MIXED: tl.constexpr, TEMPERED: tl.constexpr, DRAWN: tl.constexpr, GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    both = entry[:, None] * 2 + tl.arange(0, 2)[None, :]
    within = both < count * 2
    logits = tl.load(logits_ptr + both, mask=within, other=0.0)
    if MIXED:
        logits = scale * logits + rest * tl.load(logits_ptr + count * 2 + both, mask=within, other=0.0)
    if TEMPERED:
        # a reciprocal first: so torch divides by a number on a GPU
        logits = logits * tl.div_rn(1.0, temperature) if GPU else tl.div_rn(logits, temperature)
    tl.store(guided_ptr + both, logits, mask=within)
    zero, one = tl.split(logits)
    if DRAWN:
        zero_noise, one_noise = tl.split(tl.load(noise_ptr + both, mask=within, other=1.0))
        larger = tl.maximum(zero, one)
        if GPU:  # torch's exponential, to the last bit
            zero, one = libdevice.exp(zero - larger), libdevice.exp(one - larger)
        else:
            zero, one = tl.exp(zero - larger), tl.exp(one - larger)
        total = zero + one
        zero = tl.div_rn(tl.div_rn(zero, total), zero_noise)
        one = tl.div_rn(tl.div_rn(one, total), one_noise)
    bit = one > zero  # of equals the first, as argmax has it
    tl.store(bits_ptr + entry, bit.to(tl.int64), mask=inside)
    tl.store(signs_ptr + entry, tl.where(bit, size, -size), mask=inside)


class BitUpdate(NamedTuple):
    bits: Tensor  # [B, N, bits], 0 or 1, int64
    signs: Tensor  # [B, N, bits], float32
    guided: Tensor  # [B, N, bits, 2], the logits that the bits were drawn from


def bit_update(
    logits: Tensor, noise: Tensor | None, *, batch: int, channels: int, scale: float = 1.0, temperature: float = 1.0, warps: int = 4
) -> BitUpdate:
    """Bits of float32 logits [B or 2B, N, bits, 2]: the branches mixed, divided by the temperature, drawn with unit exponential noise
    [B, N, bits, 2]; without noise the more likely ones. The choices are those of guidance.mix, Sampling.prepare and sampling.draw.

    channels: bits of a latent cell; signs are 1 / sqrt(channels) large.
    """
    pairs = (batch, *logits.shape[1:])
    if logits.dtype != torch.float32 or logits.ndim != 4 or logits.shape[-1] != 2 or logits.shape[0] not in (batch, 2 * batch):
        raise ValueError(f"logits are float32 [{batch} or {2 * batch}, N, bits, 2]; got {list(logits.shape)}, {logits.dtype}")
    if noise is not None and (noise.dtype != torch.float32 or tuple(noise.shape) != pairs):
        raise ValueError(f"noise is float32 {list(pairs)}; got {list(noise.shape)}, {noise.dtype}")
    logits, noise = logits.contiguous(), None if noise is None else noise.contiguous()
    mixed = logits.shape[0] > batch and scale != 1
    guided = torch.empty(pairs, device=logits.device)
    signs = torch.empty(pairs[:-1], device=logits.device)
    bits = torch.empty(pairs[:-1], dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):
        bit_update_kernel[(triton.cdiv(bits.numel(), BLOCK),)](
            logits, noise, bits, signs, guided, bits.numel(), float(scale), 1.0 - scale, float(temperature), 1 / math.sqrt(channels),
            MIXED=mixed, TEMPERED=temperature != 1, DRAWN=noise is not None, GPU=logits.is_cuda, BLOCK=BLOCK,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return BitUpdate(bits, signs, guided)


def bit_update_reference(
    logits: Tensor, noise: Tensor | None, *, batch: int, channels: int, scale: float = 1.0, temperature: float = 1.0
) -> BitUpdate:
    guided = logits[:batch]
    if logits.shape[0] > batch and scale != 1:
        cond, uncond = logits.chunk(2)
        guided = scale * cond + (1 - scale) * uncond
    if temperature != 1:
        guided = guided / temperature
    bits = guided.argmax(dim=-1) if noise is None else (guided.softmax(dim=-1) / noise).argmax(dim=-1)
    return BitUpdate(bits, (2.0 * bits - 1.0) / math.sqrt(channels), guided)
