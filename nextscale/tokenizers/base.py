"""What every tokenizer offers: images to codes per stage, a canvas for codes, and the latent back to an image."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from ..canvas import Canvas
from ..checkpoints import Layout
from ..errors import SizeError
from ..stage import Schedule, Stage, Tokens, resize_area


class Tokenizer(nn.Module):
    layout: Layout
    float32: ClassVar[tuple[str, ...]] = ()  # parameters that keep full precision whatever the dtype
    accumulates: ClassVar[bool] = True  # a stage codes what earlier stages left over
    mixes_codes: ClassVar[bool] = False  # the canvas takes mixtures of codes as well
    codes: int = 0  # numbered codes; 0 where codes are bits
    pixels_per_token: int

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def canvas(self, schedule: Schedule, batch: int) -> Canvas:
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] to continuous latents [B, Z, h, w], float32."""
        raise NotImplementedError

    def nearest(self, grid: Tensor, stage: Stage) -> Tensor:
        """The codes that come closest to a stage's map [B, Z, h, w]."""
        raise NotImplementedError

    def decode(self, latent: Tensor) -> Tensor:
        """Latent [B, Z, h, w] to images [B, 3, H, W], float32, nominally in [-1, 1], not clamped."""
        raise NotImplementedError

    def map_size(self, stage: Stage) -> tuple[int, int]:
        """Size of a stage's map in the latent."""
        return stage.size

    @torch.inference_mode()
    def encode(self, images: Tensor, schedule: Schedule) -> list[Tensor]:
        """Codes of every stage, as the canvas takes them."""
        expected = tuple(side * self.pixels_per_token for side in schedule.grid)
        if images.ndim != 4 or images.shape[1] != 3 or tuple(images.shape[2:]) != expected:
            raise SizeError(f"this schedule encodes images [B, 3, {expected[0]}, {expected[1]}]; got {list(images.shape)}")
        features = self.features(images)
        canvas = self.canvas(schedule, images.shape[0])
        codes = []
        for stage in schedule:
            rest = features - canvas.latent if self.accumulates else features
            codes.append(self.nearest(resize_area(rest, self.map_size(stage)), stage))
            canvas.add(codes[-1], Tokens(stage))
        return codes
