"""How fast requests are: methods and engines take turns, so that a ratio compares what ran side by side.

Small stages wait for the host in eager generation, and a host's speed varies by the minute; so ratios to dense generation of the same
round say more than times. Times of stages and decoding are those of the pipeline's own report, from device events; "end to end" is what
a caller waits who has prompt features and wants pixels.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, get_args

import torch

from ... import kernels
from ...accel.method import Method
from ...engine import WarmUp
from ...errors import SettingError
from ...models import Infinity
from ...pipeline import Engine, Pipeline
from ...planning.cost import Workload
from ...planning.memory import ASSUMED_KEPT, request_memory
from ...report import Report
from ...text.prompts import TextReader
from ..evals.methods import DENSE
from ..evals.quality import Row, spread
from ..machine import where
from .energy import EnergyMeter
from .roofline import Rates, request_roofline
from .suites import Case

BENCHMARK = "bench"
WARM_ROUNDS = 2
METERED_SECONDS = 1.5  # of requests in a row, for the energy that they take
ROOM = 1.25  # free memory for another recording, against the largest there is
TEXT_TOKENS = (50, 20, 77, 33)  # of the prompts in a batch, repeated


@dataclass(frozen=True)
class Plan:
    """How cases are measured."""

    device: torch.device
    engines: tuple[Engine, ...]
    repeats: int
    rates: Rates
    step: str | None = (
        None  # what rows are called in the waterfall; None is the engine that was asked for, and whether it was without kernels
    )
    weights: str = "random"
    meter: EnergyMeter | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise SettingError(f"repeats is the number of timed rounds, 1 or more; got {self.repeats}")
        if self.step is not None and len(self.engines) > 1:
            raise SettingError(f"step {self.step!r} names what one engine reaches: measure engines one by one")


def chosen_engines(name: str | None, device: torch.device) -> tuple[Engine, ...]:
    """None is graphs on a GPU and eager elsewhere."""
    if name is None:
        return ("graphs",) if device.type == "cuda" else ("eager",)
    if name == "both":
        return ("eager", "graphs")
    for engine in get_args(Engine):
        if engine == name:
            return (engine,)
    raise SettingError(f"--engine {name!r}: choose one of {', '.join(get_args(Engine))}, both")


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
    engine: Engine  # asked for; reports tell which one it was
    warm_up: WarmUp | None = None
    captured_bytes: int = 0
    not_captured: str | None = None
    error: str | None = None
    drawn: list[Timed] = field(default_factory=list)
    energy: float | None = None  # joules per image
    not_metered: str | None = None

    @property
    def device(self) -> torch.device:
        return self.pipe.model.device

    def capture(self) -> None:
        """Where the engine is to replay recordings. What cannot be recorded is drawn eagerly, and its row says so."""
        if self.engine != "graphs":
            return
        before = reserved(self.device)
        try:
            self.warm_up = self.pipe.warmup(prompts(self.pipe, self.case.batch, 0), size=self.case.size, method=self.method)
        except Exception as error:
            self.not_captured = in_short(error)
        self.captured_bytes = reserved(self.device) - before if self.warm_up is not None else 0

    def draw(self, given: Any, seed: int) -> Timed | None:
        """None if it fails, and from then on."""
        if self.error is not None:
            return None
        try:
            return self.request(given, seed)
        except Exception as error:
            self.error = in_short(error)
            return None

    def request(self, given: Any, seed: int) -> Timed:
        wait(self.device)
        before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        begun = time.perf_counter()
        report = self.pipe(given, seed=seed, size=self.case.size, method=self.method).report
        wait(self.device)
        return Timed(report, time.perf_counter() - begun, report.peak_memory - before)


def bench_case(pipe: Pipeline, case: Case, methods: Mapping[str, Method], plan: Plan) -> list[Row]:
    """A row per engine and method. What fails is a row that says so."""
    runners = [Runner(name, method, with_engine(pipe, engine), case, engine) for engine in plan.engines for name, method in methods.items()]
    rows: list[Row] = []
    run = run_name(case)
    for together in rounds(runners):
        take_turns(together, plan)
        references = {runner.engine: runner for runner in together if runner.name == DENSE}
        known = {(row["engine_asked"], row["method"]) for row in rows}
        new = [runner for runner in together if (runner.engine, runner.name) not in known]
        rows += [row_of(runner, references.get(runner.engine), plan) | {"run": run} for runner in new]
        for runner in together:
            runner.pipe.captures.clear()
        release(pipe.model.device)
    return rows


def run_name(case: Case) -> str:
    """The same for all that is measured in turns."""
    return f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {case.name}"


def rounds(runners: Sequence[Runner]) -> Iterator[list[Runner]]:
    """All runners, recorded: at once if the device has room for their recordings, else some at a time, dense generation always.

    Each has a pool of memory for itself, so that its need can be told.
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


