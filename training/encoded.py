"""Pictures and captions as the transformer reads them, encoded once before training."""

from __future__ import annotations

import torch
from torch import Tensor

from nextscale.text.words import WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer

from .captions import caption_variants
from .data import Pictures
from .tokenizer_settings import square_schedule

ENCODED_TOGETHER = 64  # pictures


class Features:
    """Encoder features of all pictures of one side, in several variants that are shifted, zoomed and mirrored at random."""

    def __init__(self, tokenizer: InfinityTokenizer, pictures: Pictures, variants: int, seed: int) -> None:
        generator = torch.Generator(pictures.pixels.device).manual_seed(seed)
        self.schedule = square_schedule(pictures.side, tokenizer.pixels_per_token)
        self.all = torch.stack([_encoded(tokenizer, pictures, generator if variant else None) for variant in range(variants)])

    def of(self, indices: Tensor, variants: Tensor) -> Tensor:
        """Features [B, bits, h, w] of some pictures."""
        return self.all[variants, indices].float()


@torch.inference_mode()
def _encoded(tokenizer: InfinityTokenizer, pictures: Pictures, generator: torch.Generator | None) -> Tensor:
    """Features [N, bits, h, w] of all pictures, in float16 for half the memory."""
    everything = torch.arange(len(pictures), device=pictures.pixels.device)
    return torch.cat([tokenizer.features(pictures.batch(part, generator)).half() for part in everything.split(ENCODED_TOGETHER)])


class Captions:
    """Token ids of several captions of every picture."""

    def __init__(self, encoder: WordTextEncoder, pictures: Pictures, variants: int, seed: int) -> None:
        texts = [text for several in caption_variants(pictures.records, variants, seed) for text in several]
        ids, mask = encoder.tokenize(texts)
        self.variants, self.longest = variants, ids.shape[1]
        self.ids = ids.view(len(pictures), variants, -1)
        self.lengths = mask.sum(1).view(len(pictures), variants)

    def of(self, indices: Tensor, variants: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [B, T] and lengths [B], on the CPU."""
        return self.ids[indices, variants], self.lengths[indices, variants]
