"""Anchors on a grid against anchors by content: `python -m benchmarks.anchors ROWS.jsonl`, rows of `benchmarks.late_rows --set anchors`.

Prints the mean LPIPS to dense images for each placing and budget, and the paired difference to the grid with its 95 % bootstrap interval.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nextscale.lab.evals.bootstrap import mean_interval

from .late_rows import ANCHORED, PLACED, read_rows


def main() -> None:
    rows = read_rows(Path(sys.argv[1]))
    print(f"{len(rows)} images\n\n| cells kept | anchors | LPIPS to dense | against the grid |\n|---:|---|---:|---:|")
    for keep in ANCHORED:
        grid = [row["lpips"][f"keep {keep}"] for row in rows]
        print(f"| {keep} | grid | {mean_interval(grid).value:.4f} | |")
        for placed in PLACED:
            other = [row["lpips"][f"{placed} {keep}"] for row in rows]
            apart = mean_interval([a - b for a, b in zip(other, grid, strict=True)])
            print(f"| {keep} | {placed} | {mean_interval(other).value:.4f} | {apart.value:+.4f} ({apart.low:+.4f} to {apart.high:+.4f}) |")


if __name__ == "__main__":
    main()
