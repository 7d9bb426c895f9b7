"""Benches for the search that measure nothing of the machine: their numbers follow from the plans."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.methods import resolve_method
from nextscale.planning.cost import Workload, request_cost
from nextscale.tune.trials import Bench, Trial


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Stands for LPIPS, for which tiny images are too small."""
    return (a - b).abs().mean(dim=(1, 2, 3))


def workload_of(bench: Bench) -> Workload:
    return Workload(bench.schedule, bench.batch, text_tokens=8 if bench.pipeline.model.stack[0].has_text else 0)


@dataclass(eq=False)
class CountedBench(Bench):
    """Synthetic measurements: a second per share of the MACs, and a distance that grows with the skipped share."""

    runs: int = 0
    stop_after: int = 1000

    def first_look(self) -> float:
        return 0.001

    def run(self, text: str, images: int, timed: bool = True) -> Trial:
        if self.runs == self.stop_after:
            raise KeyboardInterrupt
        self.runs += 1
        model, work = self.pipeline.model, workload_of(self)
        try:
            ours = request_cost(model, work, resolve_method(text).forecast(model, self.schedule))
        except NextscaleError as error:
            return Trial(text, images, took=1.0, error=str(error))
        dense = request_cost(model, work)
        times = tuple(stage.total / dense.total for stage in ours.stages)
        lost = sum(
            0.1 * (1 - stage.share(full)) ** 2 * (2 if stage.skipped else 1) for stage, full in zip(ours.stages, dense.stages, strict=True)
        )
        return Trial(text, images, lost, sum(times), times, sum(times), 1.0, 1.0)
