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
from ..eval.compare import Distance
from ..eval.results import short_error, wait
from ..io import from_levels, to_levels
from ..methods.method import Method
from ..methods.registry import resolve_method
from ..pipeline import Pipeline
from ..report import Report
from ..stage import Schedule

METRIC_BATCH = 32  # images that are compared at a time
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
    least: int = 24  # images of the first round
    dense_images: dict[tuple[int, bool], Tensor] = field(default_factory=dict)  # [B, 3, H, W] in 8 bits, by batch number and whether timed
    dense_seconds: list[float] = field(default_factory=list)  # of dense batches, the latest last
    dense_timed: float = 0.0  # when the latest was timed

    @property
    def batches(self) -> int:
        return len(self.prompts) // self.batch

    @property
    def unit(self) -> int:
        """Batches of the first round; a long enough list of prompts has more."""
        return max(1, min(-(-self.least // self.batch), self.batches))

    def images(self, batches: int) -> int:
        return batches * self.batch

    @cached_property
    def eager(self) -> Pipeline:
        """A pipeline of the same weights, never captured."""
        pipe = self.pipeline
        return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, "eager")

    def dense(self, number: int, timed: bool) -> Tensor:
        key = number, timed
        if key not in self.dense_images:
            for _ in range(2 if timed and self.on_gpu and not self.dense_images else 0):  # until it is captured
                self._generate(Method(), number, timed)
            self.dense_images[key] = self._generate(Method(), number, timed)[0].cpu()
        return self.dense_images[key]

    @property
    def on_gpu(self) -> bool:
        return self.pipeline.model.device.type == "cuda"

    def times(self, timed: bool) -> bool:
        """Returns True if a run is timed: on a CPU every one is, since that costs nothing."""
        return timed or not self.on_gpu

    def run(self, text: str, batches: int, timed: bool = True) -> Trial:
        """Runs the candidate on the first batches; a failure is a trial too. A timed run on a GPU is captured first, which takes longer."""
        begun = time.perf_counter()
        try:
            trial = self._run(text, resolve_method(text), batches, self.times(timed))
        except NextscaleError as error:
            trial = Trial(text, self.images(batches), error=short_error(error))
        return replace(trial, took=time.perf_counter() - begun)

    def _run(self, text: str, method: Method, batches: int, timed: bool) -> Trial:
        reports: list[Report] = []
        distances: list[Tensor] = []
        for _ in range(2 if timed and self.on_gpu else 0):  # programs are loaded in the first request, graphs captured in the second
            self._generate(method, 0, timed)
        for number in range(batches):
            dense = self.dense(number, timed)
            images, report = self._generate(method, number, timed)
            reports.append(report)
            distances.append(self._distance(images, dense))
        distance, cost = float(torch.cat(distances).mean()), statistics.fmean(report.cost_share for report in reports)
        if not timed:
            return Trial(text, self.images(batches), distance, cost_share=cost)
        self._time_dense()
        return Trial(
            text,
            self.images(batches),
            distance,
            statistics.median(report.seconds for report in reports),
            tuple(statistics.median(times) for times in zip(*([s.seconds for s in r.stages] for r in reports), strict=True)),
            cost,
            self._dense_seconds(),
        )

    def first_look(self) -> float:
        """Returns seconds per image of dense generation. On a CPU it generates one image, since there time grows with the batch."""
        if self.on_gpu:
            return self.dense_seconds_per_image()
        prompts, seeds = self.part(0)
        return self.pipeline(prompts[:1], seed=seeds[:1], size=self.schedule).report.seconds

    def dense_seconds_per_image(self) -> float:
        """Returns the time of dense generation, and measures it first if needed."""
        if not self.dense_seconds:
            self._time_dense()
        return self._dense_seconds() / self.batch

    def _dense_seconds(self) -> float:
        return statistics.median(self.dense_seconds[-5 if self.on_gpu else -3 :])

    def _time_dense(self) -> None:
        """Times a dense batch: beside every candidate on a GPU; on a CPU only so often that it adds a tenth to the time."""
        waited = time.perf_counter() - self.dense_timed
        if self.on_gpu or len(self.dense_seconds) < 2 or waited > APART * self.dense_seconds[-1]:
            runs = 3 if self.on_gpu and not self.dense_seconds else 1  # graphs are captured in the second
            self.dense_seconds += [self._generate(Method(), 0, timed=True)[1].seconds for _ in range(runs)][-1:]
            self.dense_timed = time.perf_counter()

    def part(self, number: int) -> tuple[list[Any], list[int]]:
        """Returns the prompts and seeds of a batch."""
        numbers = range(number * self.batch, (number + 1) * self.batch)
        return [self.prompts[i] for i in numbers], [self.seed + i for i in numbers]

    def _generate(self, method: Method, number: int, timed: bool) -> tuple[Tensor, Report]:
        prompts, seeds = self.part(number)
        wait(self.pipeline.model.device)
        output = (self.pipeline if timed else self.eager)(prompts, seed=seeds, size=self.schedule, method=method)
        return to_levels(output.pixels), output.report

    @torch.inference_mode()
    def _distance(self, images: Tensor, dense: Tensor) -> Tensor:
        pairs = zip(images.split(METRIC_BATCH), dense.to(images.device).split(METRIC_BATCH), strict=True)
        return torch.cat([self.lpips(from_levels(ours), from_levels(theirs)) for ours, theirs in pairs]).cpu()
