"""Adds the bias of a convolution and the residual to channels-last images in one pass.

If a group norm follows, the sums that it needs can be collected in the same pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .group_norm import STAGES, WARPS, Sums, share_sizes
from .shapes import image_sizes, require_shape, tile_sizes, warps_for

# Memory traffic for bfloat16, 1024 x 1024 pixels with 128 channels, and minimum time at 4.3 TB/s:
#   with a residual      0.81 GB   0.19 ms
#   bias only            0.54 GB   0.12 ms
# Torch adds the bias and the residual in separate passes: 6.0 and 1.0 ms of the 28.5 ms that Infinity's decoder took for 1024 x 1024 pixels
# on an H200.
TILE = 4096  # pixels x channels


@triton.jit(do_not_specialize=["pixels"])
def add_bias_residual_kernel(
    x_ptr, bias_ptr, residual_ptr, residual_bias_ptr, pixels, ADDED: tl.constexpr, BIASED: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (pixel < pixels)[:, None]
    place = pixel[:, None] * CHANNELS + channel[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel).to(tl.float32)
    if BIASED:
        bias += tl.load(residual_bias_ptr + channel).to(tl.float32)
    x += bias[None, :]
    if ADDED:
        x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels", "share", "shares"])
def add_bias_residual_sums_kernel(
    x_ptr, bias_ptr, residual_ptr, residual_bias_ptr, pivot_ptr, sums_ptr, pixels, share, shares, BIASED: tl.constexpr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds, and sums distances, for one image, share of its pixels and block of channels per program.

    Distances are from the first pixel of the residual plus biases, which is close to the result and not overwritten.
    """
    image = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = image * pixels * CHANNELS
    bias = tl.load(bias_ptr + channel).to(tl.float32)
    if BIASED:
        bias += tl.load(residual_bias_ptr + channel).to(tl.float32)
    pivot = tl.load(residual_ptr + base + channel).to(tl.float32) + bias
    first = tl.zeros([PIXELS, BLOCK], dtype=tl.float32)
    second = tl.zeros([PIXELS, BLOCK], dtype=tl.float32)
    for start in tl.range(0, share, PIXELS, num_stages=STAGES):
        pixel = part.to(tl.int64) * share + start + tl.arange(0, PIXELS)
        inside = (pixel < pixels)[:, None]
        place = base + pixel[:, None] * CHANNELS + channel[None, :]
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, rounded, mask=inside)
        distance = tl.where(inside, rounded.to(tl.float32) - pivot[None, :], 0.0)
        first += distance
        second += distance * distance
    tl.store(pivot_ptr + image * CHANNELS + channel, pivot, mask=(part == 0) & (channel < CHANNELS))
    out = sums_ptr + (image * shares + part) * 2 * CHANNELS + channel
    tl.store(out, tl.sum(first, axis=0))
    tl.store(out + CHANNELS, tl.sum(second, axis=0))


def add_bias_residual_(x: Tensor, bias: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
    """Adds bias + residual + residual_bias to x in place; images are channels-last [B, C, H, W], biases [C]."""
    images, channels, pixels = image_sizes(x)
    check_shapes(x, bias, residual, residual_bias)
    tile_pixels, block = tile_sizes(channels, images * pixels, TILE)
    with torch.cuda.device_of(x):
        add_bias_residual_kernel[triton.cdiv(images * pixels, tile_pixels), channels // block](
            x, bias, residual, residual_bias, images * pixels, ADDED=residual is not None, BIASED=residual_bias is not None,
            CHANNELS=channels, PIXELS=tile_pixels, BLOCK=block, num_warps=warps_for(tile_pixels * block),
        )  # fmt: skip
    return x


def add_bias_residual_sums_(x: Tensor, bias: Tensor, residual: Tensor, residual_bias: Tensor | None = None) -> Sums:
    """Adds bias + residual + residual_bias to x in place, and returns the sums for a following group norm."""
    images, channels, pixels = image_sizes(x)
    check_shapes(x, bias, residual, residual_bias)
    tile_pixels, block, share, shares = share_sizes(images, channels, pixels)
    pivot = torch.empty(images, channels, dtype=torch.float32, device=x.device)
    parts = torch.empty(images, shares, 2, channels, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        add_bias_residual_sums_kernel[images, shares, channels // block](
            x, bias, residual, residual_bias, pivot, parts, pixels, share, shares, BIASED=residual_bias is not None,
            CHANNELS=channels, PIXELS=tile_pixels, BLOCK=block, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return Sums(pivot, parts)


def check_shapes(x: Tensor, bias: Tensor, residual: Tensor | None, residual_bias: Tensor | None) -> None:
    require_shape("bias", bias, x.shape[1])
    if residual is not None:
        require_shape("residual", residual, *x.shape)
        image_sizes(residual)
    if residual_bias is not None:
        require_shape("residual_bias", residual_bias, x.shape[1])


def add_bias_residual_reference(x: Tensor, bias: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Tensor:
    """Computes the same sum in torch, out of place."""
    y = x + bias[:, None, None]
    if residual is not None:
        y = (residual if residual_bias is None else residual + residual_bias[:, None, None]) + y
    return y
