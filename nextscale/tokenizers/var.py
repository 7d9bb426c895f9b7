"""Tokenizers of VAR and HART: residual quantizers with one codebook and small convolutions applied to the upsampled codes."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..canvas import HybridCanvas, ResidualCanvas, to_rows
from ..checkpoints import Layout, Rule
from ..stage import Schedule, Stage
from .autoencoder import AutoencoderConfig, Decoder, Encoder
from .base import Tokenizer
from .weight_names import by_resolution


@dataclass(frozen=True)
class VarTokenizerConfig:
    codes: int = 4096
    latent_channels: int = 32
    channels: int = 160
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks_per_level: int = 2
    blends: int = 4  # convolutions, each shared by several stages
    blend_share: float = 0.5

    @property
    def autoencoder(self) -> AutoencoderConfig:
        return AutoencoderConfig(self.channels, self.multipliers, self.latent_channels, self.blocks_per_level)


def blend_index(stage: int, stages: int, blends: int) -> int:
    """Returns the index of the convolution that a stage uses: the tick nearest to its relative position in the schedule.

    Some positions are exactly halfway between two ticks. The published models were trained with the rounding of this double-precision
    arithmetic, so it must not be changed.
    """
    margin = 1 / 3 / blends if blends == 4 else 1 / 2 / blends
    ticks = np.linspace(margin, 1 - margin, blends)
    return int(np.argmin(np.abs(ticks - stage / max(stages - 1, 1))))


class CodebookTokenizer(Tokenizer):
    """A tokenizer with a codebook."""

    unit_codes: ClassVar[bool] = False  # codes are compared after normalization

    def __init__(self, config: Any, latent_channels: int, code_channels: int, kernel: int, blends: int = 0) -> None:
        super().__init__()
        self.config = config
        self.codes = config.codes
        self.pixels_per_token = config.autoencoder.stride
        z = code_channels
        self.encoder = Encoder(config.autoencoder)
        self.quant_conv = nn.Conv2d(latent_channels, z, kernel, padding=kernel // 2)
        self.codebook = nn.Parameter(torch.empty(config.codes, z))
        self.blends = nn.ModuleList(nn.Conv2d(z, z, 3, padding=1) for _ in range(blends))
        self.post_quant_conv = nn.Conv2d(z, latent_channels, kernel, padding=kernel // 2)
        self.decoder = Decoder(config.autoencoder)

    def features(self, images: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(images.to(self.quant_conv.weight.dtype))).float()

    def nearest(self, grid: Tensor, stage: Stage) -> Tensor:
        z, codebook = (F.normalize(x, dim=-1) if self.unit_codes else x for x in (to_rows(grid), self.codebook))
        distance = z.square().sum(-1, keepdim=True) + codebook.square().sum(-1) - 2 * z @ codebook.T
        return distance.argmin(dim=-1)

    def decode(self, latent: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latent.to(self.post_quant_conv.weight.dtype))).float()


class VarTokenizer(CodebookTokenizer):
    float32 = ("codebook", "blends")
    mixes_codes = True

    def __init__(self, config: VarTokenizerConfig) -> None:
        super().__init__(config, config.latent_channels, config.latent_channels, 3, config.blends)
        self.layout = Layout(
            rules=(
                *by_resolution(len(config.multipliers), attention=True),
                Rule(r"codebook", ("quantize.embedding.weight",)),
                Rule(r"blends\.(\d+)\.(.*)", (r"quantize.quant_resi.qresi_ls.\1.\2",)),
            ),
            ignored=(r"quantize\.ema_vocab_hit_SV",),
        )

    def canvas(self, schedule: Schedule, batch: int) -> ResidualCanvas:
        return ResidualCanvas(self, schedule, batch)

    def blend(self, grid: Tensor, stage: int, stages: int) -> Tensor:
        share = self.config.blend_share
        return (1 - share) * grid + share * self.blends[blend_index(stage, stages, self.config.blends)](grid)


@dataclass(frozen=True)
class HartTokenizerConfig(VarTokenizerConfig):
    """VAR's fields; the type selects HART's tokenizer."""


class HartTokenizer(VarTokenizer):
    """VAR's tokenizer with a continuous residual added to the codes of the last stage."""

    def __init__(self, config: HartTokenizerConfig) -> None:
        super().__init__(config)
        self.layout = replace(self.layout, prefix="vae.", ignored=(r"vae\.quantize\.ema_vocab_hit_SV", r"disc\..*"))

    def canvas(self, schedule: Schedule, batch: int) -> HybridCanvas:
        return HybridCanvas(self, schedule, batch)
