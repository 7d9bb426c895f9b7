"""Anchors on a grid against others: `python -m benchmarks.anchors ROWS.jsonl`, rows of `benchmarks.late_rows --content ... --farthest ...`.

Prints the mean LPIPS to dense images for each placing and budget, and the paired difference to the grid with its 95 % bootstrap interval.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nextscale.lab.evals.bootstrap import mean_interval
from nextscale.lab.results import read_rows

from .late_rows import PLACED


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name in sorted({name for row in rows for name in row["lpips"]}):
        where, budget = name.split()
        if where not in PLACED:
            continue
        both = [(row["lpips"][name], row["lpips"][f"keep {budget}"]) for row in rows if name in row["lpips"]]
        own, grid = (mean_interval(values).value for values in zip(*both, strict=True))
        apart = mean_interval([a - b for a, b in both])
        yield f"| {budget} | {where} | {len(both)} | {grid:.4f} | {own:.4f} | {apart.value:+.4f} ({apart.low:+.4f} to {apart.high:+.4f}) |"


def main() -> None:
    print("| budget | anchors | images | LPIPS with the grid | with these | difference |\n|---:|---|---:|---:|---:|---:|")
    print("\n".join(lines([row for path in sys.argv[1:] for row in read_rows(Path(path))])))


if __name__ == "__main__":
    main()
