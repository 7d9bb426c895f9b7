"""The results file: a row per measurement with hardware, versions and settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from nextscale.eval.results import Row, append_rows, short_error, where

RESULTS = Path(__file__).parent / "results.jsonl"


def options(about: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of all benchmarks; its description is the first line of `about`."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="file to append rows to")
    return parser


def require_gpu(parser: argparse.ArgumentParser, what: str) -> None:
    """Exits with an error if there is no GPU."""
    if not torch.cuda.is_available():
        parser.error(f"{what} on a GPU")


def measure(benchmark: str, config: dict[str, Any], run: Callable[[], dict[str, Any]]) -> Row:
    """Runs one measurement; errors are returned as a row."""
    row: Row = {"benchmark": benchmark, **config, **where(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}
    try:
        row |= run()
    except Exception as error:
        row["error"] = short_error(error)
    return row


def record(rows: Iterable[Row], out: Path) -> list[Row]:
    """Appends rows to the file as they are measured, and prints them."""
    found = []
    for row in rows:
        append_rows([row], out)
        print(json.dumps(row), flush=True)
        found.append(row)
    return found
