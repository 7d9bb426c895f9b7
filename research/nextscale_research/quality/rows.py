"""Rows of `nextscale compare` and `quality` in files of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nextscale.eval.compare import BENCHMARK
from nextscale.eval.results import Row

CONDITIONS = ("model", "size", "images", "seed", "batch", "dtype", "hardware")  # equal in rows that can be compared
FORMAT = "quantize"  # of the weights; rows that were written before there was a choice have none
PROBED = {"style": "style", "label": "label", "label_top5": "label among five"}


def judged(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of `nextscale compare`."""
    return [row for row in rows if row.get("benchmark") == BENCHMARK and all(name in row for name in (*CONDITIONS, "method"))]


def comparable(rows: Sequence[Row], one: Row) -> list[Row]:
    """Returns the last row of every method among those judged under the same conditions as `one`."""
    same = [row for row in rows if all(row.get(name) == one.get(name) for name in (*CONDITIONS, FORMAT))]
    return list({row["method"]: row for row in same}.values())


def real_agreement(row: Row) -> str:
    """Returns the accuracy of the probes on real images in words; empty if it was not measured."""
    return ", ".join(f"{title} {row[name]['real']:.0%}" for name, title in PROBED.items() if name in row and row[name]["real"] is not None)
