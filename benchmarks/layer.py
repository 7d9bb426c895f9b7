"""Times the parts of a layer at the last stage, with and without FastVAR: attention, feed-forward, selection, restoration.

`python -m benchmarks.layer [-m MODEL] [--size SIDE] [--method METHOD]` is FastVAR's figure A.1. Generation is eager with random weights;
the host runs ahead of the GPU, so that the times are those of the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nextscale.device import choose_device, choose_dtype
from nextscale.eval.bench import own_captures, request_prompts
from nextscale.eval.results import Row, percentiles_ms, where
from nextscale.loading.load import random_pipeline
from nextscale.methods import fastvar, resolve_method
from nextscale.pipeline import Pipeline

from .results import options, record

SLEPT = 200_000_000  # cycles of the device, in which the host launches a stage
PARTS = ("attention", "feed-forward", "selection", "restoration")


@dataclass
class PartTimer:
    """Times of the parts of all layers, at the stages for which it is on."""

    device: torch.device
    on: bool = False
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return run(*args, **kwargs)
            begun = self.mark()
            found = run(*args, **kwargs)
            self.marks.append((part, begun, self.mark()))
            return found

        return timing

    def seconds(self) -> dict[str, list[float]]:
        """Returns the times of each part and forgets them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found: dict[str, list[float]] = {}
        for part, begun, ended in self.marks:
            elapsed = begun.elapsed_time(ended) / 1000 if self.device.type == "cuda" else ended - begun
            found.setdefault(part, []).append(elapsed)
        self.marks.clear()
        return found


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def parts_timed(pipe: Pipeline, timer: PartTimer) -> Iterator[None]:
    """Times attention and feed-forward of all blocks, and what FastVAR adds. A selection is two calls: distances and the choice."""
    with ExitStack() as stack:
        for block in pipe.model.stack:
            for part, module in (("attention", block.attention), ("feed-forward", block.feed_forward)):
                stack.enter_context(replaced(module, "forward", timer.timed(part, module.forward)))
        for part, name in (("selection", "distance_from_mean"), ("selection", "top_share"), ("restoration", "restored")):
            stack.enter_context(replaced(fastvar, name, timer.timed(part, getattr(fastvar, name))))
        yield


def part_times(pipe: Pipeline, method: str, size: Any, batch: int, repeats: int) -> dict[str, list[float]]:
    """Returns the times of each part at the last stage that runs, in seconds per layer, a number per repeat."""
    timer, device = PartTimer(pipe.model.device), pipe.model.device
    schedule, chosen = pipe.settings.schedules.choose(size, None), resolve_method(method)
    run = [stage.index for stage, plan in zip(schedule, chosen.forecast(pipe.model, schedule), strict=True) if not plan.skip]
    found: dict[str, list[float]] = {}

    def stage_done(preview: Any) -> None:
        timer.on = preview.done.stage.index == run[-2]
        if timer.on and device.type == "cuda":
            torch.cuda._sleep(SLEPT)

    with parts_timed(pipe, timer):
        for number in range(-1, repeats):
            prompts = request_prompts(pipe, batch, abs(number))
            pipe(prompts, seed=abs(number), size=schedule, method=chosen, on_stage=stage_done, decode=False)
            for part, seconds in timer.seconds().items():
                if number >= 0:  # the first request loads programs
                    found.setdefault(part, []).append(sum(seconds) / len(pipe.model.blocks))
    return found


def rows_of(pipe: Pipeline, method: str, size: Any, batch: int, repeats: int) -> Iterator[Row]:
    times = {name: part_times(pipe, name, size, batch, repeats) for name in ("dense", method)}
    for name, parts in times.items():
        for part in (part for part in PARTS if part in parts):
            dense = times["dense"].get(part)
            yield {
                **{"benchmark": "layer", "model": pipe.name, "size": size, "batch": batch, "method": name, "part": part},
                **{"dtype": str(pipe.model.dtype).removeprefix("torch."), "weights": "random", "repeats": repeats},
                **percentiles_ms(parts[part]),
                **{"speedup": dense and round(statistics.median(dense) / statistics.median(parts[part]), 3), **where(pipe.model.device)},
            }


def main(words: Sequence[str] | None = None) -> list[Row]:
    parser = options(__doc__)
    parser.add_argument("-m", "--model", default="hart-0.7b")
    parser.add_argument("--size", type=int, help="side in pixels; default: the model's")
    parser.add_argument("--method", default="fastvar")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed requests")
    parser.add_argument("--device", help="cpu, cuda or cuda:N")
    args: Any = parser.parse_args(words)
    device = choose_device(args.device)
    pipe = own_captures(random_pipeline(args.model, device=device, dtype=choose_dtype(None, device)), "eager")
    size = None if args.size is None else (args.size, args.size)
    return record(rows_of(pipe, args.method, size, args.batch, args.repeats), args.out)


if __name__ == "__main__":
    main()
