"""What the launchers share: how tensors are laid out, how they are cut into tiles, and how many warps a program gets."""

from __future__ import annotations

import torch
from torch import Tensor

ELEMENTS_PER_THREAD = 16  # two 16-byte accesses of bfloat16 in flight per tensor
MAX_WARPS = 16
MAX_CHANNELS = 128  # of a tile of an image: 256 bytes of bfloat16 side by side
MAX_NORM_CONV = 256  # channels whose weights a program of `norm_conv` can keep
MIN_SQUARE = 1e-24  # only keeps a zero vector from dividing by zero


def power_of_two(count: int) -> int:
    """The smallest power of two that is not less than `count`."""
    return 1 << max(count - 1, 0).bit_length()


def warps_for(elements: int) -> int:
    """Warps of a program that holds this number of elements (a power of two) of each tensor: 4 for 2048, 8 for 4096."""
    return min(max(elements // (32 * ELEMENTS_PER_THREAD), 1), MAX_WARPS)


def dense_channels(x: Tensor) -> Tensor:
    """Neighbouring channels side by side, as the kernels read them; any other stride is taken as it is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def per_row(x: Tensor, rows: int, channels: int) -> Tensor:
    """[C], [1, 1, C] or [R, 1, C] as [R, C] without a copy: what all rows share has a row stride of 0."""
    return dense_channels(x if x.ndim == 1 else x[:, 0]).expand(rows, channels)


def require_shape(name: str, x: Tensor, *shape: int) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} is {list(x.shape)}; expected {list(shape)}")


def require_index(index: Tensor, rows: int) -> Tensor:
    """[R, K] positions, contiguous."""
    require_shape("index", index, rows, index.shape[-1])
    return index.contiguous()


def image_sizes(x: Tensor) -> tuple[int, int, int]:
    """Images, channels, pixels of an image."""
    if x.ndim != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"expected [B, C, H, W] in channels-last layout; got {list(x.shape)} with strides {list(x.stride())}")
    return x.shape[0], x.shape[1], x.shape[2] * x.shape[3]


def tile_sizes(channels: int, pixels: int, elements: int) -> tuple[int, int]:
    """Pixels and channels of a tile: as many channels as the largest power of two that divides them, so that no lane is idle."""
    block = min(MAX_CHANNELS, channels & -channels)
    return min(elements // block, power_of_two(pixels)), block
