"""Default prompts of a search: things, places and manners, combined; classes for models that take classes."""

from __future__ import annotations

from typing import Any

from ..pipeline import Pipeline
from ..text.prompts import TextReader

THINGS = (
    "a red apple", "two cats", "an old bicycle", "a lighthouse", "a bowl of soup", "a wooden chair", "a sailing boat", "a bunch of flowers",
    "a steam engine", "a small owl", "a pair of shoes", "a market stall", "a mountain lake", "a white horse", "a stack of books", "a robot",
)  # fmt: skip
PLACES = (
    "on a plain background", "in the snow", "by a window", "under a cloudy sky", "in a busy street", "on a beach at sunset", "at night",
    "in tall grass",
)  # fmt: skip
MANNERS = ("a photograph of {}", "an oil painting of {}", "a pencil sketch of {}", "a flat icon of {}")


def own_prompts(pipeline: Pipeline, count: int) -> list[Any]:
    """Returns the same prompts every time; the first 256 are all different, and so are the first 1000 classes."""
    if not isinstance(pipeline.reader, TextReader):
        return [(7 * number) % 1000 % pipeline.reader.classes for number in range(count)]  # type: ignore[attr-defined]
    made = []
    for number in range(count):
        turn, thing = divmod(number // 2, len(THINGS))
        place = PLACES[(thing // 2 + turn) % len(PLACES)]
        manner = MANNERS[(thing + turn + 2 * (number % 2)) % len(MANNERS)]
        made.append(manner.format(f"{THINGS[5 * thing % len(THINGS)]} {place}"))
    return made
