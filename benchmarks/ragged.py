"""What a batch pays whose images keep different numbers of tokens, against one in which all keep the mean.

    python -m benchmarks.ragged [--model nano] [--size 512] [--batch 32] [--engines eager graphs] [--out FILE]

Counts are planted, whatever the images: of the reduced stages of SparseVAR's default, image b of B keeps the share low + (high - low) *
b / (B - 1), anchors first and then cells that are scattered over the grid. Everything else runs as it does: maps, counting, restoration.
Cases take turns, so that what happens to the machine happens to all of them. "padded" is the layout in which all rows are as long as the
longest, "budget" the static shapes of `keep`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nextscale import Pipeline, SparseVAR, load
from nextscale.accel import MethodRun, RunSetup, StagePlan
from nextscale.accel.select import require_own_text
from nextscale.accel.sparsevar.run import Choice, SparseRun
from nextscale.canvas import Canvas
from nextscale.lab.bench.requests import request_prompts
from nextscale.lab.results import Row
from nextscale.lab.timing import percentiles_ms, wait
from nextscale.stage import Stage

from .results import measure, options, record

LOW, HIGH = 0.2, 1.0
MEAN = (LOW + HIGH) / 2
ANCHORS = 1 / SparseVAR().alpha ** 2  # type: ignore[operator]


@dataclass(frozen=True)
class PlantedCounts(SparseVAR):
    """SparseVAR whose images keep shares of the cells that are spread evenly from `low` to `high`."""

    low: float = LOW
    high: float = HIGH
    packed: bool = True

    def start(self, setup: RunSetup) -> MethodRun:
        require_own_text(setup.model, setup.batch, "PlantedCounts keeps other tokens")
        return PlantedRun(self, setup)


class PlantedRun(SparseRun):
    settings: PlantedCounts

    def packs(self, planned: StagePlan) -> bool:
        return self.settings.packed and super().packs(planned)

    def _choose(self, stage: Stage, canvas: Canvas) -> Choice | None:
        if stage.index < self.first:
            return None
        device = canvas.latent.device
        order = torch.arange(stage.cells, device=device) * 40503 % 65521  # scattered, and made on the device: this is captured
        if self.alpha is not None:
            order = order.index_fill(0, self._anchors(stage, self.alpha, device), -1)
        shares = torch.linspace(self.settings.low, self.settings.high, self.setup.batch, device=device)
        counts = (shares * stage.cells).round().long().clamp(min=1)
        kept = order.argsort(stable=True).argsort() < counts[:, None]  # [B, cells]
        return Choice(~kept, kept, counts)


CASES: Mapping[str, SparseVAR] = {
    "all keep the mean": PlantedCounts(low=MEAN, high=MEAN),
    "20 to 100 %, packed": PlantedCounts(),
    "20 to 100 %, padded": PlantedCounts(packed=False),
    "budget of the mean": SparseVAR(keep=(MEAN - ANCHORS) / (1 - ANCHORS)),
    "20 % each": PlantedCounts(low=LOW, high=LOW),
    "100 % each": PlantedCounts(low=HIGH, high=HIGH),
}


def seconds(pipe: Pipeline, prompts: Any, size: int, method: SparseVAR, engine: str) -> tuple[float, Any]:
    wait(pipe.model.device)
    begun = time.perf_counter()
    report = pipe(prompts, seed=0, size=(size, size), method=method).report
    wait(pipe.model.device)
    if report.engine != engine:
        raise RuntimeError(f"asked for {engine}, and {report.engine} ran")
    return time.perf_counter() - begun, report


def timed(pipe: Pipeline, engine: str, size: int, batch: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """Times of the requests without decoding, by case, and how often they hold that of the first."""
    prompts = request_prompts(pipe, batch, 0)
    for name in names:
        if engine == "graphs":
            pipe.warmup(prompts, size=(size, size), method=CASES[name])
        seconds(pipe, prompts, size, CASES[name], engine)
    took: dict[str, list[float]] = {name: [] for name in names}
    rows: dict[str, Any] = {}
    for _ in range(rounds):
        for name in names:
            whole, report = seconds(pipe, prompts, size, CASES[name], engine)
            took[name].append(whole - report.decode_seconds)
            rows[name] = {"cost_share": round(report.cost_share, 4), "padding": round(report.padding, 4)}
    for name in names:
        rows[name] |= percentiles_ms(took[name])
    first = rows[names[0]]["median_ms"]
    return {"cases": {name: row | {"times_first": round(row["median_ms"] / first, 3)} for name, row in rows.items()}}


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for engine in args.engines:
        pipe = load(args.model, engine=engine)
        config = {"model": args.model, "size": args.size, "batch": args.batch, "engine": engine, "dtype": str(pipe.model.dtype)}
        yield measure("ragged", config, partial(timed, pipe, engine, args.size, args.batch, args.rounds, args.cases))


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = options(__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engines", nargs="+", default=["eager", "graphs"], choices=["eager", "graphs"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args(arguments)
    return record(rows(args), args.out)


if __name__ == "__main__":
    main()
