"""The door for jobs: any thread submits, one worker per device generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import SettingError, ShuttingDown, UnknownModel
from ..validation import is_int, is_number
from .jobs import Handle, Job, Task
from .queue import Waiting
from .throughput import Throughput
from .worker import BatchRecord, GeneratesImages, Worker

JOIN_SECONDS = 5.0  # what a worker gets to leave its stage when the batcher closes


def measures_nothing(record: BatchRecord) -> None:
    pass


def require_batching(max_batch: int, batch_delay: float, max_queue: int) -> None:
    """Raises SettingError for values that a Batcher does not take, so that a server can say so before it loads its models."""
    for name, count in (("max_batch", max_batch), ("max_queue", max_queue)):
        if not is_int(count, least=1):
            raise SettingError(f"{name} {count!r}: give a whole number of images, 1 or more")
    if not is_number(batch_delay) or not 0 <= batch_delay < 60:
        raise SettingError(f"batch_delay {batch_delay!r}: give seconds, 0 or more and below 60")


class Batcher:
    """Joins jobs into batches and generates them; an image is the same alone and in any batch, up to the rounding of the device.

    devices: for every device its pipelines by model name; each gets a worker of its own.
    max_batch: images of a batch. batch_delay: seconds for which the first image of a batch waits for others where the device is free.
    max_queue: images that may wait; further jobs are refused with Overloaded, which says when to come back.
    on_batch: called on the worker's thread after every batch, and must return at once.
    same_images: images are the same alone and in any batch bit for bit, on a GPU too, where products of another shape round differently.
        Every batch is filled up to `max_batch` with copies of its last image, which are dropped; texts are encoded one by one; requests
        are captured when they first come. So an image alone takes as long as a full batch. Once memory has run out, batches are
        filled up to the lowered limit, and an image may differ from what it was before. Where shapes depend on what the images or
        texts are (thresholds; on a GPU texts of more than 128 tokens, and what runs eagerly), rounding depends on the company still.
    """

    def __init__(
        self,
        devices: Sequence[Mapping[str, GeneratesImages]],
        *,
        max_batch: int = 8,
        batch_delay: float = 0.005,
        max_queue: int = 64,
        on_batch: Callable[[BatchRecord], None] = measures_nothing,
        same_images: bool = False,
    ) -> None:
        require_batching(max_batch, batch_delay, max_queue)
        if not devices or not all(devices):
            raise SettingError("no pipelines: give for each device a mapping from model names to pipelines")
        self._models = frozenset(model for pipelines in devices for model in pipelines)
        self._throughput = Throughput(len(devices))
        self._waiting = Waiting(max_batch, batch_delay, max_queue, self._throughput)
        self._handles: set[Handle] = set()  # of jobs that are not over
        self._workers = [
            Worker(f"nextscale-worker-{number}", pipelines, self._waiting, self._throughput, on_batch, same_images)
            for number, pipelines in enumerate(devices)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, job: Job) -> Handle:
        """Overloaded where too much waits, ShuttingDown after `drain` or `close`."""
        if job.model not in self._models:
            raise UnknownModel(f"no pipeline for model {job.model!r}; there are {', '.join(sorted(self._models))}")
        handle, now = Handle(job), time.monotonic()
        self._handles.add(handle)
        handle.future.add_done_callback(lambda _: self._over(handle))
        try:
            self._waiting.put([Task(handle, position, now) for position in range(len(job.seeds))])
        except BaseException:
            self._handles.discard(handle)
            raise
        return handle

    def _over(self, handle: Handle) -> None:
        self._handles.discard(handle)
        self._waiting.wake()

    def drain(self, seconds: float | None = None) -> bool:
        """Takes nothing more and finishes what was accepted; whether that was possible in so many seconds."""
        self._waiting.shut()
        return self._waiting.wait_empty(seconds)

    def close(self) -> bool:
        """Gives up everything: jobs that are not done fail with ShuttingDown. Whether all workers have gone."""
        self._waiting.close()
        for handle in list(self._handles):
            handle.fail(ShuttingDown("the server shut down before these images were ready: ask again"))
        ends = time.monotonic() + JOIN_SECONDS
        for worker in self._workers:
            worker.join(max(ends - time.monotonic(), 0))
        return not any(worker.is_alive() for worker in self._workers)

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Images that wait."""
        return self._waiting.waiting

    @property
    def running(self) -> int:
        """Images that are being generated."""
        return self._waiting.running

    @property
    def draining(self) -> bool:
        return not self._waiting.open

    @property
    def images_per_second(self) -> float | None:
        """The rate of recent batches, while workers were busy; None before the first."""
        return self._throughput.images_per_second

    @property
    def broken(self) -> bool:
        """Whether a device has failed for good, so that only a new process helps."""
        return any(worker.broken for worker in self._workers)
