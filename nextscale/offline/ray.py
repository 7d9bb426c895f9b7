"""Generates a run on a Ray cluster: actors generate and encode, and only this process writes files and the manifest.

Ray restarts actors that die and repeats their calls. A run whose driver dies resumes from its files, as any other run does. The machines
do not need a shared file system.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..batching.ray_cluster import CPUS, RaySettings, connected
from ..device import hardware_name
from ..errors import NextscaleError
from ..pipeline import Pipeline
from .plan import Batch
from .sampler import Done, Generator, LongestPrompts, OnImages, longest_prompts, missing
from .store import WRITERS, Encoded, Store

CALLS = 2  # queued per actor, which generates while the previous images are written
RETRIES = 3  # of a call whose actor dies; then the run ends


@dataclass(frozen=True)
class Job:
    """Shared part of all batches of a run."""

    load: Callable[[], Pipeline]
    settings: Mapping[str, Any]
    shapes: Sequence[Batch]  # one of each shape
    longest: LongestPrompts


class Worker:
    """Ray actor with one pipeline.

    Its calls take the job from the object store, since Ray keeps arguments of calls for retries but may lose arguments of constructors.
    An actor without its arguments cannot be restarted.
    """

    def __init__(self) -> None:
        self._generator: Generator | None = None
        self._device = ""
        self._encoders = ThreadPoolExecutor(WRITERS, thread_name_prefix="encode")

    def images(self, job: Job, batch: Batch | None) -> tuple[str, list[Encoded]]:
        """Returns the name of the device and the images of the batch's pictures. Without a batch, only loads the pipeline."""
        if self._generator is None:
            pipeline = job.load()
            self._device = hardware_name(pipeline.model.device)
            generator = Generator(pipeline, job.settings)
            generator.prepare(job.shapes, job.longest)
            self._generator = generator
        if batch is None:
            return self._device, []
        images = self._generator.output(batch).images[: len(batch.pictures)]
        return self._device, list(self._encoders.map(Encoded.of, images, [Path(picture.file).suffix for picture in batch.pictures]))


def sample_on_ray(
    load: Callable[[], Pipeline],
    settings: Mapping[str, Any],
    batches: Sequence[Batch],
    store: Store,
    ray_settings: RaySettings,
    on_images: OnImages = lambda _: None,
) -> Done:
    """Generates the missing images on a cluster, whose actors call `load`: weights need the same paths on all machines."""
    there, mine, todo = missing(batches, store, on_images)
    if not todo:
        return Done(0, len(there), 0.0, 0)
    job = Job(load, settings, [*{(batch.schedule, batch.images): batch for batch in mine}.values()], longest_prompts(batches))
    written, untimed, started = 0, 0, 0.0
    with connected(ray_settings) as ray:
        for batch, (device, images) in arriving(ray, ray_settings, job, todo):
            for picture, image in zip(batch.pictures, images, strict=True):
                if picture.file not in there:
                    store.record(store.write(picture, image, device=device))
                    written += 1
                    on_images(1)
            if not started:  # the first batch: its model is loaded
                started, untimed = time.perf_counter(), written
        seconds = time.perf_counter() - started  # without the shutdown of a local cluster
    store.arrange(mine)
    return Done(written, len(there), seconds, written - untimed)


def arriving(ray: Any, settings: RaySettings, job: Job, todo: Sequence[Batch]) -> Iterator[tuple[Batch, tuple[str, list[Encoded]]]]:
    """Yields batches with their images, in any order. Only running actors get batches, since others may still wait for machines."""
    actor = ray.remote(num_cpus=CPUS, num_gpus=settings.share(ray), max_restarts=-1, max_task_retries=RETRIES)(Worker)
    kept, waiting, left = ray.put(job), deque(todo), len(todo)
    workers = [actor.remote() for _ in range(min(settings.count(ray), left))]
    asked: dict[Any, tuple[Any, Batch | None]] = {worker.images.remote(kept, None): (worker, None) for worker in workers * CALLS}
    while left:
        (answered,), _ = ray.wait([*asked])
        worker, batch = asked.pop(answered)
        if waiting:
            following = waiting.popleft()
            asked[worker.images.remote(kept, following)] = worker, following
        try:
            made = ray.get(answered)
        except ray.exceptions.RayError as error:
            lines = re.findall(r"^[\w.]*?(\w+: .+)$", str(error), re.MULTILINE)  # Ray shows the whole stack; the last error is the cause
            cause = (lines[-1] if lines else str(error).partition("\n")[0]).rstrip(".")
            raise NextscaleError(f"a Ray actor failed: {cause}. Written images are kept. Start the run again to continue.") from error
        if batch is not None:
            left -= 1
            yield batch, made
