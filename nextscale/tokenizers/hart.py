"""HART's tokenizer: VAR's, except that the last stage's codes are completed by a continuous residual."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..canvas import HybridCanvas, ResidualCanvas, to_rows
from ..stage import Schedule, Tokens
from .var import VarTokenizer, VarTokenizerConfig


@dataclass(frozen=True)
class HartTokenizerConfig(VarTokenizerConfig):
    """The same fields as VAR's; the type decides which tokenizer to build."""


class HartTokenizer(VarTokenizer):
    def __init__(self, config: HartTokenizerConfig) -> None:
        super().__init__(config)
        self.layout = replace(self.layout, prefix="vae.", ignored=(r"vae\.quantize\.ema_vocab_hit_SV", r"disc\..*"))

    def canvas(self, schedule: Schedule, batch: int) -> HybridCanvas:
        return HybridCanvas(self, schedule, batch)

    def discrete_canvas(self, schedule: Schedule, batch: int) -> ResidualCanvas:
        """A canvas for codes alone: the last stage passes its convolution like the others. The codes of an image are the same."""
        return ResidualCanvas(self, schedule, batch)

    @torch.inference_mode()
    def encode_hybrid(self, images: Tensor, schedule: Schedule) -> tuple[list[Tensor], Tensor]:
        """Codes of every stage, and the residual [B, cells, Z] that completes the last one to the continuous features."""
        codes = self.encode(images, schedule)
        canvas = self.canvas(schedule, images.shape[0])
        for stage, numbers in zip(schedule, codes, strict=True):
            canvas.add(numbers, Tokens(stage))
        return codes, to_rows(self.features(images) - canvas.latent)
