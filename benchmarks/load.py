"""Measures a server under load, with Poisson arrivals at 0.5, 1 and 2 times its capacity.

    python -m benchmarks.load --size 256 --max-batch 16 --seconds 20
    python -m benchmarks.load --door http --size 128 --max-batch 4 --seconds 20

The door is the batcher in this process, or `nextscale serve` in its own process over HTTP (extra `serve`). First, throughput is measured
with one request at a time and with as many as fit; the ratio is the gain of batching. Then requests arrive independently of earlier
answers, and latency is measured from arrival. At the end the door drains while requests still arrive, which are refused. Finally, some
images are generated again, one at a time, and compared. With --same-images batches are padded to full size in both cases.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

import nextscale
from nextscale.batching import Batcher, BatchRecord, Job
from nextscale.cli.parse import parse_size
from nextscale.errors import Overloaded, ShuttingDown
from nextscale.eval.results import Row, append_rows
from nextscale.pipeline import Pipeline

from .results import RESULTS, measure

PROMPTS = (
    "a 3D icon of a red apple",
    "a flat icon of a rocket",
    "a glossy emoji of a sailboat",
    "a photo of a blue t-shirt",
    "an android style emoji of a cactus",
)
RATES = (0.5, 1.0, 2.0)  # relative to the capacity
LATE_SHARE = 0.05  # of a run, while the door drains
GONE = 0
ROUNDS = 3  # for measuring the capacity
EQUAL_LEVELS = 1  # of 255; allows for rounding


@dataclass(frozen=True, eq=False)
class Answer:
    """Result of a request."""

    status: int  # GONE if the server had exited
    seconds: float  # since arrival
    seed: int
    image: Image.Image | None = None  # if kept for comparison


class Door(Protocol):
    """An interface that answers requests."""

    @property
    def batches(self) -> list[int]:
        """Sizes of all batches."""
        ...

    @property
    def batch_ms(self) -> dict[str, float]:
        """Median milliseconds per batch size; empty if the server does not report them."""
        ...

    def ask(self, seed: int) -> Future[Answer]: ...

    def drain(self) -> None:
        """Finishes accepted requests and refuses new ones."""

    def close(self) -> None: ...


def is_kept(seed: int) -> bool:
    """Returns True if the image is kept for comparison; keeping all would take gigabytes."""
    return seed % 3 == 0


def prompt_of(seed: int) -> str:
    return PROMPTS[seed % len(PROMPTS)]


class BatcherDoor:
    def __init__(self, pipeline: Pipeline, settings: dict[str, Any], **batching: Any) -> None:
        self._settings = settings
        self._batches: list[tuple[int, float]] = []  # images, seconds
        self._batcher = Batcher([{"model": pipeline}], on_batch=self._count, **batching)

    def _count(self, record: BatchRecord) -> None:
        self._batches.append((record.images, record.seconds))

    @property
    def batches(self) -> list[int]:
        return [images for images, _ in self._batches]

    @property
    def batch_ms(self) -> dict[str, float]:
        seconds: dict[int, list[float]] = {}
        for images, taken in self._batches:
            seconds.setdefault(images, []).append(taken)
        return {str(images): round(1000 * statistics.median(found), 2) for images, found in sorted(seconds.items())}

    def ask(self, seed: int) -> Future[Answer]:
        arrived, answer = time.monotonic(), Future[Answer]()
        try:
            handle = self._batcher.submit(Job("model", prompt_of(seed), (seed,), settings=self._settings))
        except (Overloaded, ShuttingDown) as refused:
            answer.set_result(Answer(429 if isinstance(refused, Overloaded) else 503, time.monotonic() - arrived, seed))
            return answer

        def done(future: Future[Any]) -> None:
            seconds = time.monotonic() - arrived
            failed = future.exception() is not None
            image = None if failed or not is_kept(seed) else future.result()[0].image
            answer.set_result(Answer(500 if failed else 200, seconds, seed, image))

        handle.future.add_done_callback(done)
        return answer

    def drain(self) -> None:
        self._batcher.drain(0)

    def close(self) -> None:
        self._batcher.drain()
        self._batcher.close()


# --- runs


def saturated(door: Door, images: int, at_a_time: int) -> float:
    """Returns images per second with `at_a_time` concurrent requests."""
    begun, pending, left = time.monotonic(), set[Future[Answer]](), list(range(images))
    while left or pending:
        while left and len(pending) < at_a_time:
            pending.add(door.ask(left.pop()))
        done, pending = wait(pending, return_when="FIRST_COMPLETED")
        assert all(answer.result().status == 200 for answer in done)
    return images / (time.monotonic() - begun)


def rates(alone: Door, together: Door, max_batch: int, images: int) -> tuple[float, float]:
    """Returns images per second one at a time and in batches, as medians of alternating rounds."""
    busy = 2 * max_batch  # one batch runs while the next waits
    saturated(alone, 1, 1)
    saturated(together, busy, busy)
    found = [(saturated(alone, max(images // 4, 2), 1), saturated(together, max(images, 2 * max_batch), busy)) for _ in range(ROUNDS)]
    alone.close()
    together.close()
    return statistics.median(one for one, _ in found), statistics.median(many for _, many in found)


def open_loop(door: Door, per_second: float, seconds: float, seed: int) -> tuple[list[Answer], float]:
    """Sends requests with Poisson arrivals; returns the answers and the seconds until the last one."""
    rng, answers = random.Random(seed), list[Future[Answer]]()
    begun, arrival, draining = time.monotonic(), 0.0, False
    while arrival < seconds * (1 + LATE_SHARE):
        if not draining and arrival > seconds:
            draining = True
            door.drain()
        time.sleep(max(begun + arrival - time.monotonic(), 0))
        answers.append(door.ask(len(answers)))
        arrival += rng.expovariate(per_second)
    finished = wait(answers, timeout=600)
    assert not finished.not_done, f"{len(finished.not_done)} requests have no answer"
    return [answer.result() for answer in answers], time.monotonic() - begun


def summary(answers: Sequence[Answer], seconds: float, batches: Sequence[int]) -> dict[str, Any]:
    served = [answer for answer in answers if answer.status == 200]
    times = np.array([answer.seconds for answer in served]) * 1000
    found = {f"p{share}_ms": round(float(np.percentile(times, share)), 1) if served else None for share in (50, 95, 99)}
    refused = [answer.seconds for answer in answers if answer.status != 200]
    return {
        "requests": len(answers),
        "answers": {
            str(status) if status else "server ended": count
            for status, count in sorted(Counter(answer.status for answer in answers).items())
        },
        "lost": len(answers) - sum(answer.status in (200, 429, 503, GONE) for answer in answers),
        "images_per_s": round(len(served) / seconds, 3),
        **found,
        "refused_ms": round(1000 * max(refused), 2) if refused else None,
        "mean_batch": round(float(np.mean(batches)), 2) if batches else None,
        "batches": {str(size): count for size, count in sorted(Counter(batches).items())},
    }


def image_of(answer: Answer) -> Image.Image:
    assert answer.image is not None, f"a single request has status {answer.status}"
    return answer.image


def compared(answers: Sequence[Answer], alone: Callable[[int], Image.Image], images: int) -> dict[str, Any]:
    """Compares images generated under load with the same ones generated alone."""
    chosen = random.Random(0).sample([answer for answer in answers if answer.image is not None], images)
    worst, decibels = [], []
    for answer in chosen:
        ours, theirs = (np.asarray(image).astype(float) for image in (answer.image, alone(answer.seed)))
        worst.append(int(np.abs(ours - theirs).max()))
        error = float(np.square(ours - theirs).mean())
        decibels.append(99.0 if error == 0 else min(10 * np.log10(255**2 / error), 99.0))
    equal = sum(levels <= EQUAL_LEVELS for levels in worst)
    return {
        "compared": images,
        "equal": equal,
        "worst_levels": max(worst, default=None),
        "least_psnr": round(float(min(decibels)), 2) if decibels else None,
        "mean_psnr": round(float(np.mean(decibels)), 2) if decibels else None,
    }


def warmed(pipeline: Pipeline, settings: dict[str, Any], max_batch: int, every_size: bool) -> float:
    """Generates every batch size, or the smallest and the largest, which captures CUDA graphs; returns the seconds."""
    begun = time.monotonic()
    for batch in range(1, max_batch + 1) if every_size else (1, max_batch):
        pipeline([prompt_of(image) for image in range(batch)], seed=0, warmup=True, **settings)
    return time.monotonic() - begun


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per rate."""
    pipeline = nextscale.load(arguments.model, device=arguments.device, dtype=getattr(torch, arguments.dtype) if arguments.dtype else None)
    settings: dict[str, Any] = {"size": parse_size(arguments.size)} | ({"method": arguments.method} if arguments.method else {})
    same = arguments.same_images
    warm_seconds = warmed(pipeline, settings, arguments.max_batch, every_size=pipeline.engine == "graphs" and not same)

    def door(max_batch: int, max_queue: int) -> Door:
        if arguments.door == "http":
            from .load_http import HttpDoor

            return HttpDoor(arguments, max_batch, max_queue)
        delay = arguments.delay_ms / 1000
        return BatcherDoor(pipeline, settings, max_batch=max_batch, batch_delay=delay, max_queue=max_queue, same_images=same)

    single, capacity = rates(door(1, 10_000), door(arguments.max_batch, 10_000), arguments.max_batch, arguments.probe_images)
    config = {
        "door": arguments.door,
        "model": arguments.model,
        "size": arguments.size,
        "method": arguments.method or "dense",
        "dtype": str(pipeline.model.dtype).removeprefix("torch."),
        "engine": pipeline.engine,
        "max_batch": arguments.max_batch,
        "batch_delay_ms": arguments.delay_ms,
        "max_queue": arguments.max_queue,
        **({"same_images": True} if same else {}),
        "warmup_s": round(warm_seconds, 1),
        "one_at_a_time_per_s": round(single, 3),
        "capacity_per_s": round(capacity, 3),
        "gain": round(capacity / single, 2),
    }
    print(f"one at a time {single:.2f} images/s, in batches {capacity:.2f}: {capacity / single:.2f} x", flush=True)

    def against_alone(answers: Sequence[Answer], images: int) -> dict[str, Any]:
        if not same:
            return compared(answers, lambda seed: pipeline(prompt_of(seed), seed=seed, **settings).images[0], images)
        idle = door(arguments.max_batch, arguments.max_queue)
        try:
            return compared(answers, lambda seed: image_of(idle.ask(seed).result()), images)
        finally:
            idle.close()

    def at(rate: float) -> dict[str, Any]:
        opened = door(arguments.max_batch, arguments.max_queue)
        try:
            answers, seconds = open_loop(opened, rate * capacity, arguments.seconds, seed=int(100 * rate))
        finally:
            opened.close()
        images = min(arguments.compared, sum(answer.image is not None for answer in answers))
        served = summary(answers, seconds, opened.batches)
        return {"seconds": round(seconds, 2), **served, "batch_ms": opened.batch_ms, **against_alone(answers, images)}

    for rate in arguments.rates:
        row = measure("load", {**config, "rate": rate, "offered_per_s": round(rate * capacity, 3)}, partial(at, rate))
        print({name: value for name, value in row.items() if name not in config}, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=("batcher", "http"), default="batcher")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--size", default="256", help="WIDTHxHEIGHT, the side of a square, or a budget")
    parser.add_argument("--method", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None, choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--same-images", action="store_true", help="pad batches to full size, so that images do not depend on the load")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of arrivals at each rate")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--probe-images", type=int, default=64, help="images per round for measuring the capacity")
    parser.add_argument("--compared", type=int, default=16, help="images to generate again for comparison")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for row in run(arguments):
        append_rows([row], arguments.out)


if __name__ == "__main__":
    main()
