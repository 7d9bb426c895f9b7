"""Times of the parts of a layer: which parts, and how many."""

from __future__ import annotations

import pytest

from benchmarks.layer import PARTS, part_times, rows_of
from tests.helpers import tiny


@pytest.mark.parametrize("family", ["infinity", "hart"])
def test_parts_of_a_layer(family: str) -> None:
    pipe = tiny.shared_pipeline(family)
    schedule = tiny.schedule_of(family)
    last = len(schedule) - 1
    assert {*part_times(pipe, "dense", None, 1, 2)} == {"attention", "feed-forward"}
    pruned = f"fastvar:ratios={{{last}: 0.75}}"
    found = part_times(pipe, pruned, None, 1, 2)
    assert [*sorted(found)] == sorted(PARTS) and all(len(times) == 2 and min(times) > 0 for times in found.values())
    rows = [*rows_of(pipe, pruned, None, 1, 1)]
    assert [(row["method"], row["part"]) for row in rows] == [
        *(("dense", part) for part in PARTS[:2]),
        *((pruned, part) for part in PARTS),
    ]
    assert [row["speedup"] is None for row in rows] == [False, False, False, False, True, True]
    again = part_times(pipe, "fastvar:ratios={}", None, 1, 1)  # and nothing is left patched
    assert {*again} == {"attention", "feed-forward"}
