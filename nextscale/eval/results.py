"""Rows of results: files of them, the machine and versions that they belong to, and which can be compared."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..device import hardware_name
from ..errors import NextscaleError
from ..io import append_text, write_text

BENCHMARK = "quality"
CONDITIONS = ("model", "size", "images", "seed", "batch", "dtype", "hardware")  # equal in rows that can be compared
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
    """Adds rows to a file, and creates it if it does not exist."""
    append_text("".join(json.dumps(row) + "\n" for row in rows), file)


def short_error(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def judged(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of `nextscale quality`."""
    return [row for row in rows if row.get("benchmark") == BENCHMARK and all(name in row for name in (*CONDITIONS, "method"))]


def comparable(rows: Sequence[Row], one: Row) -> list[Row]:
    """Returns the last row of every method among those judged under the same conditions as `one`."""
    same = [row for row in rows if all(row.get(name) == one.get(name) for name in (*CONDITIONS, FORMAT))]
    return list({row["method"]: row for row in same}.values())


def real_agreement(row: Row) -> str:
    """Returns the accuracy of the probes on real images in words; empty if it was not measured."""
    return ", ".join(f"{title} {row[name]['real']:.0%}" for name, title in PROBED.items() if name in row and row[name]["real"] is not None)


# --- the machine and the versions


def where(device: torch.device) -> dict[str, str]:
    """Returns the columns of the machine, the versions and the day."""
    return {
        "hardware": hardware_name(device),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def version() -> str:
    """Returns the version of this package."""
    try:
        return metadata.version("nextscale")
    except metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"


def commit() -> str:
    """Returns the commit of the checkout that this package runs from; the variable NEXTSCALE_COMMIT takes precedence."""
    if "NEXTSCALE_COMMIT" in os.environ:
        return os.environ["NEXTSCALE_COMMIT"]
    here = Path(__file__)
    tracked = _git("ls-files", here.name, folder=here.parent)  # an installed copy may lie inside the checkout of another project
    return (_git("rev-parse", "--short", "HEAD", folder=here.parent) if tracked else "") or "unknown"


def _git(*arguments: str, folder: Path) -> str:
    """Returns the output of git; empty if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
