"""Shared by the launchers: layout checks, tile sizes and numbers of warps."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENTS_PER_THREAD = 16  # two 16-byte accesses of bfloat16 in flight per tensor
MAX_WARPS = 16
MAX_CHANNELS = 128  # of an image tile: 256 contiguous bytes of bfloat16
MAX_NORM_CONV = 256  # channels whose weights fit into a program of `norm_conv`
MIN_SQUARE = 1e-24  # avoids division by zero for zero vectors


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def warps_for(elements: int) -> int:
    """Returns the warps for a program with this number of elements (a power of two) per tensor: 4 for 2048, 8 for 4096."""
    return min(max(elements // (32 * ELEMENTS_PER_THREAD), 1), MAX_WARPS)


def dense_channels(x: Tensor) -> Tensor:
    """Makes the last dimension contiguous; other strides are arbitrary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def per_row(x: Tensor, rows: int, channels: int) -> Tensor:
    """Views [C], [1, 1, C] or [R, 1, C] as [R, C]; values that all rows share have a row stride of 0."""
    return dense_channels(x if x.ndim == 1 else x[:, 0]).expand(rows, channels)


def require_shape(name: str, x: Tensor, *shape: int) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}; got {list(x.shape)}.")


def require_index(index: Tensor, rows: int) -> Tensor:
    """Returns contiguous positions [R, K]."""
    require_shape("index", index, rows, index.shape[-1])
    return index.contiguous()


def image_sizes(x: Tensor) -> tuple[int, int, int]:
    """Returns the numbers of images, channels and pixels per image."""
    if x.ndim != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"x must be channels-last [B, C, H, W]; got {list(x.shape)} with strides {list(x.stride())}.")
    return x.shape[0], x.shape[1], x.shape[2] * x.shape[3]


def tile_sizes(channels: int, pixels: int, elements: int) -> tuple[int, int]:
    """Returns the pixels and channels of a tile. The channels are the largest power of two that divides them, so all lanes are used."""
    block = min(MAX_CHANNELS, channels & -channels)
    return min(elements // block, power_of_two(pixels)), block
