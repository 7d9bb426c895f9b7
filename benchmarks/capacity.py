"""Answers how many GPUs a load needs: `python -m benchmarks.capacity --model infinity-2b --rate 40 --p95 2`.

Simulates the batcher: Poisson arrivals, one queue per machine, a batch as soon as it is full or its oldest image has waited for the delay,
and batch times that were measured (results.jsonl). A cluster routes each request to the shorter of two random queues, as Ray Serve does.
Without options it prints the tables of docs/guides/capacity.md.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nextscale.eval.results import Row, read_rows

from .cells import SHOWN, Column, heads_of, table, table_of
from .results import RESULTS

DELAY = 0.005  # seconds, the default batching delay of `nextscale serve`
QUEUED_BATCHES = 8  # full batches that may wait for each GPU, like 128 images in the measured load
REFUSED = 0.001  # maximum share of refused requests for a load that counts as served
IMAGES = 50_000  # per simulation, limited to 20 to 100 times the allowed latency
STEPS = 9  # of the search for the highest rate, to 0.3 % of the bound


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of a batch by its number of images: measured points, straight lines between them."""

    images: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, images: int) -> float:
        if images > self.images[-1]:
            raise ValueError(f"images must be at most {self.images[-1]}, the largest measured batch; got {images}")
        return float(np.interp(images, self.images, self.seconds))

    def up_to(self, images: int) -> BatchTimes:
        """Returns the same times with a lower batch limit."""
        points = [point for point in zip(self.images, self.seconds, strict=True) if point[0] <= images]
        return BatchTimes(*(tuple(one) for one in zip(*points, strict=True)))

    @property
    def max_batch(self) -> int:
        return self.images[-1]

    @property
    def images_per_second(self) -> float:
        """Returns the rate of one GPU that always runs full batches."""
        return self.max_batch / self.seconds[-1]


@dataclass
class Machine:
    """GPUs that share one queue. Times are seconds since the start."""

    gpus: int
    times: BatchTimes
    delay: float
    max_queue: int
    waiting: deque[float] = field(default_factory=deque)  # arrivals
    running: int = 0  # images
    idle: int = field(init=False)

    def __post_init__(self) -> None:
        self.idle = self.gpus

    @property
    def load(self) -> int:
        return len(self.waiting) + self.running

    def put(self, now: float) -> bool:
        """Queues an image; returns False if the queue is full."""
        if self.waiting and len(self.waiting) >= self.max_queue:
            return False
        self.waiting.append(now)
        return True

    def take(self, now: float) -> list[float]:
        """Returns the arrivals of the batch that starts now; empty if none is ready or no GPU is idle."""
        full = len(self.waiting) >= self.times.max_batch
        if not self.idle or not self.waiting or not (full or now >= self.waiting[0] + self.delay):
            return []
        batch = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.times.max_batch))]
        self.idle, self.running = self.idle - 1, self.running + len(batch)
        return batch

    def finish(self, images: int) -> None:
        self.idle, self.running = self.idle + 1, self.running - images


@dataclass(frozen=True)
class Simulated:
    """Outcome of a simulation: seconds of every served image, images of every batch, and the number of refused requests."""

    latencies: np.ndarray
    batches: tuple[tuple[float, int], ...]  # start, images
    refused: int

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.latencies, share))

    @property
    def mean_batch(self) -> float:
        return float(np.mean([images for _, images in self.batches]))

    @property
    def refused_share(self) -> float:
        return self.refused / (self.refused + len(self.latencies))


def poisson(per_second: float, seconds: float, seed: int) -> Iterator[float]:
    """Yields arrival times."""
    rng, now = random.Random(seed), 0.0
    while now < seconds:
        yield now
        now += rng.expovariate(per_second)


