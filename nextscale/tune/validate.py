"""The proof: the winners and plain skipping on prompts that the search has not seen, in turns with dense generation, as a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import NextscaleError
from ..eval.judges import Judges
from ..eval.methods import DENSE
from ..eval.quality import evaluate
from ..eval.results import Row, version
from ..methods.registry import resolve_method
from ..offline.prompts import EvalPrompt
from ..pipeline import Pipeline
from ..profiles import Interval, Point, Profile, fingerprint
from ..stage import Schedule
from .frontier import frontier
from .trials import Distance

EQUAL = 99.0  # dB, where all images are those of dense generation
SKIPPED = 3  # numbers of last stages that plain skipping leaves out


def prove(
    pipeline: Pipeline,
    winners: Sequence[str],
    prompts: Sequence[EvalPrompt],
    lpips: Distance,
    *,
    schedule: Schedule,
    batch: int,
    seed: int,
    searched: int,
    source: str,
    on_progress: Callable[[str, float], None] | None = None,
) -> Profile:
    """What the winners save and cost. Those that lose their place at the frontier to another, or to plain skipping, are left out."""
    skipping = [f"skip:last={last}" for last in range(1, min(SKIPPED, len(schedule) - 1) + 1)]
    methods = {text: resolve_method(text) for text in dict.fromkeys((DENSE, *skipping, *winners))}
    found = evaluate(pipeline, methods, prompts, Judges(lpips), size=schedule, seed=seed, batch=batch, on_progress=on_progress)
    rows = {row["method"]: row for row in found.rows}
    points = {text: point_of(text, row) for text, row in rows.items() if text != DENSE and "error" not in row}
    faster = [point for point in points.values() if point.speedup.value > 1]
    best = frontier(faster, lambda point: (point.speedup.value, point.lpips.value))
    if not best:
        raise NextscaleError(
            f"nothing that was searched is faster than dense generation here: {failures(rows) or 'all of it is as slow'}."
            " Give more --minutes, a larger --batch or --size, or other --prompts"
        )
    dense = rows[DENSE]
    return Profile(
        model=pipeline.name,
        family=pipeline.model.family,
        fingerprint=fingerprint(pipeline.model),
        size=tuple(dense["size"]),
        grids=tuple(stage.size for stage in schedule),
        batch=dense["batch"],
        dtype=dense["dtype"],
        engine="graphs" if dense["engine"] == "graphs" else "eager",  # both where graphs had to leave for lack of memory in between
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


def point_of(text: str, row: Row) -> Point:
    speedup, lpips = row["speedup"], row["lpips"]
    return Point(
        text,
        Interval(speedup["median"], speedup["p20"], speedup["p80"]),
        Interval(lpips["value"], lpips["low"], lpips["high"]),
        EQUAL if row["psnr"] is None else row["psnr"]["value"],
        row["ms_per_image"]["median"],
        row["cost_share"],
    )


def failures(rows: Mapping[str, dict[str, Any]]) -> str:
    return "; ".join(f"{text}: {row['error']}" for text, row in rows.items() if "error" in row)
