"""Several captions of the same picture, so that the model learns the subject and not the sentence."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence

from .records import Record

PLACE = "{}"


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
