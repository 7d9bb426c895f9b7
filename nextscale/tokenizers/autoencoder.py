"""The convolutional encoder and decoder that all tokenizers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..kernels.shapes import MAX_NORM_CONV
from .layers import (
    GroupNorm,
    NormAct,
    add_bias_,
    add_residual_,
    convolve_upsampled,
    fusable,
    merged_upsampling,
    shifted_bias,
    to_channels_last,
    upsample_nearest,
    without_bias,
)

if TYPE_CHECKING:
    from ..kernels.group_norm import Sums

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class AutoencoderConfig:
    channels: int
    multipliers: tuple[int, ...]  # channel factor per level, finest first; the stride is 2 ** (levels - 1)
    latent_channels: int
    blocks_per_level: int = 2  # in the encoder; the decoder has one more
    attention: bool = True  # at the coarsest level

    @property
    def stride(self) -> int:
        return 2 ** (len(self.multipliers) - 1)

    @property
    def level_channels(self) -> tuple[int, ...]:
        """Channels of each level, finest first."""
        return tuple(self.channels * factor for factor in self.multipliers)


def module_to_channels_last(module: M) -> M:
    """Stores the weights of convolutions as a GPU's tensor cores want them, channels last. Once, when a module is loaded: cuDNN converts
    weights that are not, for every image anew. Elsewhere nothing changes, and results are the same to rounding everywhere."""
    for parameter in module.parameters():
        if parameter.is_cuda and parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    for part in module.modules():
        if isinstance(part, Upsample) and part.conv.weight.is_cuda and kernels.enabled(part.conv.weight.device):
            part.merged_weight()  # before anything is captured: a graph has its own memory, which it frees
    return module


class ResidualBlock(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = NormAct(inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = NormAct(outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if fusable(x):
            return self.fused(x)[0]
        y = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return self.shortcut(x) + y  # not the other way round: what the shortcut makes would wait in memory

    def fused(self, x: Tensor, shift: Tensor | None = None, sums: Sums | None = None) -> tuple[Tensor, Sums]:
        """The block of x + shift [C], such as the bias of the convolution before, and the sums of what it returns. Kernels add shift and
        biases on their way: a norm that of the convolution before it, the residual sum the others."""
        y = without_bias(self.conv2, self.norm2.fused(without_bias(self.conv1, self.norm1.fused(x, shift, sums), 1), self.conv1.bias), 1)
        if isinstance(self.shortcut, nn.Conv2d):
            return y, add_residual_(y, self.conv2, without_bias(self.shortcut, x, 0), shifted_bias(self.shortcut, shift))
        return y, add_residual_(y, self.conv2, x, shift)


class PixelAttention(nn.Module):
    """Attention of one head over all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = GroupNorm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)  # [B, 1, pixels, c]
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(y.squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:]))


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # one zero column on the right, one zero row below


class Upsample(nn.Module):
    """Every pixel as two by two, then a convolution. Where kernels run both are one transposed convolution, which takes about half the
    time: 862 microseconds for 1538 and 94 at Infinity's third level, 1024 x 1024 pixels on an H200."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self._known: object = None  # weights that were merged
        self._merged = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if fusable(x):
            return add_bias_(self.without_bias(x), self.conv)
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled():
            return convolve_upsampled(x, self.conv.weight, self.conv.bias)
        return self.conv(upsample_nearest(x))

    def without_bias(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, self.merged_weight(), stride=2, padding=1).contiguous(memory_format=torch.channels_last)

    def merged_weight(self) -> Tensor:
        """`merged_upsampling` of the weights as they are now; computed once, since a captured graph reads it where it lies."""
        weight = self.conv.weight
        known = weight.data_ptr(), weight.dtype, None if weight.is_inference() else weight._version
        if known != self._known:
            self._merged, self._known = merged_upsampling(weight.data), known
        return self._merged


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention where there is any, then the step to the next resolution."""

    def __init__(self, inner: int, outer: int, blocks: int, attention: bool, resize: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(inner if i == 0 else outer, outer) for i in range(blocks))
        self.attention = nn.ModuleList(PixelAttention(outer) if attention else nn.Identity() for _ in range(blocks))
        self.resize = resize or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.resize(self.features_and_sums(x)[0])

    @property
    def stack(self) -> tuple[ResidualBlock, ...]:
        return tuple(self.blocks)  # type: ignore[arg-type]

    def features_and_sums(self, x: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Sums | None]:
        """`shift` [C]: what x still lacks, for kernels to add. The sums are known where a kernel has just added the residual."""
        sums: Sums | None = None
        for block, attention in zip(self.stack, self.attention, strict=True):
            x, sums = block.fused(x, shift, sums) if fusable(x) else (block(x), None)
            shift = None
            if isinstance(attention, PixelAttention):
                x, sums = attention(x), None
        return x, sums


