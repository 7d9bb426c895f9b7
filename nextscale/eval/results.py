"""Rows of results: files of them, the machine and versions that they belong to, and statistics of times."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from ..device import hardware_name
from ..errors import MissingExtra, NextscaleError
from ..io import append_text
from ..serialization import from_plain, parse_json

DENSE = "dense"  # name of the row that others are compared with

Row = dict[str, Any]
"""A line of a results file."""


def read_rows(file: Path) -> list[Row]:
    try:
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        return [from_plain(Row, parse_json(line), f"line {number}") for number, line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise NextscaleError(f"{file} must have one JSON object per line ({error}). Pass another file.") from error


def append_rows(rows: Iterable[Row], file: Path) -> None:
    """Adds rows to a file; creates it if it does not exist."""
    append_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), file)


def short_error(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def research(module: str) -> Any:
    """Imports a module of the research package, which has further metrics and plots."""
    try:
        return import_module(f"nextscale_research.{module}")
    except ImportError as error:
        raise MissingExtra(f"this needs the package nextscale-research ({error}). Run `pip install ./research` in a checkout.") from error


# --- times


def wait(device: torch.device) -> None:
    """Waits until the device has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def percentiles(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Returns the median, the 20th and the 80th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9
    return {name: round(tenths[place], digits) for name, place in (("median", 4), ("p20", 1), ("p80", 7))}


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms": value for name, value in percentiles([1000 * one for one in seconds], 3).items()}


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
    tracked = _git("ls-files", here.name, folder=here.parent)  # an installed copy may be inside the checkout of another project
    return (_git("rev-parse", "--short", "HEAD", folder=here.parent) if tracked else "") or "unknown"


def _git(*arguments: str, folder: Path) -> str:
    """Returns the output of git; empty if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
