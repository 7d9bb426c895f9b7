"""Compares the speed and memory of two versions of the package by running them alternately on one device.

    python -m benchmarks.ab OLD NEW [--rounds 10] [--case NAME ...] [--out FILE]

OLD and NEW are folders with a `nextscale` package, or revisions of this repository. Separate runs of one revision differ by up to 3 % on an
H200, so both versions stay loaded, each in its own process, and run alternately. A ratio is NEW divided by OLD within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from statistics import median, quantiles
from typing import Any

WORKER = Path(__file__).with_name("ab_worker.py")
GPU_CASES = ("dense", "sparsevar", "fastvar", "stagevar", "stagevar-fp8", "nano-auto", "decoder", "host")
CPU_CASES = ("nano-cpu",)


class Version:
    """One version of the package in its own process."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(WORKER)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)

    def ask(self, **question: str) -> dict[str, float]:
        """Sends one command and returns the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker exited with code {self.process.wait()} at {question}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def folder_of(version: str, scratch: Path) -> Path:
    """Returns the folder of a version; a revision is first exported to a folder in `scratch`."""
    if Path(version, "nextscale").is_dir():
        return Path(version).resolve()
    content = subprocess.run(["git", "archive", version, "nextscale"], capture_output=True, check=True).stdout
    target = scratch / version.replace("/", "_")
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        archive.extractall(target, filter="data")
    return target


def compare(case: str, versions: tuple[Version, Version], rounds: int) -> dict[str, Any]:
    """Runs one case alternately with both versions and returns a table row."""
    for version in versions:
        version.ask(do="prepare", case=case)
    answers = [[version.ask(do="run") for version in versions] for _ in range(rounds)]
    for version in versions:
        version.ask(do="drop")
    ratios = [new["ms"] / old["ms"] for old, new in answers]
    low, *_, high = quantiles(ratios, n=10) if len(ratios) > 1 else ratios * 2
    peaks = [max(answer[place]["peak"] for answer in answers) for place in range(2)]
    old_ms, new_ms = (median(answer[place]["ms"] for answer in answers) for place in range(2))
    row = {"case": case, "old_ms": old_ms, "new_ms": new_ms, "ratio": median(ratios), "low": low, "high": high}
    return row | {"old_peak": peaks[0], "new_peak": peaks[1], "peak_ratio": peaks[1] / peaks[0] if peaks[0] else 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old"), parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--case", action="append", choices=[*GPU_CASES, *CPU_CASES])
    parser.add_argument("--out", type=Path, help="JSON lines, one per case")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        versions = Version(folder_of(given.old, Path(scratch))), Version(folder_of(given.new, Path(scratch)))
        print(f"{'case':<14}{'old ms':>10}{'new ms':>10}{'ratio':>8}  10-90 %        peak ratio", flush=True)
        for case in given.case or GPU_CASES:
            row = compare(case, versions, given.rounds)
            spread = f"{row['low']:.3f} to {row['high']:.3f}"
            line = f"{case:<14}{row['old_ms']:>10.2f}{row['new_ms']:>10.2f}{row['ratio']:>8.3f}  {spread}"
            print(f"{line}  {row['peak_ratio']:.3f}", flush=True)
            if given.out is not None:
                with given.out.open("a") as lines:
                    print(json.dumps(row), file=lines)
        for version in versions:
            version.close()


if __name__ == "__main__":
    main()
