"""Times dense generation and methods alternately on one device, so that a speedup compares requests that ran side by side.

The speed of a host varies by the minute, so speedups within rounds say more than times. Times of decoding come from device events;
"end to end" is from prompt features to pixels.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from .. import kernels
from ..engine import Engine, WarmUp
from ..methods.method import Method
from ..models import Infinity
from ..pipeline import Pipeline
from ..planning.memory import weights_bytes
from ..report import Report
from ..schedules import SizeLike
from ..text.prompts import TextReader
from .results import DENSE, Row, percentiles, percentiles_ms, short_error, wait, where

ENGINES: Mapping[str, tuple[Engine, ...]] = {"graphs": ("graphs",), "eager": ("eager",), "both": ("eager", "graphs")}
TEXT_TOKENS = (50, 20, 77, 33)  # lengths of the prompts of a batch, repeated
WARM_ROUNDS = 2
ROOM = 1.25  # free memory that another capture needs, relative to the largest one so far


@dataclass(frozen=True)
class Timed:
    """One timed request."""

    report: Report
    seconds: float  # end to end
    memory: int  # peak of allocated bytes minus those allocated before; on the CPU the largest size of the process

    @property
    def generate_seconds(self) -> float:
        return self.report.seconds - self.report.decode_seconds


@dataclass(eq=False)
class Runner:
    """One method with one engine, and its measurements."""

    name: str
    method: Method
    pipe: Pipeline
    size: SizeLike
    captured: WarmUp | None = field(default=None, init=False)
    captured_bytes: int = field(default=0, init=False)
    failures: Row = field(default_factory=dict, init=False)  # columns "error" and "not_captured"
    timed: list[Timed] = field(default_factory=list, init=False)

    def capture(self, prompts: Any) -> None:
        """Captures graphs for the engine "graphs". A request that cannot be captured runs eagerly, and its row has the reason."""
        if self.pipe.engine != "graphs":
            return
        before = reserved(self.pipe.model.device)
        try:
            self.captured = self.pipe.warmup(prompts, size=self.size, method=self.method)
            self.captured_bytes = reserved(self.pipe.model.device) - before
        except Exception as error:
            self.failures["not_captured"] = short_error(error)

    def request(self, prompts: Any, seed: int) -> Timed:
        device = self.pipe.model.device
        wait(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        begun = time.perf_counter()
        report = self.pipe(prompts, seed=seed, size=self.size, method=self.method).report
        wait(device)
        return Timed(report, time.perf_counter() - begun, report.peak_memory - before)

    def row(self, dense: Runner, batch: int) -> Row:
        """Returns the row of a runner that took its turns, with speedups over `dense` in the same rounds."""
        pipe, timed, device = self.pipe, self.timed, self.pipe.model.device
        row: Row = {
            "size": [side * pipe.tokenizer.pixels_per_token for side in pipe.settings.schedules.choose(self.size, None).grid],
            "dtype": str(pipe.model.dtype).removeprefix("torch."),
            "quantize": pipe.model.quantize,
            "engine": timed[0].report.engine if timed else pipe.engine,
            "engine_asked": pipe.engine,
            "kernels": kernels.enabled(device),
            "method": self.name,
            "settings": self.method.label,
            **where(device),
            **self.failures,
        }
        if "error" in row:
            return row

        pairs = [] if "error" in dense.failures else list(zip(dense.timed, timed, strict=True))
        end_to_end = percentiles_ms([one.seconds for one in timed])
        weights = weights_bytes(pipe.model) + weights_bytes(pipe.tokenizer)
        peak = max(one.memory for one in timed) + self.captured_bytes + (weights if device.type == "cuda" else 0)
        return row | {
            "repeats": len(timed),
            **percentiles_ms([one.generate_seconds for one in timed]),
            "decode": percentiles_ms([one.report.decode_seconds for one in timed]),
            "end_to_end": end_to_end,
            "speedup": percentiles([before.generate_seconds / after.generate_seconds for before, after in pairs]) if pairs else None,
            "speedup_end_to_end": percentiles([before.seconds / after.seconds for before, after in pairs]) if pairs else None,
            "images_per_second": round(1000 * batch / end_to_end["median_ms"], 3),
            "cost_share": round(statistics.fmean(one.report.cost_share for one in timed), 4),
            "peak_gb": round(peak / 1e9, 2),
            "weights_gb": round(weights / 1e9, 2),
            "capture": self.captured
            and {"seconds": round(self.captured.seconds, 2), "graphs": self.captured.graphs, "gb": round(self.captured_bytes / 1e9, 2)},
        }


def bench(
    pipe: Pipeline,
    methods: Mapping[str, Method],
    *,
    size: SizeLike = None,
    batch: int = 1,
    engines: Sequence[Engine] = ("eager",),
    repeats: int = 10,
    measure: Callable[[Runner], Row] = lambda runner: {},
) -> list[Row]:
    """Returns a row per engine and method, dense generation first. The row of a method that fails has the column "error".

    Args:
        repeats: timed rounds; in each, every method runs one request.
        measure: returns more columns of a runner that was timed, while its captures exist.
    """
    methods = {DENSE: Method(), **methods}
    runners = [Runner(name, method, own_captures(pipe, engine), size) for engine in engines for name, method in methods.items()]
    common = {"benchmark": "bench", "model": pipe.name, "batch": batch, "run": datetime.now(UTC).isoformat(timespec="milliseconds")}
    rows: dict[tuple[str, str], Row] = {}
    for group in groups(runners, request_prompts(pipe, batch, 0)):
        take_turns(group, batch, repeats)
        dense = {runner.pipe.engine: runner for runner in group if runner.name == DENSE}
        for runner in group:
            if (key := (runner.pipe.engine, runner.name)) not in rows:
                rows[key] = common | runner.row(dense[runner.pipe.engine], batch)
                rows[key] |= {} if "error" in rows[key] else measure(runner)
        for runner in group:
            runner.pipe.captures.clear()
        release(pipe.model.device)
    return [rows[engine, name] for engine in engines for name in methods]


def choose_engines(name: str | None, device: torch.device) -> tuple[Engine, ...]:
    """Returns the engines of a name in `ENGINES`; None is "graphs" on a GPU and "eager" elsewhere."""
    return ENGINES[name or ("graphs" if device.type == "cuda" else "eager")]


def own_captures(pipe: Pipeline, engine: Engine) -> Pipeline:
    """Returns a pipeline of the same weights with its own captures, which may use all memory of the device."""
    device = pipe.model.device
    everything = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    own = Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine, everything, pipe.profiles)
    own.partners = pipe.partners
    return own


def groups(runners: Sequence[Runner], prompts: Any) -> Iterator[list[Runner]]:
    """Captures runners and yields as many at a time as the device has room for, dense generation in every group."""
    dense = [runner for runner in runners if runner.name == DENSE]
    waiting = [runner for runner in runners if runner.name != DENSE]
    while True:
        group = [*dense]
        for runner in group:
            runner.capture(prompts)
        while waiting and (len(group) == len(dense) or has_room(group)):
            group.append(waiting.pop(0))
            group[-1].capture(prompts)
        yield group
        if not waiting:
            return
        dense = [replace(runner, pipe=own_captures(runner.pipe, runner.pipe.engine)) for runner in dense]


def has_room(captured: Sequence[Runner]) -> bool:
    """Returns True if the device has memory for the graphs of another runner."""
    largest = max(runner.captured_bytes for runner in captured)
    return largest == 0 or torch.cuda.mem_get_info(captured[0].pipe.model.device)[0] > ROOM * largest


def take_turns(runners: Sequence[Runner], batch: int, repeats: int) -> None:
    """Runs rounds in which each runner makes the same request. The first rounds are not timed; a runner that fails stops."""
    for number in range(-WARM_ROUNDS, repeats):
        prompts = request_prompts(runners[0].pipe, batch, abs(number))
        for runner in (one for one in runners if "error" not in one.failures):
            try:
                runner.timed += [runner.request(prompts, abs(number))][: number >= 0]
            except Exception as error:
                runner.failures["error"] = short_error(error)


def request_prompts(pipe: Pipeline, batch: int, seed: int) -> Any:
    """Returns classes, or features of prompts of usual lengths, which are then not encoded in a timed request."""
    numbers = range(seed, seed + batch)
    if not isinstance(pipe.reader, TextReader):
        return [number % 10 for number in numbers]
    lengths = text_lengths(pipe, batch)  # three of the tokens are the number, one or two, and the encoder's own one
    return pipe.reader.read([f"{number % 100} " + "word " * (length - 3) for number, length in zip(numbers, lengths, strict=True)])


def text_lengths(pipe: Pipeline, batch: int) -> list[int]:
    """Returns the tokens of every prompt, at most as many as the model reads."""
    longest = pipe.model.config.longest_text if isinstance(pipe.model, Infinity) else max(TEXT_TOKENS)
    return [min(TEXT_TOKENS[image % len(TEXT_TOKENS)], longest) for image in range(batch)]


def release(device: torch.device) -> None:
    """Gives unused memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reserved(device: torch.device) -> int:
    """Returns the bytes that cannot be given back."""
    release(device)
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
