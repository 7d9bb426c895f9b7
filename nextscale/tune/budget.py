"""Divides the minutes of a search: trials that every search needs, further trials, and validation."""

from __future__ import annotations

import math
from typing import Protocol

from ..errors import SettingError
from ..eval.compare import ROUNDS
from .validate import SKIPPED

VALIDATION = 0.25  # of the time
LATEST = 1.4  # times the search's own time, after which it stops: with validation that is 1.3 times --minutes
MIN_VALIDATED = 4  # winners
IMAGES = 24  # of a candidate's first round, fewer if time is short
NEEDED = 65  # trials, about, that no search goes without: every knob alone, other methods alone, and the best that is predicted
NEEDED_SHARE = 0.6  # of the search's time, that they may take
COST = 0.75  # of a trial, relative to dense generation, in the mean of the needed ones


class Dense(Protocol):
    """Measured dense generation."""

    batch: int

    def dense_seconds_per_image(self) -> float: ...


def first_round(batch: int, per_image: float, seconds: float) -> int:
    """Returns the images of a candidate's first round so that the needed trials take their share of this time; one batch at least."""
    return IMAGES if batch >= IMAGES else max(batch, min(IMAGES, int(NEEDED_SHARE * seconds / (NEEDED * per_image))))


def require_time(minutes: float, dense: float) -> None:
    """Refuses a search that cannot end in time, where a dense first round takes `dense` seconds."""
    smallest = NEEDED * COST * dense / (1 - VALIDATION) / 60
    if smallest > minutes:
        raise SettingError(
            f"the smallest search takes about {math.ceil(smallest)} min here ({NEEDED} trials; dense generation takes {dense:.1f} s)."
            f" Pass --minutes {math.ceil(1.2 * smallest)}, or a smaller --size or --batch."
        )


def max_winners(bench: Dense, minutes: float) -> int:
    """Returns the number of winners that validation has time for, with dense generation and plain skipping beside them."""
    return max(MIN_VALIDATED, int(60 * minutes * VALIDATION / (ROUNDS * bench.batch * bench.dense_seconds_per_image())) - 1 - SKIPPED)


def validation_prompts(bench: Dense, minutes: float, winners: int) -> int:
    """Returns the number of prompts that validation has time for; three batches at least."""
    longest = bench.dense_seconds_per_image() * (1 + SKIPPED + winners)  # nothing should take longer than dense generation
    return max(ROUNDS * bench.batch, int(60 * minutes * VALIDATION / longest))


def filling_batches(count: int, batch: int) -> int:
    """Returns `count` or a little less, so that mixed batches have the full size: of 17 prompts two batches have 9 and 8, not 16."""
    batches = -(-count // batch)
    return count if -(-count // batches) == batch else count // batch * batch
