"""Divides the minutes of a search: trials that every search needs, further trials, and validation."""

from __future__ import annotations

import math

from ..errors import SettingError
from ..eval.compare import ROUNDS
from .validate import SKIPPED

VALIDATION = 0.25  # of the time
LATEST = 1.4  # times the search's own time, after which it stops: with validation that is 1.3 times --minutes
MIN_VALIDATED = 4  # winners
IMAGES = 24  # of a candidate's first round, fewer if time is short
NEEDED = 55  # trials, about, that no search goes without: every knob alone, other methods alone, and the best that is predicted
NEEDED_SHARE = 0.6  # of the search's time, that they may take
COST = 0.75  # of a trial, relative to dense generation, in the mean of the needed ones


def first_round(batch: int, per_image: float, minutes: float, prompts: int) -> int:
    """Returns the images of a candidate's first round, whole batches of them, so that the needed trials take their share of the time.

    Refuses a search that cannot end in time, where dense generation takes `per_image` seconds.
    """
    seconds = 60 * minutes * (1 - VALIDATION)
    wanted = max(batch, min(IMAGES, int(NEEDED_SHARE * seconds / (NEEDED * per_image))))
    images = batch * min(-(-wanted // batch), prompts // batch)
    smallest = needed_minutes(images, per_image)
    if smallest > minutes:
        raise SettingError(
            f"the smallest search takes about {math.ceil(smallest)} min here ({NEEDED} trials; {images} dense images take"
            f" {images * per_image:.1f} s). Pass --minutes {math.ceil(1.2 * smallest)}, or a smaller --size or --batch."
        )
    return images


def needed_minutes(images: int, per_image: float) -> float:
    """Returns the minutes of a search that only runs the needed trials, each with this number of images."""
    return NEEDED * COST * images * per_image / (1 - VALIDATION) / 60


def max_winners(batch: int, per_image: float, minutes: float) -> int:
    """Returns the number of winners that validation has time for, with dense generation and plain skipping beside them."""
    return max(MIN_VALIDATED, int(60 * minutes * VALIDATION / (ROUNDS * batch * per_image)) - 1 - SKIPPED)


def validation_prompts(batch: int, per_image: float, minutes: float, winners: int) -> int:
    """Returns the number of prompts that validation has time for if no method is slower than dense generation; three batches at least."""
    return max(ROUNDS * batch, int(60 * minutes * VALIDATION / (per_image * (1 + SKIPPED + winners))))


def filling_batches(count: int, batch: int) -> int:
    """Returns `count` or a little less, so that mixed batches have the full size: of 17 prompts two batches have 9 and 8, not 16."""
    batches = -(-count // batch)
    return count if -(-count // batches) == batch else count // batch * batch
