"""Infinity's tokenizer: binary spherical codes with one sign per latent channel, and no codebook."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..canvas import BitCanvas, to_rows
from ..checkpoints import Layout
from ..stage import Schedule, Stage
from .autoencoder import AutoencoderConfig, Decoder, Encoder
from .base import Tokenizer
from .weight_names import by_resolution


@dataclass(frozen=True)
class InfinityTokenizerConfig:
    bits: int = 32  # per latent cell
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4, 4)
    blocks_per_level: int = 2
    patchify: bool = False  # one token represents 2 x 2 latent cells

    @property
    def autoencoder(self) -> AutoencoderConfig:
        return AutoencoderConfig(self.channels, self.multipliers, self.bits, self.blocks_per_level, attention=False)

    @property
    def bits_per_token(self) -> int:
        return 4 * self.bits if self.patchify else self.bits


class InfinityTokenizer(Tokenizer):
    def __init__(self, config: InfinityTokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.bits = config.bits
        self.cells = 2 if config.patchify else 1  # latent cells along one side of a token
        self.pixels_per_token = self.cells * config.autoencoder.stride
        self.encoder = Encoder(config.autoencoder)
        self.decoder = Decoder(config.autoencoder)
        bare = r"(conv_in|conv_out|conv1|conv2|nin_shortcut|sample\.conv)\.(weight|bias)$"
        self.layout = Layout(
            rules=by_resolution(len(config.multipliers), attention=False, wrapped=True),
            wrappers=(("vae",), ("ema",)),
            ignored=(r"quantizer?\.lfq\.mask",),
            aliases=((bare, r"\1.conv.\2"), (r"(norm1|norm2|norm_out)\.(weight|bias)$", r"\1.norm.\2")),
        )

    def canvas(self, schedule: Schedule, batch: int) -> BitCanvas:
        return BitCanvas(self, schedule, batch)

    def map_size(self, stage: Stage) -> tuple[int, int]:
        return self.cells * stage.height, self.cells * stage.width

    def signs(self, bits: Tensor) -> Tensor:
        """Converts bits 0 and 1 to a unit vector per latent cell."""
        return (2.0 * bits - 1.0) / math.sqrt(self.bits)

    def spread_cells(self, tokens: Tensor) -> Tensor:
        """Rearranges [B, bits per token, h, w] as [B, bits, cells * h, cells * w]: token bit 4c + 2dy + dx is bit c of cell (dy, dx)."""
        return tokens if self.cells == 1 else F.pixel_shuffle(tokens, self.cells)  # pixel_shuffle would copy

    def gather_cells(self, latent: Tensor) -> Tensor:
        """Inverts `spread_cells`."""
        return latent if self.cells == 1 else F.pixel_unshuffle(latent, self.cells)

    def features(self, images: Tensor) -> Tensor:
        return self.encoder(images.to(self.encoder.conv_in.weight.dtype)).float()

    def nearest(self, grid: Tensor, stage: Stage) -> Tensor:
        return (to_rows(self.gather_cells(grid)) > 0).long()

    def decode(self, latent: Tensor) -> Tensor:
        return self.decoder(latent.to(self.decoder.conv_in.weight.dtype)).float()
