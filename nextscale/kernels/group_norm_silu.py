"""Group norm followed by SiLU, for images whose channels lie side by side (channels-last)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .shapes import power_of_two

# The input is read twice and the output written once. Bytes in bfloat16 and the least time at 4.3 TB/s:
#   one image of 1024 x 1024 with 128 channels              0.81 GB   0.19 ms
#   all norms of Infinity's decoder at 1024 x 1024 pixels     11 GB    2.5 ms
# torch's own group norm gives one program to each (image, group), 32 for an image on 132 multiprocessors, and turns channels-last
# tensors round before and after.
TILE = 8192  # pixels x channels that a program holds at a time
LARGEST_CHANNELS = 128  # of a tile
PROGRAMS = 528  # for the sums: four per multiprocessor of an H200
SHARES = 64  # partial sums that are added up at a time
WARPS = 8


@triton.jit
def partial_sums_kernel(
    x_ptr, sums_ptr, pixels, shares, SHARE: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of one image, one share of its pixels and one block of channels: sums of the distances from the first pixel and of their squares.

    Distances from some value of the same channel, since squares of large values that hardly differ cancel.
    """
    image = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = x_ptr + image * pixels * CHANNELS
    pivot = tl.load(base + channel).to(tl.float32)
    first = tl.zeros([BLOCK], dtype=tl.float32)
    second = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, SHARE, PIXELS):
        inner = start + tl.arange(0, PIXELS)
        pixel = part.to(tl.int64) * SHARE + inner
        inside = pixel < pixels  # shares are whole tiles
        x = tl.load(base + pixel[:, None] * CHANNELS + channel[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        distance = tl.where(inside[:, None], x - pivot[None, :], 0.0)
        first += tl.sum(distance, axis=0)
        second += tl.sum(distance * distance, axis=0)
    out = sums_ptr + (image * shares + part) * 2 * CHANNELS + channel
    tl.store(out, first)
    tl.store(out + CHANNELS, second)


@triton.jit
def mean_scale_kernel(
    x_ptr, sums_ptr, weight_ptr, mean_ptr, scale_ptr, pixels, eps,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, MEMBERS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Of one group of one image."""
    image = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * MEMBERS + member
    inside = member < MEMBERS
    first = tl.zeros([BLOCK], dtype=tl.float32)
    second = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, PARTS, SHARES):
        part = start + tl.arange(0, SHARES)
        there = (part < PARTS)[:, None] & inside[None, :]
        source = sums_ptr + (image * PARTS + part)[:, None] * 2 * CHANNELS + channel[None, :]
        first += tl.sum(tl.load(source, mask=there, other=0.0), axis=0)
        second += tl.sum(tl.load(source + CHANNELS, mask=there, other=0.0), axis=0)
    pivot = tl.load(x_ptr + image * pixels * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    own_mean = tl.where(inside, pivot + first / pixels, 0.0)  # of each channel
    mean = tl.sum(own_mean, axis=0) / MEMBERS
    apart = tl.where(inside, own_mean - mean, 0.0)
    own_variance = second / pixels - (first / pixels) * (first / pixels)
    variance = tl.sum(tl.where(inside, own_variance, 0.0) + apart * apart, axis=0) / MEMBERS
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    scale = weight * tl.rsqrt(tl.maximum(variance, 0.0) + eps)
    tl.store(mean_ptr + image * CHANNELS + channel, mean + tl.zeros([BLOCK], dtype=tl.float32), mask=inside)
    tl.store(scale_ptr + image * CHANNELS + channel, scale, mask=inside)


@triton.jit
def centred_silu_kernel(
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
    # The mean goes first: a group that hardly varies has a scale of up to 1 / sqrt(eps), 1000, which would magnify what x * scale rounds.
    y = (tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) - mean) * scale + bias
    y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """silu(group_norm(x)) of x [B, C, H, W] in channels-last layout, which the result has too. Rounded once, where torch rounds twice."""
    return centred_silu(x, *mean_and_scale(x, groups, weight, eps), bias)


def mean_and_scale(x: Tensor, groups: int, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What the norm takes from the channels of every image and what it multiplies them by then, [B, C] float32 each."""
    images, channels, total = image_sizes(x)
    tile_pixels, block = tile_sizes(channels, total)
    wanted = max(1, PROGRAMS // (images * (channels // block)))
    share = tile_pixels * triton.cdiv(triton.cdiv(total, wanted), tile_pixels)
    shares = triton.cdiv(total, share)
    sums = torch.empty(images, shares, 2, channels, dtype=torch.float32, device=x.device)
    mean, scale = (torch.empty(images, channels, dtype=torch.float32, device=x.device) for _ in range(2))
    members = channels // groups
    with torch.cuda.device_of(x):
        partial_sums_kernel[images, shares, channels // block](
            x, sums, total, shares, SHARE=share, CHANNELS=channels, PIXELS=tile_pixels, BLOCK=block, num_warps=WARPS
        )
        mean_scale_kernel[images, groups](
            x, sums, weight, mean, scale, total, eps,
            PARTS=shares, CHANNELS=channels, MEMBERS=members, BLOCK=power_of_two(members), SHARES=SHARES, num_warps=1,
        )  # fmt: skip
    return mean, scale


def centred_silu(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """silu((x - mean) * scale + bias) of x [B, C, H, W] in channels-last layout; mean and scale [B, C] float32, bias [C]."""
    images, channels, total = image_sizes(x)
    tile_pixels, block = tile_sizes(channels, total)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    with torch.cuda.device_of(x):
        centred_silu_kernel[triton.cdiv(total, tile_pixels), images, channels // block](
            x, mean, scale, bias, out, total, CHANNELS=channels, PIXELS=tile_pixels, BLOCK=block, num_warps=WARPS
        )
    return out


def group_norm_silu_reference(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.silu(torch.group_norm(x, groups, weight, bias, eps))


def image_sizes(x: Tensor) -> tuple[int, int, int]:
    """Images, channels, pixels of an image."""
    if x.ndim != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"expected [B, C, H, W] in channels-last layout; got {list(x.shape)} with strides {list(x.stride())}")
    return x.shape[0], x.shape[1], x.shape[2] * x.shape[3]


def tile_sizes(channels: int, pixels: int) -> tuple[int, int]:
    """Pixels and channels of a tile: as many channels as the largest power of two that divides them, so that no lane is idle."""
    block = min(LARGEST_CHANNELS, channels & -channels)
    return min(TILE // block, power_of_two(pixels)), block
