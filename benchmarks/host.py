"""Measures the time that the host adds to a request, and its parts.

    python -m benchmarks.host -m infinity-2b --size 1024 --method stagevar --random-weights [--profile] [--out FILE]

"device_ms" is the time of the device by its own events, "end_to_end_ms" the time of the call, and "around_ms" the difference. The host's
time consists of "before_ms" until the first launch, "launching_ms" until the last, "beside_ms" for other work before it waits (copies,
costs), "waiting_ms", and "after_ms" from the last result to the return. Launching and other work overlap with a busy device; before and
after do not. "images_ms" is the time of `out.images` afterwards. On a CPU, before, beside and after are the host's time, as on a GPU.
Methods alternate.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from nextscale import Pipeline, load
from nextscale import pipeline as pipeline_module
from nextscale.engine.executor import EagerExecutor
from nextscale.engine.replay import ReplayExecutor
from nextscale.eval.bench import request_prompts
from nextscale.eval.results import Row, percentiles_ms, wait
from nextscale.loading.load import random_pipeline
from nextscale.methods.method import Method
from nextscale.methods.registry import resolve_method

from .results import measure, options, record

WARM = 3
PARTS = ("before", "launching", "beside", "waiting", "after")
SHOWN = r"nextscale/(pipeline|resolve|execute|output|request|report|sampling|guidance|engine|planning|text|accel)"  # files in a profile


@dataclass
class Marks:
    """Times at which the phases of the last request ended."""

    at: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        self.at[name] = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        ends = ["called", "first launch", "launched", "asked", "read", "returned"]
        return {part: self.at[end] - self.at[begin] for part, (begin, end) in zip(PARTS, pairwise(ends), strict=True)}


def marked(function: Callable[..., Any], marks: Marks, before: str | None, after: str | None) -> Callable[..., Any]:
    def run(*given: Any, **settings: Any) -> Any:
        if before is not None:
            marks.mark(before)
        result = function(*given, **settings)
        if after is not None:
            marks.mark(after)
        return result

    return run


@contextmanager
def watched(pipe: Pipeline) -> Iterator[Marks]:
    """Records the phases of requests inside the `with` block."""
    marks, model = Marks(), type(pipe.model)
    places = [
        (model, "prompt_inputs", "first launch", None),
        (EagerExecutor, "run", None, "launched"),
        (ReplayExecutor, "run", None, "launched"),
        (pipeline_module, "build_report", "asked", "read"),
    ]
    known = [(owner, name, getattr(owner, name)) for owner, name, _, _ in places]
    try:
        for owner, name, before, after in places:
            setattr(owner, name, marked(getattr(owner, name), marks, before, after))
        yield marks
    finally:
        for owner, name, function in known:
            setattr(owner, name, function)


@dataclass
class Timed:
    """Times of the requests of one method in seconds."""

    device: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    images: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    engine: str = ""

    def to_row(self) -> dict[str, Any]:
        around = [whole - device for whole, device in zip(self.end_to_end, self.device, strict=True)]
        named = {"device": self.device, "end_to_end": self.end_to_end, "around": around, **self.parts, "images": self.images}
        found = {f"{name}_ms": percentiles_ms(seconds)["median_ms"] for name, seconds in named.items()}
        return {"engine": self.engine, "repeats": len(self.device), **found, "around": percentiles_ms(around)}


def request(pipe: Pipeline, prompts: Any, size: Any, method: Method, marks: Marks, timed: Timed | None) -> None:
    wait(pipe.model.device)
    marks.mark("called")
    output = pipe(prompts, seed=0, size=size, method=method)
    marks.mark("returned")
    parts, begun = marks.seconds(), time.perf_counter()
    assert output.images
    converted = time.perf_counter() - begun
    if timed is None:
        return
    timed.device.append(output.report.seconds)
    timed.end_to_end.append(sum(parts.values()))
    timed.images.append(converted)
    timed.engine = output.report.engine
    for part, seconds in parts.items():
        timed.parts[part].append(seconds)


def times(pipe: Pipeline, size: Any, batch: int, methods: dict[str, Method], repeats: int) -> dict[str, Timed]:
    found = {name: Timed() for name in methods}
    prompts = request_prompts(pipe, batch, 0)
    with watched(pipe) as marks:
        for number in range(-WARM, repeats):
            for name, method in methods.items():
                request(pipe, prompts, size, method, marks, found[name] if number >= 0 else None)
    return found


def profile(pipe: Pipeline, size: Any, batch: int, method: Method, repeats: int) -> None:
    """Prints a profile of the Python functions of warmed-up requests."""
    prompts, profiler = request_prompts(pipe, batch, 0), cProfile.Profile()
    pipe(prompts, seed=0, size=size, method=method)
    with profiler:
        for _ in range(repeats):
            pipe(prompts, seed=0, size=size, method=method)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(SHOWN)


def rows(pipe: Pipeline, args: argparse.Namespace, size: Any, methods: dict[str, Method]) -> Iterator[Row]:
    """Yields a row per method; the first row measures all of them."""
    measured: dict[str, Timed] = {}

    def run(name: str) -> dict[str, Any]:
        if not measured:
            measured.update(times(pipe, size, args.batch, methods, args.repeats))
        return measured[name].to_row()

    common = {"model": args.model, "size": args.size, "batch": args.batch, "dtype": str(pipe.model.dtype).removeprefix("torch.")}
    common |= {"kv_dtype": args.kv_dtype, "weights": "random" if args.random_weights else "published"}
    for name in methods:
        yield measure("host", common | {"method": name}, partial(run, name))


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = options(__doc__)
    parser.add_argument("-m", "--model", default="nano")
    parser.add_argument("--size", type=int, help="side of square images in pixels; by default the model's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--method", action="append", help="as in `nextscale generate`; can be repeated")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--kv-dtype", choices=["int8"], help="format of the KV cache")
    parser.add_argument("--profile", action="store_true", help="also print a profile of functions")
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    opened = partial(random_pipeline, dtype=dtype) if args.random_weights else load
    pipe = opened(args.model, device=device, kv_dtype=args.kv_dtype)
    methods = {name: resolve_method(name) for name in args.method or ["dense"]}
    size = None if args.size is None else (args.size, args.size)
    found = record(rows(pipe, args, size, methods), args.out)
    if args.profile:
        for method in methods.values():
            profile(pipe, size, args.batch, method, args.repeats)
    return found


if __name__ == "__main__":
    main()
