"""Base class of the tokenizers."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..canvas import Canvas
from ..checkpoints import Layout
from ..errors import SizeError
from ..stage import Schedule, Stage, Tokens, resize_area


class Tokenizer(nn.Module):
    """Converts images to codes per stage, and latents to images; creates the canvas that adds up the codes of the stages."""

    layout: Layout
    float32: ClassVar[tuple[str, ...]] = ()  # prefixes of parameters that stay in float32
    accumulates: ClassVar[bool] = True  # each stage encodes the residual of earlier stages
    mixes_codes: ClassVar[bool] = False  # the canvas accepts weighted sums of codes
    codes: int = 0  # size of the codebook; 0 for binary codes
    pixels_per_token: int

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def canvas(self, schedule: Schedule, batch: int) -> Canvas:
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """Encodes images [B, 3, H, W] in [-1, 1] as continuous latents [B, Z, h, w], float32."""
        raise NotImplementedError

    def nearest(self, grid: Tensor, stage: Stage) -> Tensor:
        """Returns the nearest codes for a stage's latent [B, Z, h, w]."""
        raise NotImplementedError

    def decode(self, latent: Tensor) -> Tensor:
        """Decodes latents [B, Z, h, w] to images [B, 3, H, W], float32, nominally in [-1, 1], not clamped."""
        raise NotImplementedError

    def map_size(self, stage: Stage) -> tuple[int, int]:
        """Returns the height and width of a stage in the latent."""
        return stage.size

    @torch.inference_mode()
    def encode(self, images: Tensor, schedule: Schedule) -> list[Tensor]:
        """Returns the codes of every stage in the format of the canvas."""
        expected = tuple(side * self.pixels_per_token for side in schedule.grid)
        if images.ndim != 4 or images.shape[1] != 3 or tuple(images.shape[2:]) != expected:
            raise SizeError(f"images must be [B, 3, {expected[0]}, {expected[1]}] for this schedule; got {list(images.shape)}.")
        return self.quantize(self.features(images), schedule)

    def quantize(self, features: Tensor, schedule: Schedule) -> list[Tensor]:
        """Returns the codes of every stage for the features of images."""
        canvas = self.canvas(schedule, features.shape[0])
        codes = []
        for stage in schedule:
            rest = features - canvas.latent if self.accumulates else features
            codes.append(self.nearest(resize_area(rest, self.map_size(stage)), stage))
            canvas.add(codes[-1], Tokens(stage))
        return codes
