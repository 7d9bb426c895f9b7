"""Validation: the winners and plain skipping on held-out prompts, alternating with dense generation, as a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import NextscaleError
from ..eval.compare import Distance, OnProgress, compare
from ..eval.results import Row, version
from ..methods.registry import resolve_method
from ..pipeline import Pipeline
from ..profiles import Interval, Point, Profile, fingerprint
from ..stage import Schedule
from .frontier import frontier

EQUAL = 99.0  # dB, if all images equal the dense ones
SKIPPED = 3  # numbers of last stages that plain skipping leaves out


def validate(
    pipeline: Pipeline,
    winners: Sequence[str],
    prompts: Sequence[Any],
    lpips: Distance,
    *,
    schedule: Schedule,
    batch: int,
    seed: int,
    searched: int,
    source: str,
    on_progress: OnProgress,
) -> Profile:
    """Returns a profile of the winners. Those that lose their place at the frontier to another, or to plain skipping, are left out."""
    skipping = [f"skip:last={last}" for last in range(1, min(SKIPPED, len(schedule) - 1) + 1)]
    methods = {text: resolve_method(text) for text in dict.fromkeys((*skipping, *winners))}
    found = compare(pipeline, methods, prompts, lpips, schedule=schedule, seed=seed, batch=batch, on_progress=on_progress)
    dense, *rows = found.rows
    points = {row["method"]: point_of(row) for row in rows if "error" not in row}
    best = frontier({point: (point.speedup.value, point.lpips.value) for point in points.values() if point.speedup.value > 1})
    if not best:
        failures = "; ".join(f"{row['method']}: {row['error']}" for row in rows if "error" in row)
        raise NextscaleError(
            f"no candidate is faster than dense generation here ({failures or 'all run, none is faster'}). Pass more --minutes, a larger"
            " --batch or --size, or other --prompts."
        )
    return Profile(
        model=pipeline.name,
        family=pipeline.model.family,
        fingerprint=fingerprint(pipeline.model),
        size=tuple(dense["size"]),
        grids=tuple(stage.size for stage in schedule),
        batch=dense["batch"],
        dtype=dense["dtype"],
        engine="graphs" if dense["engine"] == "graphs" else "eager",  # both ran if graphs had to leave for lack of memory
        device=pipeline.model.device.type,
        hardware=dense["hardware"],
        torch=dense["torch"],
        version=version(),
        prompts=source,
        searched=searched,
        tested=len(prompts),
        seed=seed,
        dense_ms=dense["ms_per_image"]["median"],
        points=tuple(best),
        skipping=tuple(points[text] for text in skipping if text in points),
    )


def point_of(row: Row) -> Point:
    speedup, lpips = row["speedup"], row["lpips"]
    return Point(
        row["method"],
        Interval(speedup["median"], speedup["p20"], speedup["p80"]),
        Interval(lpips["value"], lpips["low"], lpips["high"]),
        EQUAL if row["psnr"] is None else row["psnr"]["value"],
        row["ms_per_image"]["median"],
        row["cost_share"],
    )
