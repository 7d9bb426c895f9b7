"""FlexVAR's tokenizer: every stage is quantised on its own with unit-length codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..canvas import ReplacedCanvas, to_rows
from ..checkpoints import Layout, Rule
from ..stage import Schedule, Stage
from .autoencoder import AutoencoderConfig, Decoder, Encoder
from .base import Tokenizer
from .weight_names import by_execution


@dataclass(frozen=True)
class FlexVarTokenizerConfig:
    codes: int = 8912  # sic
    code_channels: int = 32
    latent_channels: int = 256
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks_per_level: int = 2

    @property
    def autoencoder(self) -> AutoencoderConfig:
        return AutoencoderConfig(self.channels, self.multipliers, self.latent_channels, self.blocks_per_level)


class FlexVarTokenizer(Tokenizer):
    float32 = ("codebook",)
    accumulates = False

    def __init__(self, config: FlexVarTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.codes = config.codes
        self.pixels_per_token = config.autoencoder.stride
        self.encoder = Encoder(config.autoencoder)
        self.quant_conv = nn.Conv2d(config.latent_channels, config.code_channels, 1)
        self.codebook = nn.Parameter(torch.empty(config.codes, config.code_channels))
        self.post_quant_conv = nn.Conv2d(config.code_channels, config.latent_channels, 1)
        self.decoder = Decoder(config.autoencoder)
        self.layout = Layout(
            rules=(*by_execution(), Rule(r"codebook", ("quantize.embedding.weight",))),
            wrappers=(("model",),),
            ignored=(r"quantize\.codebook_used",),
        )

    def canvas(self, schedule: Schedule, batch: int) -> ReplacedCanvas:
        return ReplacedCanvas(self, schedule, batch)

    def features(self, images: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(images.to(self.quant_conv.weight.dtype))).float()

    def nearest(self, grid: Tensor, stage: Stage) -> Tensor:
        z, codebook = F.normalize(to_rows(grid), dim=-1), F.normalize(self.codebook, dim=-1)
        distance = z.square().sum(-1, keepdim=True) + codebook.square().sum(-1) - 2 * z @ codebook.T
        return distance.argmin(dim=-1)

    def decode(self, latent: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latent.to(self.post_quant_conv.weight.dtype))).float()
