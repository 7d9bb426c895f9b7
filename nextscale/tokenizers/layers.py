"""Norms and convolutions as a GPU wants them: kernels in their place, biases added on the way, channels last."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels

if TYPE_CHECKING:
    from ..kernels.group_norm import Sums


class GroupNorm(nn.GroupNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(32 if channels % 32 == 0 else 24, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Takes a single 1x1 image with one channel per group too, which the parent refuses because it is meant for training."""
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class NormAct(GroupNorm):
    """Group norm and SiLU in one module, so that something that does both at once can take its place.

    On a GPU a kernel of our own does, for channels-last tensors and where no gradient is wanted. torch's group norm is most of
    decoding there: 81 ms eager for 1024 x 1024 pixels with Infinity's decoder on an H200, in which the convolutions need about 20.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x) if fusable(x) else F.silu(super().forward(x), inplace=not torch.is_grad_enabled())

    def fused(self, x: Tensor, shift: Tensor | None = None, sums: Sums | None = None) -> Tensor:
        """The kernel's norm and SiLU of x + shift [C]; a pass less where the sums of x are known."""
        return kernels.group_norm_silu(x, self.num_groups, self.weight, self.bias, self.eps, shift, sums)


def fusable(x: Tensor) -> bool:
    """Whether our kernels can take this."""
    return kernels.available(x) and x.is_contiguous(memory_format=torch.channels_last)


def convolve(conv: nn.Conv2d, x: Tensor, padding: int | tuple[int, int]) -> Tensor:
    """Applies a convolution with this padding instead of its own. On a GPU a kernel adds the bias."""
    if fusable(x):
        return add_bias_(without_bias(conv, x, padding), conv)
    return F.conv2d(x, conv.weight, conv.bias, padding=padding)


def without_bias(conv: nn.Conv2d, x: Tensor, padding: int | tuple[int, int]) -> Tensor:
    """Applies a convolution and leaves out its bias, which torch adds in a pass of its own after cuDNN. The result is channels-last."""
    return F.conv2d(x, conv.weight, padding=padding).contiguous(memory_format=torch.channels_last)


def add_bias_(y: Tensor, conv: nn.Conv2d) -> Tensor:
    """Adds the bias of `conv` to y itself."""
    assert conv.bias is not None
    return kernels.add_bias_residual_(y, conv.bias)


def add_residual_(y: Tensor, conv: nn.Conv2d, residual: Tensor, residual_bias: Tensor | None) -> Sums:
    """Adds the bias of `conv`, and a residual with the bias that it still lacks, to y itself. What the next norm wants to know."""
    assert conv.bias is not None
    return kernels.add_bias_residual_sums_(y, conv.bias, residual, residual_bias)


def shifted_bias(conv: nn.Conv2d, shift: Tensor | None) -> Tensor | None:
    """The bias of a 1x1 convolution whose input still lacks `shift`."""
    if shift is None or conv.bias is None:
        return conv.bias
    return torch.addmv(conv.bias.float(), conv.weight.flatten(1).float(), shift.float())


def upsample_nearest(x: Tensor) -> Tensor:
    """Repeats every pixel as two by two."""
    return kernels.upsample_nearest(x) if fusable(x) else F.interpolate(x, scale_factor=2, mode="nearest")


def to_channels_last(x: Tensor) -> Tensor:
    """The same values with channels last on a GPU. Everything after it keeps the layout."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


# --- upsampling and the 3x3 convolution after it as one step: four products a pixel instead of nine

TAPS = ((0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 0))  # which rows of a 3x3 kernel each row of the merged one is the sum of


def merged_upsampling(weight: Tensor) -> Tensor:
    """[O, I, 3, 3] to [I, O, 4, 4] of a transposed convolution with stride 2 that does both."""
    taps = torch.tensor(TAPS, dtype=torch.float32, device=weight.device)
    merged = torch.einsum("ap,bq,oipq->ioab", taps, taps, weight.float())
    return merged.to(weight.dtype).contiguous(memory_format=torch.channels_last)


def convolve_upsampled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, I, H, W] to [B, O, 2 H, 2 W]: one 2x2 convolution to four times the channels, which are then laid side by side.

    On a CPU: 256 x 256 pixels of 128 channels take 0.67 s of one core so, 0.88 as a transposed convolution and 1.04 apart.
    """
    phases = [part for rows in even_odd(weight, 2) for part in even_odd(rows, 3)]
    found = F.conv2d(F.pad(x, (1, 1, 1, 1)), torch.cat(phases), None if bias is None else bias.repeat(4))
    batch, _, height, width = x.shape
    out = x.new_empty(batch, weight.shape[0], 2 * height, 2 * width)
    for part, (row, column) in zip(found.chunk(4, dim=1), product((0, 1), repeat=2), strict=True):
        out[:, :, row::2, column::2] = part[:, :, row : row + height, column : column + width]
    return out


def even_odd(weight: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of three weights along a dimension the two that even places of the result have, and those of odd ones."""
    first, middle, last = weight.unbind(dim)
    return torch.stack((first, middle + last), dim), torch.stack((first + middle, last), dim)
