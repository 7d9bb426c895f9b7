"""The one results file: a row per measurement, with the machine, the versions and the settings it belongs to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nextscale.lab.machine import where

RESULTS = Path(__file__).parent / "results.jsonl"


def measure(benchmark: str, config: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs one measurement; what fails becomes a row too."""
    row: dict[str, Any] = {"benchmark": benchmark, **config, **where(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}
    try:
        row |= run()
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return row


def append(rows: Sequence[dict[str, Any]], path: Path = RESULTS) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
