"""Methods and engines taking turns at the same requests."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...accel.method import Method
from ...engine import WarmUp
from ...pipeline import Engine, Pipeline
from ...report import Report
from ..evals.methods import DENSE
from ..results import short_error
from ..timing import wait
from .energy import EnergyMeter
from .plan import Plan
from .requests import request_prompts
from .suites import Case

WARM_ROUNDS = 2
METERED_SECONDS = 1.5  # duration of the requests whose energy is measured
ROOM = 1.25  # free memory before another capture, against the largest that there is


@dataclass(frozen=True)
class Timed:
    """One timed request."""

    report: Report
    seconds: float  # that the caller waited
    memory: int  # bytes allocated at its peak besides what was there before; on the CPU the process's largest size

    @property
    def generate_seconds(self) -> float:
        return self.report.seconds - self.report.decode_seconds


@dataclass(eq=False)
class Runner:
    """One method with one engine, and what was seen of it."""

    name: str
    method: Method
    pipe: Pipeline
    case: Case
    engine: Engine  # asked for; reports say which one ran
    warm_up: WarmUp | None = None
    captured_bytes: int = 0
    not_captured: str | None = None
    error: str | None = None
    timed: list[Timed] = field(default_factory=list)
    energy: float | None = None  # joules per image
    not_metered: str | None = None

    @property
    def device(self) -> torch.device:
        return self.pipe.model.device

    def capture(self) -> None:
        """Captures graphs where the engine asks for them. What cannot be captured runs eagerly, and its row says so."""
        if self.engine != "graphs":
            return
        before = reserved(self.device)
        try:
            self.warm_up = self.pipe.warmup(request_prompts(self.pipe, self.case.batch, 0), size=self.case.size, method=self.method)
        except Exception as error:
            self.not_captured = short_error(error)
        self.captured_bytes = reserved(self.device) - before if self.warm_up is not None else 0

    def attempt(self, prompts: Any, seed: int) -> Timed | None:
        """One request; None if it fails, and from then on."""
        if self.error is not None:
            return None
        try:
            return self.request(prompts, seed)
        except Exception as error:
            self.error = short_error(error)
            return None

    def request(self, prompts: Any, seed: int) -> Timed:
        wait(self.device)
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        begun = time.perf_counter()
        report = self.pipe(prompts, seed=seed, size=self.case.size, method=self.method).report
        wait(self.device)
        return Timed(report, time.perf_counter() - begun, report.peak_memory - before)


def with_engine(pipe: Pipeline, engine: Engine) -> Pipeline:
    """The same weights, with captured graphs of its own, which may take all of the device's memory."""
    device = pipe.model.device
    everything = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine, everything, pipe.profiles)


def rounds(runners: Sequence[Runner]) -> Iterator[list[Runner]]:
    """All runners, captured: at once if the device has room for their graphs, else some at a time, dense generation always.

    Each has a memory pool of its own, so that its size is known.
    """
    dense = [runner for runner in runners if runner.name == DENSE]
    waiting = [runner for runner in runners if runner.name != DENSE]
    first = True
    while waiting or first:
        together = dense if first else [fresh(runner) for runner in dense]
        for runner in together:
            runner.capture()
        accepted: list[Runner] = []
        while waiting and (not accepted or has_room([*together, *accepted])):
            accepted.append(waiting.pop(0))
            accepted[-1].capture()
        first = False
        yield [*together, *accepted]


def fresh(runner: Runner) -> Runner:
    return Runner(runner.name, runner.method, with_engine(runner.pipe, runner.engine), runner.case, runner.engine)


def has_room(captured: Sequence[Runner]) -> bool:
    """Whether the device has memory for the graphs of one more."""
    largest = max(runner.captured_bytes for runner in captured)
    device = captured[0].device
    return largest == 0 or torch.cuda.mem_get_info(device)[0] > ROOM * largest


def take_turns(runners: Sequence[Runner], plan: Plan) -> None:
    """Rounds in which each runs the same request; the first ones only warm up."""
    pipe, batch = runners[0].pipe, runners[0].case.batch
    prompts: Any = None
    for number in range(-WARM_ROUNDS, plan.repeats):
        prompts = request_prompts(pipe, batch, abs(number))
        for runner in runners:
            timed = runner.attempt(prompts, abs(number))
            if timed is not None and number >= 0:
                runner.timed.append(timed)
    if plan.meter is not None:
        for runner in runners:
            runner.energy = joules_per_image(runner, prompts, plan.meter)


def joules_per_image(runner: Runner, prompts: Any, meter: EnergyMeter) -> float | None:
    """Energy of requests one after the other, long enough for the counter to move often; what the GPU takes when idle is part of it."""
    if runner.error is not None:
        return None
    requests = max(2, math.ceil(METERED_SECONDS / statistics.median(timed.seconds for timed in runner.timed)))
    before = meter.joules()
    try:
        for seed in range(requests):
            runner.request(prompts, seed)
    except Exception as error:  # its times stay what they are
        runner.not_metered = short_error(error)
        return None
    after = meter.joules()
    return None if before is None or after is None else (after - before) / (requests * runner.case.batch)


# --- memory of the device


def release(device: torch.device) -> None:
    """Gives memory that nothing holds any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reserved(device: torch.device) -> int:
    """Bytes that cannot be given back."""
    release(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
