"""Runs candidates: distance of their images to the dense ones, and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import NextscaleError
from ..eval.compare import Distance, distances
from ..eval.results import short_error, wait
from ..io import to_levels
from ..methods.method import Method
from ..methods.registry import resolve_method
from ..pipeline import Pipeline
from ..report import Report
from ..stage import Schedule

APART = 10  # a dense batch is timed again on a CPU after as many times its length: another program may have started or ended


@dataclass(frozen=True)
class Trial:
    """Measurements of a candidate on the first `images` prompts. An untimed one has distances only."""

    text: str  # of the candidate
    images: int
    lpips: float = 0.0
    seconds: float = 0.0  # of a batch, decoding included, median
    stages: tuple[float, ...] = ()  # seconds of every stage, median
    cost_share: float = 1.0  # MACs against dense generation, mean over the batches
    dense: float = 0.0  # seconds of a dense batch in the same minutes
    took: float = 0.0  # seconds of the search that it cost
    predicted: float = 0.0  # the distance that was expected; 0 where nothing was
    error: str | None = None

    @property
    def timed(self) -> bool:
        return self.seconds > 0

    @property
    def speedup(self) -> float:
        return self.dense / self.seconds if self.timed else 0.0

    def __post_init__(self) -> None:
        if self.images < 1 or min(self.lpips, self.seconds, *self.stages, self.cost_share, self.dense, self.took, self.predicted) < 0:
            raise ValueError(f"numbers of the trial {self.text!r} must not be negative")


@dataclass(eq=False)
class Bench:
    """A pipeline that generates the same prompts and seeds with every candidate.

    Untimed runs are eager and compared with eager dense images: a captured graph rounds differently, which changes some sampled codes. On
    nano two dense images of the same seed are 0.03 LPIPS apart if one of them was captured.
    """

    pipeline: Pipeline
    schedule: Schedule
    prompts: Sequence[Any]
    batch: int
    seed: int
    lpips: Distance
    dense_images: dict[tuple[int, bool], Tensor] = field(default_factory=dict)  # [B, 3, H, W] in 8 bits, by batch number and whether timed
    dense_seconds: list[float] = field(default_factory=list)  # of dense batches, the latest last
    dense_timed: float = 0.0  # when the latest was timed

    @property
    def on_gpu(self) -> bool:
        return self.pipeline.model.device.type == "cuda"

    @cached_property
    def eager(self) -> Pipeline:
        """A pipeline of the same weights, never captured."""
        pipe = self.pipeline
        return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, "eager")

    def times(self, timed: bool) -> bool:
        """Returns True if a run is timed: on a CPU every one is, since that costs nothing."""
        return timed or not self.on_gpu

    def run(self, text: str, images: int, timed: bool = True) -> Trial:
        """Runs the candidate on the first images, whole batches; a failure is a trial too. A timed run on a GPU is captured first."""
        begun, timed = time.perf_counter(), self.times(timed)
        reports: list[Report] = []
        found: list[Tensor] = []
        try:
            method = resolve_method(text)
            self._capture(method, timed)
            for number in range(images // self.batch):
                dense = self._dense(number, timed)
                made, report = self._generate(method, number, timed)
                reports.append(report)
                found.append(distances(self.lpips, made, dense))
            trial = Trial(text, images, float(torch.cat(found).mean()), cost_share=statistics.fmean(one.cost_share for one in reports))
            if timed:
                trial = replace(
                    trial,
                    seconds=statistics.median(report.seconds for report in reports),
                    stages=tuple(map(statistics.median, zip(*([s.seconds for s in r.stages] for r in reports), strict=True))),
                    dense=self.dense_time(),
                )
        except NextscaleError as error:
            trial = Trial(text, images, error=short_error(error))
        return replace(trial, took=time.perf_counter() - begun)

    def first_look(self) -> float:
        """Returns seconds per image of dense generation. On a CPU it generates one image, since there time grows with the batch."""
        if self.on_gpu:
            return self.dense_time() / self.batch
        prompts, seeds = self.part(0)
        return self.pipeline(prompts[:1], seed=seeds[:1], size=self.schedule).report.seconds

    def dense_time(self) -> float:
        """Returns the seconds of a dense batch, the median of the latest.

        It times one beside every candidate on a GPU; on a CPU only so often that it adds a tenth to the time.
        """
        waited = time.perf_counter() - self.dense_timed
        if self.on_gpu or len(self.dense_seconds) < 2 or waited > APART * self.dense_seconds[-1]:
            self._capture(Method(), not self.dense_seconds)
            self.dense_seconds.append(self._generate(Method(), 0, timed=True)[1].seconds)
            self.dense_timed = time.perf_counter()
        return statistics.median(self.dense_seconds[-5 if self.on_gpu else -3 :])

    def part(self, number: int) -> tuple[list[Any], list[int]]:
        """Returns the prompts and seeds of a batch."""
        numbers = range(number * self.batch, (number + 1) * self.batch)
        return [self.prompts[i] for i in numbers], [self.seed + i for i in numbers]

    def _dense(self, number: int, timed: bool) -> Tensor:
        key = number, timed
        if key not in self.dense_images:
            self._capture(Method(), timed and not self.dense_images)
            self.dense_images[key] = self._generate(Method(), number, timed)[0].cpu()
        return self.dense_images[key]

    def _capture(self, method: Method, needed: bool) -> None:
        """Runs two batches on a GPU: programs are loaded in the first, graphs are captured in the second."""
        for _ in range(2 if needed and self.on_gpu else 0):
            self._generate(method, 0, timed=True)

    def _generate(self, method: Method, number: int, timed: bool) -> tuple[Tensor, Report]:
        prompts, seeds = self.part(number)
        wait(self.pipeline.model.device)
        output = (self.pipeline if timed else self.eager)(prompts, seed=seeds, size=self.schedule, method=method)
        return to_levels(output.pixels), output.report