def middle(channels: int, attention: bool) -> nn.Sequential:
    inner = [PixelAttention(channels)] if attention else []
    return nn.Sequential(ResidualBlock(channels, channels), *inner, ResidualBlock(channels, channels))


class Encoder(nn.Module):
    """Image [B, 3, H, W] in [-1, 1] to features [B, latent channels, H / stride, W / stride]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        channels, coarsest = config.level_channels, len(config.level_channels) - 1
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        entering = (config.channels, *channels)
        self.levels = nn.ModuleList(
            Level(
                entering[i], outer, config.blocks_per_level, config.attention and i == coarsest, Downsample(outer) if i < coarsest else None
            )
            for i, outer in enumerate(channels)
        )
        self.middle = middle(channels[-1], config.attention)
        self.norm_out = NormAct(channels[-1])
        self.conv_out = nn.Conv2d(channels[-1], config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(to_channels_last(x))
        for level in self.levels:
            x = level(x)
        return self.conv_out(self.norm_out(self.middle(x)))


class Decoder(nn.Module):
    """Latent [B, latent channels, h, w] to image [B, 3, h * stride, w * stride]; levels in the order in which they run."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        channels, coarsest = config.level_channels[::-1], len(config.level_channels) - 1
        self.conv_in = nn.Conv2d(config.latent_channels, channels[0], 3, padding=1)
        self.middle = middle(channels[0], config.attention)
        entering, blocks = (channels[0], *channels), config.blocks_per_level + 1
        self.levels = nn.ModuleList(
            Level(entering[i], outer, blocks, config.attention and i == 0, Upsample(outer) if i < coarsest else None)
            for i, outer in enumerate(channels)
        )
        self.norm_out = NormAct(channels[-1])
        self.conv_out = nn.Conv2d(channels[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Decodes in as many steps as keep the memory within bounds (see `tiles`); at once where gradients are wanted."""
        if torch.is_grad_enabled():
            return self.at_once(z)
        from .tiles import decode  # which is written in terms of this class

        return decode(self, z)

    def at_once(self, z: Tensor) -> Tensor:
        x, shift, sums = self.middle(self.conv_in(to_channels_last(z))), None, None
        for level in self.stack:
            x, sums = level.features_and_sums(x, shift)
            shift = None
            if isinstance(level.resize, Upsample) and fusable(x):
                x, shift = level.resize.without_bias(x), level.resize.conv.bias  # the next level adds it
            else:
                x = level.resize(x)  # by itself: a call keeps its input until it ends
        return self.image(x, sums)

    def image(self, x: Tensor, sums: Sums | None = None) -> Tensor:
        """What the last norm and the last convolution make of the features of the last level. A kernel does both and returns float32."""
        if not fusable(x) or x.shape[1] > MAX_NORM_CONV:
            return self.conv_out(self.norm_out(x))
        norm, conv = self.norm_out, self.conv_out
        assert conv.bias is not None
        return kernels.group_norm_silu_conv(x, norm.num_groups, norm.weight, norm.bias, norm.eps, conv.weight, conv.bias, sums)

    @property
    def stack(self) -> tuple[Level, ...]:
        """The levels in the order in which they run."""
        return tuple(self.levels)  # type: ignore[arg-type]
