"""Group norm followed by SiLU, for channels-last images."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .shapes import image_sizes, power_of_two, require_shape, tile_sizes

# The input is read twice and the output is written once. Memory traffic in bfloat16 and minimum time at 4.3 TB/s:
#   one image of 1024 x 1024 with 128 channels              0.81 GB   0.19 ms
#   all norms of Infinity's decoder at 1024 x 1024 pixels     11 GB    2.5 ms
# Torch runs one program per image and group, 32 for one image on 132 multiprocessors, and converts channels-last tensors before and after.
# Measured on an H200 for all norms of that decoder: sums 1.5 ms, norm and SiLU 1.7 ms.
TILE = 8192  # pixels x channels per program
SUMS_TILE = 4096  # smaller when sums are collected: 16 elements and 32 sums per thread
PROGRAMS = 1056  # for the sums: eight per multiprocessor of an H200
STAGES = 3  # pipeline stages
SHARES = 128  # partial sums that are added at a time
WARPS = 8
GROUP_WARPS = 4


@triton.jit(do_not_specialize=["pixels", "share", "shares"])
def mean_and_scale_sums_kernel(
    x_ptr, sums_ptr, pixels, share, shares,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums distances from the first pixel and their squares, for one image, share of its pixels and block of channels per program.

    Distances from a value of the same channel avoid cancellation between squares of large, similar values. Each thread sums the values that
    it reads, with one reduction at the end.
    """
    image = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = x_ptr + image * pixels * CHANNELS
    pivot = tl.load(base + channel).to(tl.float32)
    first = tl.zeros([PIXELS, BLOCK], dtype=tl.float32)
    second = tl.zeros([PIXELS, BLOCK], dtype=tl.float32)
    for start in tl.range(0, share, PIXELS, num_stages=STAGES):
        inner = start + tl.arange(0, PIXELS)
        pixel = part.to(tl.int64) * share + inner
        inside = pixel < pixels  # shares are whole tiles
        x = tl.load(base + pixel[:, None] * CHANNELS + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        distance = tl.where(inside[:, None], x - pivot[None, :], 0.0)
        first += distance
        second += distance * distance
    out = sums_ptr + (image * shares + part) * 2 * CHANNELS + channel
    tl.store(out, tl.sum(first, axis=0))
    tl.store(out + CHANNELS, tl.sum(second, axis=0))


@triton.jit(do_not_specialize=["pivot_image", "pixels", "shares"])
def mean_and_scale_kernel(
    pivot_ptr, pivot_image, sums_ptr, shift_ptr, weight_ptr, mean_ptr, scale_ptr, pixels, shares, eps, SHIFTED: tl.constexpr,
    CHANNELS: tl.constexpr, MEMBERS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Computes mean and scale of one image and group per program. A shift changes the means, but not the distances from the pivot."""
    image = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * MEMBERS + member
    inside = member < MEMBERS
    firsts = tl.zeros([SHARES, BLOCK], dtype=tl.float32)
    seconds = tl.zeros([SHARES, BLOCK], dtype=tl.float32)
    for start in range(0, shares, SHARES):
        part = start + tl.arange(0, SHARES)
        there = (part < shares)[:, None] & inside[None, :]
        source = sums_ptr + (image * shares + part)[:, None] * 2 * CHANNELS + channel[None, :]
        firsts += tl.load(source, mask=there, other=0.0)
        seconds += tl.load(source + CHANNELS, mask=there, other=0.0)
    first, second = tl.sum(firsts, axis=0), tl.sum(seconds, axis=0)
    shift = tl.zeros([BLOCK], dtype=tl.float32)
    if SHIFTED:
        shift = tl.load(shift_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    pivot = tl.load(pivot_ptr + image * pivot_image + channel, mask=inside, other=0.0).to(tl.float32)
    own_mean = pivot + first / pixels  # per channel, without the shift
    mean = tl.sum(tl.where(inside, own_mean + shift, 0.0), axis=0) / MEMBERS
    apart = tl.where(inside, own_mean + shift - mean, 0.0)
    own_variance = second / pixels - (first / pixels) * (first / pixels)
    variance = tl.sum(tl.where(inside, own_variance, 0.0) + apart * apart, axis=0) / MEMBERS
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    scale = weight * tl.rsqrt(tl.maximum(variance, 0.0) + eps)
    # The group's mean without the shift. `mean - shift` would round even if a group has one channel.
    tl.store(mean_ptr + image * CHANNELS + channel, own_mean - apart, mask=inside)
    tl.store(scale_ptr + image * CHANNELS + channel, scale, mask=inside)


@triton.jit(do_not_specialize=["pixels"])
def centered_silu_kernel(
    x_ptr, mean_ptr, scale_ptr, bias_ptr, out_ptr, pixels, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr
):
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (pixel < pixels)[:, None]
    place = (image * pixels + pixel)[:, None] * CHANNELS + channel[None, :]
    mean = tl.load(mean_ptr + image * CHANNELS + channel)[None, :]
    scale = tl.load(scale_ptr + image * CHANNELS + channel)[None, :]
    bias = tl.load(bias_ptr + channel).to(tl.float32)[None, :]
    # Subtract the mean first: with little variance the scale is up to 1 / sqrt(eps) = 1000, which would amplify rounding of x * scale.
    y = (tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) - mean) * scale + bias
    y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


class Sums(NamedTuple):
    """Per-channel sums of images, in shares of their pixels."""

    pivot: Tensor  # [B, C], reference value for distances: any value of the channel
    parts: Tensor  # [B, shares, 2, C] float32: sums of distances and of their squares


def group_norm_silu(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    shift: Tensor | None = None,
    sums: Sums | None = None,
) -> Tensor:
    """Returns silu(group_norm(x + shift)) for channels-last x [B, C, H, W], also channels-last. Rounds once, where torch rounds twice.

    Args:
        shift: [C], such as the bias of the preceding convolution; adding it here needs no extra pass.
        sums: of x, if known, which saves a pass.
    """
    return centered_silu(x, *mean_and_scale(x, groups, weight, eps, shift, sums), bias)


def share_sizes(images: int, channels: int, pixels: int) -> tuple[int, int, int, int]:
    """Returns the pixels and channels of a tile, and the size in pixels and number of the shares of an image."""
    tile_pixels, block = tile_sizes(channels, pixels, SUMS_TILE)
    wanted = max(1, PROGRAMS // (images * (channels // block)))
    share = tile_pixels * triton.cdiv(triton.cdiv(pixels, wanted), tile_pixels)
    return tile_pixels, block, share, triton.cdiv(pixels, share)


def channel_sums(x: Tensor) -> Sums:
    images, channels, total = image_sizes(x)
    tile_pixels, block, share, shares = share_sizes(images, channels, total)
    parts = torch.empty(images, shares, 2, channels, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        mean_and_scale_sums_kernel[images, shares, channels // block](
            x, parts, total, share, shares,
            CHANNELS=channels, PIXELS=tile_pixels, BLOCK=block, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return Sums(x[:, :, 0, 0], parts)


def mean_and_scale(
    x: Tensor, groups: int, weight: Tensor, eps: float, shift: Tensor | None = None, sums: Sums | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the mean and scale of each image and channel for the group norm of x + shift, [B, C] float32 each."""
    images, channels, total = image_sizes(x)
    if shift is not None:
        require_shape("shift", shift, channels)
    pivot, parts = channel_sums(x) if sums is None else sums
    require_shape("sums", parts, images, parts.shape[1], 2, channels)
    mean, scale = (torch.empty(images, channels, dtype=torch.float32, device=x.device) for _ in range(2))
    members = channels // groups
    with torch.cuda.device_of(x):
        mean_and_scale_kernel[images, groups](
            pivot, pivot.stride(0), parts, shift, weight, mean, scale, total, parts.shape[1], eps, SHIFTED=shift is not None,
            CHANNELS=channels, MEMBERS=members, BLOCK=power_of_two(members), SHARES=SHARES, num_warps=GROUP_WARPS,
        )  # fmt: skip
    return mean, scale


def centered_silu(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Returns silu((x - mean) * scale + bias) for channels-last x [B, C, H, W]; mean and scale are [B, C] float32, bias is [C]."""
    images, channels, total = image_sizes(x)
    tile_pixels, block = tile_sizes(channels, total, TILE)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    with torch.cuda.device_of(x):
        centered_silu_kernel[triton.cdiv(total, tile_pixels), images, channels // block](
            x, mean, scale, bias, out, total, CHANNELS=channels, PIXELS=tile_pixels, BLOCK=block, num_warps=WARPS
        )
    return out


def group_norm_silu_reference(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shift: Tensor | None = None) -> Tensor:
    x = x if shift is None else x + shift[:, None, None]
    return F.silu(torch.group_norm(x, groups, weight, bias, eps))