def has_room(recorded: Sequence[Runner]) -> bool:
    largest = max(runner.captured_bytes for runner in recorded)
    device = recorded[0].device
    return largest == 0 or torch.cuda.mem_get_info(device)[0] > ROOM * largest


def take_turns(runners: Sequence[Runner], plan: Plan) -> None:
    """Rounds in which each draws the same request; the first ones only warm up."""
    pipe, batch = runners[0].pipe, runners[0].case.batch
    given: Any = None
    for number in range(-WARM_ROUNDS, plan.repeats):
        given = prompts(pipe, batch, abs(number))
        for runner in runners:
            drawn = runner.draw(given, abs(number))
            if drawn is not None and number >= 0:
                runner.drawn.append(drawn)
    if plan.meter is not None:
        for runner in runners:
            runner.energy = joules_per_image(runner, given, plan.meter)


def joules_per_image(runner: Runner, given: Any, meter: EnergyMeter) -> float | None:
    """Of requests one after the other, for so long that the counter moves often; what the GPU takes when idle is part of it."""
    if runner.error is not None:
        return None
    requests = max(2, math.ceil(METERED_SECONDS / statistics.median(drawn.seconds for drawn in runner.drawn)))
    before = meter.joules()
    try:
        for seed in range(requests):
            runner.request(given, seed)
    except Exception as error:  # its times stay what they are
        runner.not_metered = in_short(error)
        return None
    after = meter.joules()
    return None if before is None or after is None else (after - before) / (requests * runner.case.batch)


def row_of(runner: Runner, dense: Runner | None, plan: Plan) -> Row:
    row = config(runner.case, runner.name, runner.method, runner.engine, plan) | {
        "dtype": str(runner.pipe.model.dtype).removeprefix("torch."),
        **plan.rates.to_row(),
    }
    if runner.drawn:
        row |= {"size": [*runner.drawn[0].report.size], "engine": runner.drawn[0].report.engine}
    if runner.not_captured is not None:
        row["not_recorded"] = runner.not_captured
    if runner.not_metered is not None:
        row["not_metered"] = runner.not_metered
    return row | ({"error": runner.error} if runner.error is not None else numbers(runner, dense, plan))


def config(case: Case, name: str, method: Method, engine: Engine, plan: Plan) -> Row:
    """What a row is about, known before anything has run."""
    asked = [*case.size] if isinstance(case.size, tuple) else [case.size, case.size] if isinstance(case.size, int) else None
    with_kernels = kernels.enabled(plan.device)
    return {
        "benchmark": BENCHMARK,
        "suite": case.suite,
        "case": case.name,
        "model": case.model,
        "size": asked,
        "batch": case.batch,
        "dtype": None,
        "engine": engine,
        "engine_asked": engine,
        "kernels": with_kernels,
        "step": plan.step or (engine if with_kernels else f"{engine}, plain torch"),
        "method": name,
        "settings": method.label,
        "guided": True,
        "weights": plan.weights,
        "quality": None,
        **where(plan.device),
    }