def simulate(
    arrivals: Iterable[float],
    times: BatchTimes,
    *,
    machines: int = 1,
    gpus: int = 1,
    delay: float = DELAY,
    max_queue: int | None = None,
    seed: int = 0,
) -> Simulated:
    """Simulates `machines` machines with `gpus` GPUs each until every accepted image is answered.

    Args:
        arrivals: Times of requests for one image each, ascending.
        max_queue: Images that may wait on a machine. Default: 8 full batches per GPU.
    """
    room = QUEUED_BATCHES * times.max_batch * gpus if max_queue is None else max_queue
    cluster = [Machine(gpus, times, delay, room) for _ in range(machines)]
    rng, order, requests = random.Random(seed), itertools.count(), iter(arrivals)
    events: list[tuple[float, int, Machine | None, list[float]]] = []  # a machine is None where a request arrives
    latencies, batches, refused = list[float](), list[tuple[float, int]](), 0

    def expect_request() -> None:
        if (arrival := next(requests, None)) is not None:
            heapq.heappush(events, (arrival, next(order), None, []))

    expect_request()
    while events:
        now, _, machine, done = heapq.heappop(events)
        if machine is None:
            machine = min(rng.sample(cluster, 2), key=lambda one: one.load) if machines > 1 else cluster[0]
            if machine.put(now):
                heapq.heappush(events, (now + delay, next(order), machine, []))  # by then its batch is ready
            else:
                refused += 1
            expect_request()
        elif done:
            latencies.extend(now - arrival for arrival in done)
            machine.finish(len(done))
        while batch := machine.take(now):
            batches.append((now, len(batch)))
            heapq.heappush(events, (now + times(len(batch)), next(order), machine, batch))
    return Simulated(np.array(latencies), tuple(batches), refused)


def highest_rate(times: BatchTimes, p95: float, *, machines: int = 1, gpus: int = 1, seed: int = 0) -> float:
    """Returns the images per second that are answered within `p95` seconds in 95 % of the cases; 0 if a single image takes longer."""
    bound = machines * gpus * times.images_per_second
    least, most = 0.0, 1.0
    for _ in range(STEPS):
        share = (least + most) / 2
        if meets(times, share * bound, p95, machines=machines, gpus=gpus, seed=seed):
            least = share
        else:
            most = share
    return least * bound


def best_limit(times: BatchTimes, p95: float) -> BatchTimes:
    """Returns the times with the batch limit, among the measured sizes, at which one GPU serves most. A full batch may take too long."""
    return max((times.up_to(images) for images in times.images), key=lambda one: highest_rate(one, p95))


