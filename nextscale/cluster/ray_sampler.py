"""The same run on a Ray cluster: actors generate and encode, and this process alone writes files and manifest.

Ray Data gives batches to actors, restarts those that die and repeats what they had begun. What is done is known from our own files, so a
run whose driver dies goes on as any other, and needs no checkpoint of Ray's. Machines need not share a file system.
"""

from __future__ import annotations

import logging
import math
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from ..errors import MissingExtra, NextscaleError, SettingError
from ..pipeline import Pipeline
from .plan import Batch
from .sampler import Done, Generator, LongestPrompts, OnImages, longest_prompts, missing
from .store import WRITERS, Encoded, Store

LOCAL = "local"
CPUS = 0.5  # per actor: whole ones would leave none to Ray Data's own tasks on a small machine, and it would wait forever
MOST_TASKS = 10_000
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


class Worker:
    """An actor: one pipeline, which is asked for batch after batch."""

    def __init__(
        self, load: Callable[[], Pipeline], settings: Mapping[str, Any], batches: Sequence[Batch], longest: LongestPrompts
    ) -> None:
        self._batches = {batch.number: batch for batch in batches}
        self._generator = Generator(load(), settings)
        self._generator.prepare(batches, longest)
        self._encoders = ThreadPoolExecutor(WRITERS, thread_name_prefix="encode")

    def __call__(self, rows: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
        for number in rows["number"]:
            batch = self._batches[int(number)]
            images = self._generator.output(batch).images[: len(batch.pictures)]
            suffixes = [Path(picture.file).suffix for picture in batch.pictures]
            encoded = list(self._encoders.map(Encoded.of, images, suffixes))
            yield {
                "number": [batch.number] * len(encoded),
                "place": list(range(len(encoded))),
                "content": [image.content for image in encoded],
                "sha256": [image.sha256 for image in encoded],
                "height": [image.size[0] for image in encoded],
                "width": [image.size[1] for image in encoded],
            }


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
    pictures = {(batch.number, place): picture for batch in todo for place, picture in enumerate(batch.pictures)}
    written, untimed, started = 0, 0, 0.0
    with cluster(ray_settings) as data:
        dataset = data.from_items([{"number": batch.number} for batch in todo], override_num_blocks=min(len(todo), MOST_TASKS))
        results = dataset.map_batches(
            Worker,
            batch_size=1,
            fn_constructor_args=(load, settings, mine, longest_prompts(batches)),
            concurrency=workers_for(ray_settings),
            num_cpus=CPUS,
            num_gpus=gpus_per_worker(ray_settings),
        )
        for row in arriving(results):
            picture = pictures[row["number"], row["place"]]
            if picture.file in there:
                continue
            there.add(picture.file)
            store.record(store.write(picture, Encoded(row["content"], row["sha256"], (row["height"], row["width"]))))
            written += 1
            on_images(1)
            if not started:  # actors have loaded their models, and begun
                started, untimed = time.perf_counter(), written
        seconds = time.perf_counter() - started  # before a cluster that was started here ends
    store.arrange(mine)
    return Done(written, len(there) - written, seconds, written - untimed)


def arriving(results: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of a data set; what an actor refuses or dies of is said as it would be without Ray."""
    from ray.exceptions import RayError

    try:
        yield from results.iter_rows()
    except RayError as error:
        raise NextscaleError(f"a Ray actor failed: {reason(str(error))}. What is written is kept: start it again to go on") from error


def reason(text: str) -> str:
    """The error of which Ray shows the whole way: the last line that begins with the name of one."""
    named = re.findall(r"^[\w.]*?(\w+: .+)$", text, re.MULTILINE)
    return str(named[-1] if named else text.partition("\n")[0]).rstrip(".")


@contextmanager
def cluster(settings: RaySettings) -> Iterator[Any]:
    """Ray Data on the cluster."""
    with connected(settings) as ray:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        yield ray.data


def import_ray() -> Any:
    """Ray, with its data sets."""
    try:
        import ray
        import ray.data
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