def numbers(runner: Runner, dense: Runner | None, plan: Plan) -> Row:
    drawn, case, pipe = runner.drawn, runner.case, runner.pipe
    reports = [one.report for one in drawn]
    stages = range(len(reports[0].stages))

    def ratio(seconds: Callable[[Timed], float]) -> Row | None:
        if dense is None or dense.error is not None:
            return None
        return spread([seconds(before) / seconds(after) for before, after in zip(dense.drawn, drawn, strict=True)])

    generate = spread_ms([one.generate_seconds for one in drawn])
    end_to_end = spread_ms([one.seconds for one in drawn])
    shares = [statistics.fmean(report.stages[i].cost_share for report in reports) for i in stages]
    asked = workload(pipe, case)
    limit = request_roofline(pipe.model, asked, shares, plan.rates)
    peak = max(one.memory for one in drawn) + runner.captured_bytes + (weight_bytes(pipe) if runner.device.type == "cuda" else 0)
    plans = runner.method.forecast(pipe.model, asked.schedule, ASSUMED_KEPT)
    predicted = request_memory(pipe.model, pipe.tokenizer, asked, plans)
    recording = runner.warm_up
    return {
        "repeats": len(drawn),
        **generate,
        "decode": spread_ms([report.decode_seconds for report in reports]),
        "end_to_end": end_to_end,
        "speedup": ratio(lambda one: one.generate_seconds),
        "speedup_end_to_end": ratio(lambda one: one.seconds),
        "images_per_second": round(1000 * case.batch / end_to_end["median_ms"], 3),
        "choice": spread_known_ms([[stage.sampling_seconds for stage in report.stages] for report in reports]),
        "residual": spread_known_ms([[stage.residual_seconds for stage in report.stages] for report in reports]),
        "cost_share": round(statistics.fmean(report.cost_share for report in reports), 4),
        "tokens": [stage.tokens for stage in reports[0].stages],
        "computed": [round(stage.computed, 1) for stage in reports[0].stages],
        "padding": [round(statistics.fmean(report.stages[i].padding for report in reports), 4) for i in stages],
        "rows": [stage.rows for stage in reports[0].stages],
        "stage_median_ms": [spread_ms([report.stages[i].seconds for report in reports])["median_ms"] for i in stages],
        "limit_ms": round(1000 * limit.both, 3),
        "limit_arithmetic_ms": round(1000 * limit.arithmetic, 3),
        "limit_reading_ms": round(1000 * limit.reading, 3),
        "times_limit": round(generate["median_ms"] / (1000 * limit.both), 3),
        "peak_gb": round(peak / 1e9, 2),
        "predicted_gb": round(predicted.peak / 1e9, 2),  # of eager generation
        "weights_gb": round(weight_bytes(pipe) / 1e9, 2),
        "planned_gb": round(reports[0].planned_memory / 1e9, 2),
        "recording": recording
        and {"seconds": round(recording.seconds, 2), "graphs": recording.graphs, "gb": round(runner.captured_bytes / 1e9, 2)},
        "joules_per_image": None if runner.energy is None else round(runner.energy, 1),
    }


def failed_rows(case: Case, methods: Mapping[str, Method], plan: Plan, error: Exception) -> list[Row]:
    """Where the model itself could not be made."""
    told = {"error": in_short(error), "run": run_name(case)}
    return [config(case, name, method, engine, plan) | told for engine in plan.engines for name, method in methods.items()]


def prompts(pipe: Pipeline, batch: int, seed: int) -> Any:
    """Classes, or features of texts with the numbers of tokens above: encoding a text is not measured."""
    each = [seed + image for image in range(batch)]
    if not isinstance(pipe.reader, TextReader):
        return [number % 10 for number in each]
    lengths = text_lengths(pipe, batch)  # the number and the encoder's end token are two of them
    return pipe.reader.read([f"{number} " + "word " * (length - 2) for number, length in zip(each, lengths, strict=True)])


def text_lengths(pipe: Pipeline, batch: int) -> list[int]:
    """Tokens of every prompt, at most as many as the model reads."""
    longest = pipe.model.config.longest_text if isinstance(pipe.model, Infinity) else max(TEXT_TOKENS)
    return [min(TEXT_TOKENS[image % len(TEXT_TOKENS)], longest) for image in range(batch)]


def workload(pipe: Pipeline, case: Case) -> Workload:
    text = max(text_lengths(pipe, case.batch)) if pipe.model.stack[0].has_text else 0
    return Workload(pipe.settings.schedules.choose(case.size, None), case.batch, text_tokens=text, refine=pipe.settings.sampling.refine)


def with_engine(pipe: Pipeline, engine: Engine) -> Pipeline:
    """The same weights, with captured graphs of its own, which may take all of the device's memory."""
    device = pipe.model.device
    everything = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine, everything)


def weight_bytes(pipe: Pipeline) -> int:
    return sum(p.numel() * p.element_size() for module in (pipe.model, pipe.tokenizer) for p in module.parameters())


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms": round(value, 3) for name, value in spread([1000 * one for one in seconds]).items()}


def spread_known_ms(reports: Sequence[Sequence[float | None]]) -> dict[str, float] | None:
    """Of sums over the stages of every report that were measured; None where a report has none of them, as those of replays."""
    known = [[seconds for seconds in stages if seconds is not None] for stages in reports]
    return spread_ms([sum(stages) for stages in known]) if all(known) else None


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- the device


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Memory that nothing holds any more goes back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reserved(device: torch.device) -> int:
    """Bytes that cannot be given back."""
    release(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