def meets(times: BatchTimes, rate: float, p95: float, *, machines: int = 1, gpus: int = 1, seed: int = 0) -> bool:
    """Returns True if `rate` images per second are served within `p95`. The first half of the answers is left out: queues fill up first."""
    seconds = max(20 * p95, min(100 * p95, IMAGES / rate))
    found = simulate(poisson(rate, seconds, seed), times, machines=machines, gpus=gpus, seed=seed)
    settled = found.latencies[len(found.latencies) // 2 :]
    return bool(np.percentile(settled, 95) <= p95) and found.refused_share <= REFUSED


def gpus_for(times: BatchTimes, rate: float, p95: float, per_machine: int, seed: int = 0) -> int | None:
    """Returns the smallest number of GPUs that serves `rate` images per second within `p95`; None if one image takes longer.

    Up to `per_machine` GPUs share one queue; beyond that whole machines are added.
    """
    if times(1) + DELAY > p95:
        return None

    def enough(machines: int, gpus: int) -> bool:
        return meets(times, rate, p95, machines=machines, gpus=gpus, seed=seed)

    needed = max(int(np.ceil(rate / times.images_per_second)), 1)
    if needed <= per_machine:
        for gpus in range(needed, per_machine + 1):
            if enough(1, gpus):
                return gpus
    machines = max(-(-needed // per_machine), 2)
    while not enough(machines, per_machine):
        machines += max(machines // 50, 1)
    return machines * per_machine


# --- measurements


@dataclass(frozen=True)
class Workload:
    """A model with its measured batch times and energy."""

    hardware: str
    model: str
    size: tuple[int, int]
    method: str
    quantize: str | None
    times: BatchTimes
    joules_per_image: float | None

    @property
    def name(self) -> str:
        return f"{self.model}, {SHOWN.get(self.method, self.method)}" + (f", {self.quantize}" if self.quantize else "")


def workloads(rows: Sequence[Row]) -> list[Workload]:
    """Returns end-to-end measurements of CUDA graphs at batch 1 and at least one larger batch; the last row of a case is used."""
    cases: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        if row["benchmark"] == "bench" and row.get("engine") == "graphs" and row.get("end_to_end"):
            case = (row["hardware"], row["model"], tuple(row["size"]), row["method"], row.get("quantize"))
            cases.setdefault(case, {})[row["batch"]] = row
    found = []
    for case, batches in sorted(cases.items(), key=str):
        if len(batches) > 1 and 1 in batches:
            sizes = sorted(batches)
            seconds = tuple(batches[size]["end_to_end"]["median_ms"] / 1000 for size in sizes)
            found.append(Workload(*case, BatchTimes(tuple(sizes), seconds), batches[sizes[-1]].get("joules_per_image")))
    return found


def times_of_load(row: Row) -> BatchTimes:
    """Returns the batch times of a load row.

    Rows without `batch_ms` have two rates: one at a time (with a limit of one image, so that none waits for others) and full batches.
    """
    alone, full = 1 / row["one_at_a_time_per_s"], row["max_batch"] / row["capacity_per_s"]
    known = {int(images): ms / 1000 for images, ms in row.get("batch_ms", {}).items()}
    points = sorted(({1: alone, row["max_batch"]: full} | known).items())
    return BatchTimes(*(tuple(one) for one in zip(*points, strict=True)))


def as_measured(row: Row, seconds: float) -> Simulated:
    """Simulates a load row: `seconds` of the arrivals that the load benchmark drew."""
    arrivals = poisson(row["offered_per_s"], seconds, seed=int(100 * row["rate"]))
    return simulate(arrivals, times_of_load(row), delay=row["batch_delay_ms"] / 1000, max_queue=row["max_queue"])


# --- tables


def agreement_table(rows: Sequence[Row], seconds: float = 5.0) -> str:
    """Returns measured against simulated load. Rows with padded batches are left out."""
    loads = [row for row in rows if row["benchmark"] == "load" and row["hardware"] != "CPU x86_64" and not row.get("same_images")]
    pairs = [(row, as_measured(row, seconds)) for row in loads]

    def both(measured: Callable[[Row], float], simulated: Callable[[Simulated], float]) -> Callable[[tuple[Row, Simulated]], str]:
        return lambda pair: f"{measured(pair[0]):.3g} / {simulated(pair[1]):.3g}"

    columns = (
        Column("offered, of capacity", lambda pair: f"{pair[0]['rate']:g}x"),
        Column("p50, ms", both(lambda row: row["p50_ms"], lambda found: 1000 * found.percentile(50))),
        Column("p95, ms", both(lambda row: row["p95_ms"], lambda found: 1000 * found.percentile(95))),
        Column("mean batch", both(lambda row: row["mean_batch"], lambda found: found.mean_batch)),
        Column("refused", both(lambda row: row["answers"].get("429", 0), lambda found: found.refused)),
    )
    return table_of(columns, pairs)


def capacity_table(found: Sequence[Workload], p95: float, machines: int, gpus: int) -> str:
    """Returns images per second at a p95 for one GPU, one machine and a cluster, and energy, at the best batch limit of each."""
    columns = (
        Column("model, method, format", lambda one: one.name, "l"),
        Column("one image, ms", lambda one: f"{1000 * one.times(1):.0f}"),
        Column("`--max-batch`", lambda one: f"{one.times.max_batch}"),
        Column("1 GPU, images/s", lambda one: f"{highest_rate(one.times, p95):.1f}"),
        Column(f"{gpus} GPUs", lambda one: f"{highest_rate(one.times, p95, gpus=gpus):.0f}"),
        Column(f"{machines * gpus:,} GPUs", lambda one: f"{highest_rate(one.times, p95, machines=machines, gpus=gpus):,.0f}"),
        Column("Wh per 1,000 images", lambda one: f"{one.joules_per_image / 3.6:.0f}" if one.joules_per_image else ""),
    )
    tuned = [replace(one, times=best_limit(one.times, p95)) for one in found]
    return table(*heads_of(columns), [[column.cell(one) for column in columns] for one in tuned])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only this model")
    parser.add_argument("--rate", type=float, help="images per second: print the GPUs that they need instead of the tables")
    parser.add_argument("--p95", type=float, default=2.0, help="seconds in which 95 %% of the requests are answered")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per machine")
    parser.add_argument("--machines", type=int, default=125)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = read_rows(arguments.results)
    found = [one for one in workloads(rows) if arguments.model in (None, one.model)]
    if arguments.rate is not None:
        for one in found:
            needed = gpus_for(best_limit(one.times, arguments.p95), arguments.rate, arguments.p95, arguments.gpus)
            print(f"{one.name}: " + ("one image takes longer than --p95" if needed is None else f"{needed} x {one.hardware}"))
        return
    print(agreement_table(rows))
    print(capacity_table(found, arguments.p95, arguments.machines, arguments.gpus))


if __name__ == "__main__":
    main()
