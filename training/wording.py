"""Captions of composed scenes, and the pairs of subject and color that no caption names in training."""

from __future__ import annotations

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Sequence

from .colors import WORDS
from .records import Record

PLACE = "{}"  # of the subject in a template
ON_WHITE = " on a white background"
ONE_IN_HELD = 10  # pairs of label and color
COLOR = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")
COLOR_BEFORE_NOUN = re.compile(rf"\b(?:{'|'.join(WORDS)})\s+(?=\w)")
BESIDE = ("{} and {}", "{} and {}", "{} next to {}", "{} on the left and {} on the right")
STACKED = ("{} and {}", "{} above {}", "{} above {}")


def is_held(label: str, color: str) -> bool:
    """True for one of ten pairs, which no picture of training shows with that word in its caption."""
    return hashlib.sha256(f"{label}|{color}".encode()).digest()[0] % ONE_IN_HELD == 0


def style_templates(records: Sequence[Record]) -> dict[str, list[str]]:
    """Returns the wordings of each style's captions with a place for the subject, the most common first."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for record in records:
        if record.subject and record.subject in record.caption:
            counts[record.style][record.caption.replace(record.subject, PLACE, 1)] += 1
    return {style: sorted(of_style, key=lambda text: -of_style[text]) for style, of_style in counts.items()}


def with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def without_article(name: str) -> str:
    return re.sub(r"^(an?|the) ", "", name)


def named(record: Record, color: str | None, chance: random.Random) -> str:
    """The subject with a color word or without: "a red apple". A color that the name had gives way to the new one."""
    roll = chance.random()
    name = with_article(record.alt) if record.alt and roll < 0.15 else record.subject or record.caption
    bare = without_article(name)
    if color is None:
        return bare if roll > 0.9 else name
    colored = f"{color} {COLOR_BEFORE_NOUN.sub('', bare)}"
    return with_article(colored) if name != bare else colored


class Wording:
    """Writes captions in the words of the pictures' own ones."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.templates = style_templates(records)
        self.neutral = {style: sorted({text.replace(ON_WHITE, "") for text in texts}) for style, texts in self.templates.items()}

    def plain(self, record: Record, chance: random.Random) -> str:
        """A caption of the picture as it is: its own, one with a known color, or one in other words."""
        roll = chance.random()
        if record.caption_color and roll < 0.6 and not any(is_held(record.label, word) for word in COLOR.findall(record.caption_color)):
            return record.caption_color
        if not record.subject or record.style not in self.templates or roll < 0.3:
            return record.caption
        return chance.choice(self.templates[record.style]).replace(PLACE, named(record, None, chance))

    def composed(self, style: str, subjects: Sequence[str], stacked: bool, backdrop: str, chance: random.Random) -> str:
        """A caption of one or two subjects of a style; backdrop: "blue" or "light blue", empty for white."""
        text = subjects[0]
        if len(subjects) == 2:
            text = chance.choice(STACKED if stacked else BESIDE).format(*subjects)
        wordings = self.neutral.get(style)
        if wordings:
            text = chance.choice(wordings).replace(PLACE, text)
        if backdrop:
            return text + chance.choice((" on {} background", " on {} background", " with {} background")).format(with_article(backdrop))
        return text + ON_WHITE if chance.random() < 0.15 else text
