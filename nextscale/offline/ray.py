"""The same run on a Ray cluster: actors generate and encode, and this process alone writes files and manifest.

Ray restarts actors that die and repeats what they had begun. What is done is known from our own files, so a run whose driver dies goes on
as any other, and needs no checkpoint of Ray's. Machines need not share a file system.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from ..errors import MissingExtra, NextscaleError, SettingError
from ..pipeline import Pipeline
from ..report import hardware_name
from .plan import Batch
from .sampler import Done, Generator, LongestPrompts, OnImages, longest_prompts, missing
from .store import WRITERS, Encoded, Store

LOCAL = "local"
CPUS = 0.5  # per actor: GPUs of a machine with few cores may be shared by more actors than it has cores
CALLS = 2  # that wait at an actor, so that it generates while the images of the one before are written
DEATHS = 3  # of an actor over one batch; the next one ends the run
LISTENER_SECONDS = 10


@dataclass(frozen=True)
class RaySettings:
    """Where a run goes, and how many actors do it."""

    address: str = LOCAL  # "local" starts a cluster on this machine; "auto", or what `ray start` says
    workers: int | None = None  # actors; None: as many as the cluster's GPUs have room for, without GPUs one
    gpus: float = 1.0  # of each actor, where there are any; 0.25 puts four small models on a GPU

    def __post_init__(self) -> None:
        if not 0 < self.gpus < math.inf or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise SettingError(f"GPUs per worker {self.gpus}: give a share of one, such as 0.25, or 1")


@dataclass(frozen=True)
class Job:
    """The part of a run that all its batches share."""

    load: Callable[[], Pipeline]
    settings: Mapping[str, Any]
    shapes: Sequence[Batch]  # one of each shape
    longest: LongestPrompts


class Worker:
    """An actor: one pipeline, which is asked for batch after batch.

    Its constructor takes nothing, and calls take the job from the object store: Ray keeps the arguments of calls for retries, but may lose
    those of constructors, and an actor that lost them cannot be restarted.
    """

    def __init__(self) -> None:
        self._generator: Generator | None = None
        self._device = ""
        self._encoders = ThreadPoolExecutor(WRITERS, thread_name_prefix="encode")

    def generator(self, job: Job) -> Generator:
        if self._generator is None:
            pipeline = job.load()
            self._device = hardware_name(pipeline.model.device)
            generator = Generator(pipeline, job.settings)
            generator.prepare(job.shapes, job.longest)
            self._generator = generator
        return self._generator

    def begin(self, job: Job) -> None:
        self.generator(job)

    def images(self, job: Job, batch: Batch) -> tuple[str, list[Encoded]]:
        """Returns the name of the device and the images of the batch's pictures."""
        images = self.generator(job).output(batch).images[: len(batch.pictures)]
        return self._device, list(self._encoders.map(Encoded.of, images, [Path(picture.file).suffix for picture in batch.pictures]))


def sample_on_ray(
    load: Callable[[], Pipeline],
    settings: Mapping[str, Any],
    batches: Sequence[Batch],
    store: Store,
    ray_settings: RaySettings,
    on_images: OnImages = lambda _: None,
) -> Done:
    """Generates what is not there, on the actors of a cluster. They are sent `load` and `settings`: weights lie under the same paths."""
    there = store.verified(batches)
    on_images(len(there))
    mine = store.shard.part(batches)
    todo = missing(mine, there)
    if not todo:
        return Done(0, len(there), 0.0, 0)
    shapes = [*{(batch.schedule, batch.images): batch for batch in mine}.values()]
    written, untimed, started = 0, 0, 0.0
    with connected(ray_settings) as ray:
        job = Job(load, settings, shapes, longest_prompts(batches))
        for batch, (device, images) in arriving(ray, ray_settings, job, todo):
            chosen = [(picture, image) for picture, image in zip(batch.pictures, images, strict=True) if picture.file not in there]
            for picture, image in chosen:
                store.record(store.write(picture, image, device=device))
            written += len(chosen)
            on_images(len(chosen))
            if not started:  # actors have loaded their models, and begun
                started, untimed = time.perf_counter(), written
        seconds = time.perf_counter() - started  # before a cluster that was started here ends
    store.arrange(mine)
    return Done(written, len(there), seconds, written - untimed)


def arriving(ray: Any, settings: RaySettings, job: Job, todo: Sequence[Batch]) -> Iterator[tuple[Batch, tuple[str, list[Encoded]]]]:
    """Yields batches with what actors made of them, as it comes. An actor is asked first when it runs: some may wait for machines.

    Raises NextscaleError for what an actor refuses or dies of.
    """
    actor = ray.remote(num_cpus=CPUS, num_gpus=gpus_per_worker(settings), max_restarts=-1, max_task_retries=DEATHS)(Worker)
    kept, waiting, left = ray.put(job), deque(todo), len(todo)
    asked: dict[Any, tuple[Any, Batch | None]] = {}
    for _ in range(min(workers_for(settings), left)):
        worker = actor.remote()
        asked |= {worker.begin.remote(kept): (worker, None) for _ in range(CALLS)}
    while left:
        (answered,), _ = ray.wait([*asked])
        worker, batch = asked.pop(answered)
        if waiting:
            following = waiting.popleft()
            asked[worker.images.remote(kept, following)] = worker, following
        try:
            made = ray.get(answered)
        except ray.exceptions.RayError as error:
            raise NextscaleError(f"a Ray actor failed: {reason(str(error))}. What is written is kept: start it again to go on") from error
        if batch is not None:
            left -= 1
            yield batch, made


def reason(text: str) -> str:
    """The error of which Ray shows the whole way: the last line that begins with the name of one."""
    named = re.findall(r"^[\w.]*?(\w+: .+)$", text, re.MULTILINE)
    return str(named[-1] if named else text.partition("\n")[0]).rstrip(".")


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(f"--ray needs Ray ({error}): pip install 'nextscale[ray]'") from error
    return ray


@contextmanager
def connected(settings: RaySettings) -> Iterator[Any]:
    """Ray, on the cluster; one that was started here ends here."""
    ray = import_ray()
    mine = not ray.is_initialized()
    if mine:
        try:
            require_listener(settings.address)
            dashboard = False if settings.address == LOCAL else None
            with own_sigterm():
                ray.init(address=settings.address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            raise NextscaleError(
                f"no Ray cluster at {settings.address!r} ({str(error).splitlines()[0]}): start one with `ray start --head`, or give {LOCAL}"
            ) from error
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Leaves SIGTERM to this program: Ray takes it for itself, shows where its threads are and aborts."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if current_thread() is main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def require_listener(address: str) -> None:
    """OSError where nothing listens at HOST:PORT: Ray would try for minutes."""
    if match := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address):
        socket.create_connection((match[1], int(match[2])), timeout=LISTENER_SECONDS).close()


def gpus_per_worker(settings: RaySettings) -> float:
    import ray

    return settings.gpus if ray.cluster_resources().get("GPU", 0) else 0


def workers_for(settings: RaySettings) -> int:
    import ray

    if settings.workers is not None:
        return settings.workers
    share = gpus_per_worker(settings)
    return max(1, int(ray.cluster_resources()["GPU"] / share)) if share else 1
