"""The convolutional encoder and decoder that all tokenizers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


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
    def widths(self) -> tuple[int, ...]:
        return tuple(self.channels * factor for factor in self.multipliers)


class GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Also of a single 1x1 image with one channel per group, which the parent refuses because it is meant for training."""
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def group_norm(channels: int) -> GroupNorm:
    return GroupNorm(32 if channels % 32 == 0 else 24, channels, eps=EPS)


class ResidualBlock(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = group_norm(outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class PixelAttention(nn.Module):
    """One head over all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
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
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention where there is any, then the step to the next resolution."""

    def __init__(self, inner: int, outer: int, blocks: int, attention: bool, resize: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(inner if i == 0 else outer, outer) for i in range(blocks))
        self.attention = nn.ModuleList(PixelAttention(outer) if attention else nn.Identity() for _ in range(blocks))
        self.resize = resize or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block, attention in zip(self.blocks, self.attention, strict=True):
            x = attention(block(x))
        return self.resize(x)


def middle(channels: int, attention: bool) -> nn.Sequential:
    inner = [PixelAttention(channels)] if attention else []
    return nn.Sequential(ResidualBlock(channels, channels), *inner, ResidualBlock(channels, channels))


class Encoder(nn.Module):
    """Image [B, 3, H, W] in [-1, 1] to features [B, latent channels, H / stride, W / stride]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths, coarsest = config.widths, len(config.widths) - 1
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.levels = nn.ModuleList(
            Level(
                widths[i - 1] if i else config.channels,
                widths[i],
                config.blocks_per_level,
                config.attention and i == coarsest,
                Downsample(widths[i]) if i < coarsest else None,
            )
            for i in range(coarsest + 1)
        )
        self.middle = middle(widths[-1], config.attention)
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], config.latent_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.levels:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.middle(x))))


class Decoder(nn.Module):
    """Latent [B, latent channels, h, w] to image [B, 3, h * stride, w * stride]; levels in the order in which they run."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths, coarsest = config.widths[::-1], len(config.widths) - 1
        self.conv_in = nn.Conv2d(config.latent_channels, widths[0], 3, padding=1)
        self.middle = middle(widths[0], config.attention)
        self.levels = nn.ModuleList(
            Level(
                widths[max(i - 1, 0)],
                widths[i],
                config.blocks_per_level + 1,
                config.attention and i == 0,
                Upsample(widths[i]) if i < coarsest else None,
            )
            for i in range(coarsest + 1)
        )
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.middle(self.conv_in(z))
        for level in self.levels:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))
