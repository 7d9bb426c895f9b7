"""Acceleration methods against dense generation in the same run, plain eager, random weights: time, ratio, work and peak memory.

    python -m benchmarks.methods [--out FILE] [--repeats N] [NAME ...]

Methods take turns: every repeat draws one request with each of them, and a ratio is that repeat's dense time over the method's. Small
stages wait for the host, whose speed varies by the minute, so ratios say more than times. Random weights draw noise, so quality is not
measured here. How many tokens SparseVAR keeps depends on the image, and noise has detail everywhere; so its threshold is replaced by a
share: each stage keeps the quarter of its cells that changes most, and with the anchors about 30 %. What it really ran is in the row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale import Pipeline
from nextscale.accel import Method, resolve_method, sparsevar
from nextscale.random_weights import random_pipeline
from nextscale.report import Report

from .dense import Case, prompts, weights_bytes
from .results import RESULTS, append, measure, spread

LIVELIEST = 0.25  # with one anchor in 16 cells, 30 % of the tokens


def flattest_cells(change: Tensor, tau: float, left_out: Tensor | None = None) -> Tensor:
    """In place of SparseVAR's threshold: all cells but the liveliest of those that were not left out before, [B, cells]."""
    score = change if left_out is None else change.masked_fill(left_out, -torch.inf)
    liveliest = score.topk(round(LIVELIEST * change.shape[1]), dim=1).indices
    return torch.ones_like(change, dtype=torch.bool).scatter(1, liveliest, False)


METHODS: dict[str, list[str]] = {
    "dense": [],
    "skip the last two stages": ["skip:last=2"],
    "SparseVAR": ["sparsevar"],
    "FastVAR": ["fastvar"],
    "StageVAR": ["stagevar"],
    "StageVAR, guidance off only": ["stagevar:alphas=[]"],
    "FastVAR + guidance off": ["fastvar", "stagevar:alphas=[]"],
    "SparseVAR + guidance off": ["sparsevar", "stagevar:alphas=[]"],
    "ToMe": ["tome"],
}
CASES = (
    Case("2b-1024", "infinity-2b", (1024, 1024)),
    Case("2b-1024-batch4", "infinity-2b", (1024, 1024), batch=4),
    Case("2b-2:1", "infinity-2b", (1440, 720)),
    Case("hart-1024", "hart-0.7b", (1024, 1024)),
    Case("star-1024", "star-1024", (1024, 1024)),
    Case("2b-1344", "infinity-2b", (1344, 1344)),
    Case("2b-2048", "infinity-2b", (2048, 2048)),
)
ONLY = {"2b-1344": ("dense", "FastVAR"), "2b-2048": ("dense", "FastVAR")}  # past training: what the paper shows there


def config(pipe: Pipeline, case: Case, name: str, method: Method) -> dict[str, Any]:
    return {
        "case": case.name,
        "model": case.model,
        "size": list(case.size),
        "batch": case.batch,
        "dtype": str(pipe.model.dtype).removeprefix("torch."),
        "engine": "eager",
        "method": name,
        "settings": method.label,
        "guided": True,
        "weights": "random",
        "weights_gb": round(weights_bytes(pipe) / 1e9, 2),
        "quality": None,
    }


def take_turns(pipe: Pipeline, case: Case, methods: dict[str, Method], repeats: int) -> dict[str, list[Report]]:
    """Reports of every method; the first two rounds warm up."""
    reports: dict[str, list[Report]] = {name: [] for name in methods}
    for seed in range(-2, repeats):
        features = prompts(pipe, case, abs(seed))
        for name, method in methods.items():
            report = pipe(features, seed=abs(seed), size=case.size, method=method).report
            if seed >= 0:
                reports[name].append(report)
    return reports


def generate_seconds(report: Report) -> float:
    return report.seconds - report.decode_seconds


def numbers(reports: list[Report], dense: list[Report]) -> dict[str, Any]:
    ratios = [generate_seconds(before) / generate_seconds(after) for before, after in zip(dense, reports, strict=True)]
    ratio = {key.removesuffix("_ms"): value for key, value in spread([value / 1000 for value in ratios]).items()}
    return {
        "repeats": len(reports),
        **spread([generate_seconds(report) for report in reports]),
        "speedup": ratio,
        "cost_share": round(sum(report.cost_share for report in reports) / len(reports), 4),
        "tokens": [stage.tokens for stage in reports[0].stages],
        "rows": [stage.rows for stage in reports[0].stages],
        "stage_median_ms": [spread([r.stages[i].seconds for r in reports])["median_ms"] for i in range(len(reports[0].stages))],
        "decode": spread([report.decode_seconds for report in reports]),
        "peak_gb": round(max(report.peak_memory for report in reports) / 1e9, 2),
    }


def run_case(pipe: Pipeline, case: Case, repeats: int, out: Path) -> None:
    sparsevar.low_change = flattest_cells
    methods = {name: resolve_method(parts) for name, parts in METHODS.items() if name in ONLY.get(case.name, METHODS)}
    refused: dict[str, Exception] = {}
    for name, method in methods.items():
        try:
            method.forecast(pipe.model, pipe.settings.schedules.choose(case.size, None), kept=0.5)
        except Exception as error:
            refused[name] = error
    running = {name: method for name, method in methods.items() if name not in refused}
    reports = take_turns(pipe, case, running, repeats)

    def result(name: str) -> dict[str, Any]:
        if name in refused:
            raise refused[name]
        return numbers(reports[name], reports["dense"])

    for name, method in methods.items():
        row = measure("methods", config(pipe, case, name, method), lambda name=name: result(name))
        append([row], out)
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"cases to run: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    chosen = [case for case in CASES if not args.names or case.name in args.names]
    for model in dict.fromkeys(case.model for case in chosen):
        pipe = random_pipeline(model, device=device, dtype=dtype)
        for case in chosen:
            if case.model == model:
                run_case(pipe, case, args.repeats, args.out)
        del pipe


if __name__ == "__main__":
    main()
