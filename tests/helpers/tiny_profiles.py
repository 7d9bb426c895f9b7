"""Profiles of tiny models, whose numbers nobody has measured."""

from __future__ import annotations

from typing import Any

from nextscale import Pipeline, Profile, Schedule
from nextscale.profiles import Interval, Point, fingerprint

NEAR, FAST = "dropguidance:first_stage=2", "sparsevar:keep={2: 0.5},metric=logits + dropguidance:first_stage=2"
SKIP = "skip:last=1"
DENSE_MS = 100.0


def around(value: float) -> Interval:
    return Interval(value, 0.9 * value, 1.1 * value)


def point(method: str, speedup: float, lpips: float) -> Point:
    return Point(method, around(speedup), around(lpips), psnr=20.0, ms=DENSE_MS / speedup, macs=1 / speedup)


POINTS = (point(NEAR, 1.5, 0.03), point(FAST, 2.5, 0.09))


def profile_of(pipe: Pipeline, **changes: Any) -> Profile:
    """Returns a profile for requests of the default size on the CPU."""
    schedule: Schedule = changes.pop("schedule", None) or pipe.settings.schedules.choose(None, None)
    facts: dict[str, Any] = {
        "model": pipe.name,
        "family": pipe.model.family,
        "fingerprint": fingerprint(pipe.model),
        "size": tuple(side * pipe.tokenizer.pixels_per_token for side in schedule.grid),
        "grids": schedule.sizes,
        "batch": 2,
        "dtype": "float32",
        "engine": "eager",
        "device": "cpu",
        "hardware": "CPU of another kind",
        "torch": "2.0",
        "version": "0.1.0",
        "prompts": "invented",
        "searched": 4,
        "tested": 8,
        "seed": 0,
        "dense_ms": DENSE_MS,
        "points": POINTS,
        "skipping": (point(SKIP, 1.4, 0.2),),
    }
    return Profile(**facts | changes)
