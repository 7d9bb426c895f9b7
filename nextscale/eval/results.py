"""Rows of results: files of them, the machine and versions that they belong to, and statistics of times."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
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
    found = np.quantile(values, (0.5, 0.2, 0.8))
    return {name: round(float(value), digits) for name, value in zip(("median", "p20", "p80"), found, strict=True)}


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
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():  # an installed copy may be inside the checkout of another project
        return "unknown"
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
