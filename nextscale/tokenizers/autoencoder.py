"""The convolutional encoder and decoder of all tokenizers."""

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
    multipliers: tuple[int, ...]  # channel factor per level, finest first
    latent_channels: int
    blocks_per_level: int = 2  # in the encoder; the decoder has one more
    attention: bool = True  # at the coarsest level only

    @property
    def stride(self) -> int:
        return 2 ** (len(self.multipliers) - 1)

    @property
    def level_channels(self) -> tuple[int, ...]:
        """Channels of each level, finest first."""
        return tuple(self.channels * factor for factor in self.multipliers)


def module_to_channels_last(module: M) -> M:
    """Converts convolution weights on a GPU to channels-last, the layout of its tensor cores. Otherwise cuDNN would convert them for every
    image. Results agree up to rounding. Does nothing on other devices."""
    for parameter in module.parameters():
        if parameter.is_cuda and parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    for part in module.modules():
        if isinstance(part, Upsample) and part.conv.weight.is_cuda and kernels.enabled(part.conv.weight.device):
            part.merged_weight()  # computed before any CUDA graph capture, because a graph frees the memory it allocates
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
        return self.shortcut(x) + y  # this order uses less memory: the shortcut's output is created last

    def fused(self, x: Tensor, shift: Tensor | None = None, sums: Sums | None = None) -> tuple[Tensor, Sums]:
        """Applies the block to x + shift [C] with kernels, and returns the sums of the result for the next norm.

        Biases cost no extra pass: each norm adds the bias of the preceding convolution, and the residual sum adds the others.
        """
        y = without_bias(self.conv2, self.norm2.fused(without_bias(self.conv1, self.norm1.fused(x, shift, sums), 1), self.conv1.bias), 1)
        if isinstance(self.shortcut, nn.Conv2d):
            return y, add_residual_(y, self.conv2, without_bias(self.shortcut, x, 0), shifted_bias(self.shortcut, shift))
        return y, add_residual_(y, self.conv2, x, shift)


class PixelAttention(nn.Module):
    """Single-head attention over all pixels."""

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
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # pads one column on the right and one row at the bottom


class Upsample(nn.Module):
    """Nearest-neighbor upsampling by two and a convolution. With kernels both are one transposed convolution, in about half the time: 862
    us instead of 1538 + 94 us at Infinity's third level for 1024 x 1024 pixels on an H200."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self._known: object = None  # identifies the weights in `_merged`
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
        """Returns `merged_upsampling` of the current weights. Cached, because CUDA graphs read it at a fixed address."""
        weight = self.conv.weight
        known = weight.data_ptr(), weight.dtype, None if weight.is_inference() else weight._version
        if known != self._known:
            self._merged, self._known = merged_upsampling(weight.data), known
        return self._merged


class Level(nn.Module):
    """Residual blocks of one resolution, with optional attention after each, and a change of resolution."""

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
        """Applies the blocks to x, or with kernels to x + shift [C]. Returns the sums for the next norm if a kernel computed them."""
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
    """Encodes images [B, 3, H, W] in [-1, 1] as features [B, latent channels, H / stride, W / stride]."""

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
    """Decodes latents [B, latent channels, h, w] to images [B, 3, h * stride, w * stride]."""

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
        """Decodes in batches or strips that limit memory (see `tiles`), or at once if gradients are enabled."""
        if torch.is_grad_enabled():
            return self.at_once(z)
        from .tiles import decode  # circular: it imports this class

        return decode(self, z)

    def at_once(self, z: Tensor) -> Tensor:
        x, shift, sums = self.middle(self.conv_in(to_channels_last(z))), None, None
        for level in self.stack:
            x, sums = level.features_and_sums(x, shift)
            shift = None
            if isinstance(level.resize, Upsample) and fusable(x):
                x, shift = level.resize.without_bias(x), level.resize.conv.bias  # the next level adds it
            else:
                x = level.resize(x)  # a separate call, so that it does not keep the level's input in memory
        return self.image(x, sums)

    def image(self, x: Tensor, sums: Sums | None = None) -> Tensor:
        """Applies the last norm and convolution to features of the last level. A kernel fuses both and returns float32."""
        if not fusable(x) or x.shape[1] > MAX_NORM_CONV:
            return self.conv_out(self.norm_out(x))
        norm, conv = self.norm_out, self.conv_out
        assert conv.bias is not None
        return kernels.group_norm_silu_conv(x, norm.num_groups, norm.weight, norm.bias, norm.eps, conv.weight, conv.bias, sums)

    @property
    def stack(self) -> tuple[Level, ...]:
        """Levels in execution order, coarsest first."""
        return tuple(self.levels)  # type: ignore[arg-type]
