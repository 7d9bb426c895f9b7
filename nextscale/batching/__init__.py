"""Joins the jobs of many callers into batches, with or without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import ShuttingDown, UnknownModel
from ..validation import is_int, is_number, require
from .jobs import GeneratedImage, Handle, Job, Partial, Task
from .queue import JobQueue, Throughput
from .worker import BatchRecord, GeneratesImages, Worker

__all__ = ["BatchRecord", "Batcher", "GeneratedImage", "GeneratesImages", "Handle", "Job", "Partial"]

JOIN_SECONDS = 5.0  # for workers to leave their stage when the batcher closes


class Batcher:
    """Joins jobs into batches and generates them. An image is the same alone and in any batch, up to the rounding of the device.

    Args:
        devices: one mapping of model names to pipelines per device; each device gets a worker thread.
        max_batch: images per batch.
        batch_delay: maximum seconds that a free device waits for a batch to fill up.
        max_queue: maximum number of queued images. Further jobs raise Overloaded with a retry time.
        on_batch: called on the worker's thread after every batch; must return at once.
        same_images: makes images bit-identical alone and in any batch. On GPUs, matrix products round differently for other batch sizes, so
            every batch is padded to `max_batch` with copies of its last image, texts are encoded one by one, and requests are captured
            at once. A single image takes as long as a full batch. After an out-of-memory error, batches are padded to the lowered limit
            and images may differ. Rounding still depends on the batch if shapes depend on images or texts: with thresholds, and on a GPU
            in eager runs and for texts of more than 128 tokens.
    """

    def __init__(
        self,
        devices: Sequence[Mapping[str, GeneratesImages]],
        *,
        max_batch: int = 8,
        batch_delay: float = 0.005,
        max_queue: int = 64,
        on_batch: Callable[[BatchRecord], None] = lambda _: None,
        same_images: bool = False,
    ) -> None:
        for name, count in (("max_batch", max_batch), ("max_queue", max_queue)):
            require(is_int(count, least=1), name, "an int of at least 1", count)
        require(is_number(batch_delay) and 0 <= batch_delay < 60, "batch_delay", "seconds from 0 to below 60", batch_delay)
        require(devices and all(devices), "devices", "mappings of model names to pipelines, one per device", devices)
        self._models = frozenset(model for pipelines in devices for model in pipelines)
        self._throughput = Throughput(len(devices))
        self._queue = JobQueue(max_batch, batch_delay, max_queue, self._throughput)
        self._handles: set[Handle] = set()  # of unfinished jobs
        self._workers = [
            Worker(f"nextscale-worker-{number}", pipelines, self._queue, self._throughput, on_batch, same_images)
            for number, pipelines in enumerate(devices)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, job: Job) -> Handle:
        """Queues a job. Raises Overloaded if the queue is full, ShuttingDown after `drain` or `close`."""
        if job.model not in self._models:
            raise UnknownModel(f"model must be one of {', '.join(sorted(self._models))}; got {job.model!r}")
        handle, now = Handle(job), time.monotonic()
        self._handles.add(handle)
        handle.future.add_done_callback(lambda _: self._over(handle))
        try:
            self._queue.put([Task(handle, position, now) for position in range(len(job.seeds))])
        except BaseException:
            self._handles.discard(handle)
            raise
        return handle

    def _over(self, handle: Handle) -> None:
        self._handles.discard(handle)
        self._queue.wake()

    def drain(self, seconds: float | None = None) -> bool:
        """Refuses new jobs and finishes accepted ones. Returns False after `seconds`."""
        self._queue.shut()
        return self._queue.wait_empty(seconds)

    def close(self) -> bool:
        """Fails unfinished jobs with ShuttingDown. Returns True if all workers have ended."""
        self._queue.close()
        for handle in list(self._handles):
            handle.fail(ShuttingDown("the server shut down before these images were ready. Send the request again."))
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
        """Number of queued images."""
        return self._queue.waiting

    @property
    def running(self) -> int:
        """Number of images that are being generated."""
        return self._queue.running

    @property
    def images_per_second(self) -> float | None:
        """Rate of recent batches while workers were busy; None before the first batch."""
        return self._throughput.images_per_second

    @property
    def broken(self) -> bool:
        """True if a device has failed for good, so that the process must be restarted."""
        return any(worker.broken for worker in self._workers)
