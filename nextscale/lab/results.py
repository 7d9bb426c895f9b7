"""Rows of results: files of them, failures among them, and which of them can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import NextscaleError
from ..io import append_text, write_text

BENCHMARK = "quality"
CONDITIONS = ("model", "size", "images", "seed", "batch", "dtype", "hardware")  # what rows have in common if they can be compared
FORMAT = "quantize"  # of the weights; rows that were written before there was a choice have none
PROBED = {"style": "style", "label": "label", "label_top5": "label among five"}

Row = dict[str, Any]
"""A line of a results file."""


def read_rows(file: Path) -> list[Row]:
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise NextscaleError(f"{file} cannot be read as results, one JSON object per line ({error}): give another file") from error
    if other := [row for row in rows if not isinstance(row, dict)]:
        raise NextscaleError(f"{file} holds {str(other[0])[:80]!r} among its results; expected one JSON object per line")
    return rows


def write_rows(rows: Iterable[Row], file: Path) -> None:
    write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), file)


def append_rows(rows: Iterable[Row], file: Path) -> None:
    """Adds rows to a file, which is made where there is none."""
    append_text("".join(json.dumps(row) + "\n" for row in rows), file)


def short_error(error: Exception) -> str:
    """What a row says of a failure: its kind and the first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def judged(rows: Iterable[Row]) -> list[Row]:
    """The rows of `nextscale quality`."""
    return [row for row in rows if row.get("benchmark") == BENCHMARK and all(name in row for name in (*CONDITIONS, "method"))]


def comparable(rows: Sequence[Row], one: Row) -> list[Row]:
    """The last row of every method among those that were judged under the same conditions as `one`."""
    same = [row for row in rows if all(row.get(name) == one.get(name) for name in (*CONDITIONS, FORMAT))]
    return list({row["method"]: row for row in same}.values())


def real_agreement(row: Row) -> str:
    """How often the probes are right about real images, in words; empty if that is not known."""
    return ", ".join(f"{title} {row[name]['real']:.0%}" for name, title in PROBED.items() if name in row and row[name]["real"] is not None)
