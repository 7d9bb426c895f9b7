"""Methods that differ in late stages alone, generated from one run of the early ones: on a CPU most of the time of a comparison."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...accel.combine import CombinedRun
from ...accel.method import DENSE, Method, MethodRun, RunSetup
from ...accel.sparsevar import SparseVAR
from ...accel.sparsevar.run import SparseRun
from ...canvas import Canvas
from ...errors import SettingError
from ...generate import StageDone, begin, run_part
from ...parts import Part
from ...pipeline import Pipeline
from ...request import Request
from ...resolve import Call, resolve
from ...sampling import ImageRng, Rng
from ...stage import Schedule


@dataclass(frozen=True)
class Late:
    """What a method made of a batch whose early stages were dense."""

    latent: Tensor  # [B, Z, H, W]
    tokens: Tensor  # [B], of the late stages together, in a row of each image


@dataclass(eq=False)
class LateStages:
    """A batch of which the stages before `first` have run densely, watched by `watch`, and which any method can finish.

    Methods that watch the early stages, as SparseVAR does, start with what `watch` has seen: they measure change as it does.
    """

    pipeline: Pipeline
    schedule: Schedule
    prompts: Any  # as a pipeline takes them
    seeds: Sequence[int]
    first: int
    watch: SparseVAR

    def __post_init__(self) -> None:
        self._early = self._run_early()

    @property
    def seen(self) -> SparseRun:
        """What SparseVAR has seen of the early stages."""
        run = self._early.run
        assert isinstance(run, SparseRun)
        return run

    @property
    def canvas(self) -> Canvas:
        """As the early stages have left it."""
        return self._early.canvas

    def _request(self, method: Method) -> Request:
        return resolve(self.pipeline, Call(self.prompts, list(self.seeds), self.schedule, method=method))

    @torch.inference_mode()
    def _run_early(self) -> Part:
        model, request = self.pipeline.model, self._request(self.watch)
        inputs = model.prompt_inputs(request.prompts, request.guidance.needs_both, self.schedule, request.negative)
        cond = model.condition_from(inputs, model.schedule_tables(self.schedule))
        part = Part(request, self.pipeline.tokenizer.canvas(self.schedule, request.batch), *begin(model, cond, request))
        for stage in self.schedule.stages[: self.first]:
            run_part(model, part, stage)
        return part

    @torch.inference_mode()
    def finish(self, method: Method) -> Late:
        """The late stages with this method, whose early ones are dense."""
        part, totals = self._fork(method), []
        for stage in self.schedule.stages[self.first :]:
            done, _ = run_part(self.pipeline.model, part, stage)
            totals.append(image_tokens(done, part.request.batch))
        return Late(part.canvas.latent, torch.stack(totals).sum(dim=0))

    def _fork(self, method: Method) -> Part:
        early, fresh = self._early, self._request(method)
        if any(replace(plan, taps=()) != DENSE for plan in fresh.plans[: self.first]):
            raise SettingError(f"{method.label} changes stages before stage {self.first}, which have run densely: choose an earlier first")
        request = replace(fresh, rng=same_numbers(early.request.rng), method_rng=same_numbers(early.request.method_rng))
        guided = request.rows > request.batch
        setup = RunSetup(self.pipeline.model, self.schedule, request.batch, request.method_rng, request.plans, guided, method.own_cache)
        run = method.start(setup)
        for one in runs_of(run):
            if isinstance(one, SparseRun):
                one.go_on_from(self.seen)
        everyone = torch.arange(request.batch, device=early.canvas.latent.device)
        env = replace(early.env.only(everyone, request.method_rng), data_dependent=method.data_dependent)
        return Part(request, copy.copy(early.canvas), run, env)


def runs_of(run: MethodRun) -> Iterator[MethodRun]:
    yield from run.runs if isinstance(run, CombinedRun) else (run,)


def same_numbers(rng: Rng) -> Rng:
    """Random numbers that go on from the same place, and leave the others where they are."""
    assert isinstance(rng, ImageRng)
    fresh = rng.only(())
    fresh.generators = [generator.clone_state() for generator in rng.generators]
    return fresh


def image_tokens(done: StageDone, batch: int) -> Tensor:
    """Tokens that a stage ran of every image, in a row, [B]."""
    if done.known_counts is not None:
        return torch.tensor(done.known_counts, dtype=torch.float64)
    return torch.full((batch,), float(done.num_tokens), dtype=torch.float64)
