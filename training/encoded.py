"""Pictures and captions as the transformer reads them, encoded once before training. Several captions of a picture teach the subject."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from nextscale.text.words import WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer

from .data import Pictures
from .records import Record
from .tokenizer_settings import square_schedule

ENCODED_TOGETHER = 64  # pictures
PLACE = "{}"  # of the subject in a template


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


def caption_variants(records: Sequence[Record], count: int, seed: int = 0) -> list[list[str]]:
    """`count` captions of every record, its own first. Others name a colour where one is known, take the wording of another picture of
    the same style, or use another name of the subject."""
    templates = style_templates(records)
    chance = random.Random(seed)
    return [[record.caption, *(_variant(record, templates, chance) for _ in range(count - 1))] for record in records]


def style_templates(records: Sequence[Record]) -> dict[str, list[str]]:
    """Templates of the captions of each style, with a place for the subject, the most common first."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for record in records:
        if record.subject and record.subject in record.caption:
            counts[record.style][record.caption.replace(record.subject, PLACE, 1)] += 1
    return {style: sorted(of_style, key=lambda text: -of_style[text]) for style, of_style in counts.items()}


def _variant(record: Record, templates: dict[str, list[str]], chance: random.Random) -> str:
    roll = chance.random()
    if record.caption_color and roll < 0.6:
        return record.caption_color
    wordings = templates.get(record.style)
    if not wordings or not record.subject or roll < 0.3:
        return record.caption
    return chance.choice(wordings).replace(PLACE, _subject(record, chance))


def _subject(record: Record, chance: random.Random) -> str:
    roll = chance.random()
    if record.alt and roll < 0.15:
        return with_article(record.alt)
    if roll > 0.9:
        return re.sub(r"^(an?|the) ", "", record.subject)
    return record.subject


def with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
