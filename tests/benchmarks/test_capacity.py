"""The simulated batcher starts the batches of the real queue and agrees with the measured load."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.capacity import (
    BatchTimes,
    as_measured,
    capacity_table,
    gpus_for,
    highest_rate,
    poisson,
    simulate,
    times_of_load,
    workloads,
)
from benchmarks.results import RESULTS
from nextscale.batching import Job
from nextscale.batching.jobs import Handle, Task
from nextscale.batching.queue import JobQueue, Throughput
from nextscale.errors import Overloaded
from nextscale.eval.results import read_rows

TIMES = BatchTimes((1, 4), (0.010, 0.022))


def real_queue(arrivals: list[float], times: BatchTimes, delay: float, max_queue: int) -> tuple[list[tuple[float, int]], int]:
    """Plays the arrivals into a JobQueue with one worker; returns the start and size of each batch, and the number of refused requests."""
    now, free_at, refused = 0.0, 0.0, 0
    queue = JobQueue(times.max_batch, delay, max_queue, Throughput(1), clock=lambda: now)
    batches: list[tuple[float, int]] = []
    left = list(arrivals)
    while left or queue.waiting:
        key, wait = queue._ready(["model"]) if now >= free_at else (None, free_at - now)
        if key is not None:
            batch = queue.take(["model"])
            assert batch is not None
            batches.append((now, len(batch)))
            queue.finished(batch)
            free_at = now + times(len(batch))
            continue
        step = wait if queue.waiting or now < free_at else math.inf
        if left and left[0] <= now + step:
            now = left.pop(0)
            try:
                queue.put([Task(Handle(Job("model", "a prompt", (0,))), 0, now)])
            except Overloaded:
                refused += 1
        else:
            now += step
    return batches, refused


@pytest.mark.parametrize(("rate", "max_queue"), [(20, 100), (120, 100), (400, 10)])
def test_batches_start_as_those_of_the_real_queue(rate: float, max_queue: int) -> None:
    arrivals = list(poisson(rate, 2.0, seed=3))
    found = simulate(arrivals, TIMES, delay=0.005, max_queue=max_queue)
    batches, refused = real_queue(arrivals, TIMES, delay=0.005, max_queue=max_queue)
    assert [images for _, images in found.batches] == [images for _, images in batches]
    np.testing.assert_allclose([start for start, _ in found.batches], [start for start, _ in batches], atol=1e-9)
    assert found.refused == refused
    assert (refused > 0) == (max_queue == 10)
    assert len(found.latencies) + found.refused == len(arrivals)


def test_agrees_with_the_load_benchmark_at_half_load() -> None:
    rows = [row for row in read_rows(RESULTS) if row["benchmark"] == "load" and row["hardware"] == "NVIDIA H200" and row["rate"] == 0.5]
    rows = [row for row in rows if not row.get("same_images")]
    assert rows
    for row in rows:
        found = as_measured(row, seconds=5.0)
        assert 1000 * found.percentile(50) == pytest.approx(row["p50_ms"], rel=0.1)
        assert 1000 * found.percentile(95) == pytest.approx(row["p95_ms"], rel=0.1)
        assert found.mean_batch == pytest.approx(row["mean_batch"], rel=0.1)
        assert len(found.latencies) / row["seconds"] == pytest.approx(row["images_per_s"], rel=0.1)


def test_measured_batch_times_come_before_the_two_rates() -> None:
    row = {"one_at_a_time_per_s": 100, "max_batch": 4, "capacity_per_s": 200}
    assert times_of_load(row)(2) == pytest.approx(0.010 + 0.010 / 3)
    assert times_of_load(row | {"batch_ms": {"2": 12.0, "4": 21.0}})(2) == pytest.approx(0.012)
    assert times_of_load(row | {"batch_ms": {"2": 12.0, "4": 21.0}})(4) == pytest.approx(0.021)


def test_an_idle_server_answers_after_the_delay_and_one_image() -> None:
    found = simulate([0.0, 1.0, 2.0], TIMES, delay=0.005)
    np.testing.assert_allclose(found.latencies, 0.015)


def test_more_gpus_serve_more() -> None:
    one, machine = highest_rate(TIMES, 0.05), highest_rate(TIMES, 0.05, gpus=4)
    cluster = highest_rate(TIMES, 0.05, machines=4, gpus=4)
    assert 0 < one < TIMES.images_per_second
    assert machine > 4 * one  # a shared queue waits less
    assert 3.5 * machine < cluster < 16 * TIMES.images_per_second


def test_the_number_of_gpus_serves_the_rate_and_one_less_does_not() -> None:
    needed = [gpus_for(TIMES, rate, 0.05, per_machine=4) for rate in (50, 300, 600, 3000)]
    assert needed[0] == 1
    assert all(one is not None and other is not None and one <= other for one, other in pairwise(needed))
    assert needed[3] is not None and needed[3] % 4 == 0 and needed[3] * TIMES.images_per_second > 3000
    assert gpus_for(TIMES, 50, 0.012, per_machine=4) is None  # an image alone takes 15 ms


def test_unmeasured_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="images"):
        TIMES(5)


def test_the_table_has_the_measured_models() -> None:
    found = workloads(read_rows(RESULTS))
    dense = next(one for one in found if (one.model, one.method, one.quantize) == ("infinity-2b", "dense", None))
    assert dense.times(1) < dense.times(4) < dense.times(dense.times.max_batch)
    assert "infinity-2b, dense" in capacity_table([dense], p95=4.0, machines=2, gpus=2)
