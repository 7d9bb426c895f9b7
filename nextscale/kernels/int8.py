"""int8 weights with one scale per output: a linear layer for few tokens, and dequantization for many."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .shapes import dense_channels, power_of_two, require_shape, warps_for

# For few tokens reading the weights takes all the time: [6144, 2048] has 12.6 MB, 2.9 us at 4.3 TB/s, half of bfloat16. Integers up to 127
# are exact in bfloat16 and float16, so the products are exact; the scale is applied to their sum.


@triton.jit(do_not_specialize=["tokens"])
def int8_linear_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, tokens, x_token,
    BIASED: tl.constexpr, CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of the weights
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    asked = token < tokens
    known = row < OUTPUTS
    x_ptr += token.to(tl.int64)[:, None] * x_token
    weight_ptr += row.to(tl.int64)[None, :] * CHANNELS
    total = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    for start in tl.range(0, CHANNELS, BLOCK, num_stages=STAGES):
        channel = start + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        x = tl.load(x_ptr + channel[None, :], mask=asked[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_ptr + channel[:, None], mask=known[None, :] & inside[:, None], other=0)
        total = tl.dot(x, weight.to(x.dtype), total)
    total *= tl.load(scale_ptr + row, mask=known, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias_ptr + row, mask=known, other=0.0).to(tl.float32)[None, :]
    written = token.to(tl.int64)[:, None] * OUTPUTS + row[None, :]
    tl.store(out_ptr + written, total.to(out_ptr.dtype.element_ty), mask=asked[:, None] & known[None, :])


class Tile(NamedTuple):
    tokens: int
    rows: int  # of the weights
    channels: int
    warps: int
    stages: int


def tile_for(tokens: int, outputs: int) -> Tile:
    """Returns the tile sizes. Weights with few rows use small tiles, so that there are enough programs for all multiprocessors.

    On an H200 with 64 tokens, weights of 2048 x 8192 take 22.8 us with small tiles and 37.5 with large ones, 6144 x 2048 take 17.1 and
    14.9 us.
    """
    return Tile(16, 32, 128, 4, 4) if tokens <= 16 or outputs < 4096 else Tile(64, 32, 128, 4, 3)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x [..., K] times int8 weight [N, K] times float32 scale [N], plus bias [N]: [..., N], in half precision."""
    outputs, channels = weight.shape
    require_shape("scale", scale, outputs)
    if bias is not None:
        require_shape("bias", bias, outputs)
    flat = dense_channels(x).reshape(-1, channels)
    out = torch.empty(flat.shape[0], outputs, dtype=x.dtype, device=x.device)
    tokens, rows, block, warps, stages = tile_for(flat.shape[0], outputs)
    with torch.cuda.device_of(x):
        int8_linear_kernel[triton.cdiv(outputs, rows), triton.cdiv(flat.shape[0], tokens)](
            flat, weight, scale, bias, out, flat.shape[0], flat.stride(0),
            BIASED=bias is not None, CHANNELS=channels, OUTPUTS=outputs, TOKENS=tokens, ROWS=rows, BLOCK=block, STAGES=stages,
            num_warps=warps,
        )  # fmt: skip
    return out.view(*x.shape[:-1], outputs)


def int8_linear_reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, restore_int8_reference(weight, scale, x.dtype), bias)


@triton.jit
def restore_int8_kernel(code_ptr, scale_ptr, out_ptr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    code = tl.load(code_ptr + row * CHANNELS + channel, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + row * CHANNELS + channel, (code * tl.load(scale_ptr + row)).to(out_ptr.dtype.element_ty), mask=inside)


def restore_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantizes int8 codes [N, K] with float32 scale [N]. [6144, 2048] has 38 MB of traffic, 8.8 us at 4.3 TB/s; torch takes 49 us."""
    outputs, channels = codes.shape
    require_shape("scale", scale, outputs)
    out = torch.empty(outputs, channels, dtype=dtype, device=codes.device)
    block = power_of_two(channels)
    with torch.cuda.device_of(codes):
        restore_int8_kernel[(outputs,)](codes, scale, out, CHANNELS=channels, BLOCK=block, num_warps=warps_for(block))
    return out


def restore_int8_reference(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes * scale[:, None]).to(dtype)
