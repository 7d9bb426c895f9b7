"""What callers submit, and the handle by which they get their images or leave."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from PIL import Image
from torch import Tensor

from ..errors import DeadlinePassed, JobCancelled, SettingError
from ..report import Report

Prompt = str | int  # text, or a class number


@dataclass(frozen=True, eq=False)
class GeneratedImage:
    """One image of a job. The report is that of the batch in which it was generated."""

    image: Image.Image
    seed: int
    report: Report
    batch: int  # images that were generated together
    prompt_tokens: int
    queue_seconds: float
    masks: tuple[Tensor, ...] | None = None  # per stage [h, w], where the job asked for compute masks


@dataclass(frozen=True, eq=False)
class Partial:
    """An image of a job as it is after a stage."""

    position: int  # of the image in its job
    stage: int
    image: Image.Image


@dataclass(frozen=True, eq=False)
class Job:
    """Images with common settings, one for each seed.

    settings: further arguments of the pipeline's call, with values that can be hashed; jobs join a batch where these are equal.
    partial_stages: stages after which `watch` sees a decode of the canvas. `watch` also sees every image as it is finished; it is called
        on the worker's thread and must return at once.
    deadline: by `time.monotonic()`; what is not ready by then fails with DeadlinePassed.
    """

    model: str
    prompt: Prompt
    seeds: tuple[int, ...]
    negative: Prompt | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    partial_stages: frozenset[int] = frozenset()
    watch: Callable[[Partial | tuple[int, GeneratedImage]], None] | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not self.seeds:
            raise SettingError("a job has no seeds: give one for each image")

    @property
    def key(self) -> Hashable:
        """Jobs with equal keys can share a batch. What cannot be compared runs alone."""
        key = (self.model, self.negative is None, tuple(sorted(self.settings.items(), key=lambda item: item[0])))
        try:
            hash(key)
        except TypeError:
            return id(self)
        return key


class Handle:
    """A submitted job: `result` waits for its images, `cancel` gives them up."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[list[GeneratedImage]] = Future()
        self._images: dict[int, GeneratedImage] = {}
        self._lock = Lock()

    def result(self, timeout: float | None = None) -> list[GeneratedImage]:
        """The images in the order of the seeds, or the error that kept them from being generated."""
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Work on the job stops before its next stage. Nothing happens where it is over."""
        self.fail(JobCancelled("the job was cancelled by whoever submitted it"))

    @property
    def over(self) -> bool:
        """Whether nobody waits any more: finished, failed, cancelled or late."""
        return self.future.done()

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # it may be over already, by another thread
            self.future.set_exception(error)

    def expire(self, now: float) -> None:
        if self.job.deadline is not None and now >= self.job.deadline and not self.over:
            self.fail(DeadlinePassed("the images were not ready before the deadline: try again when less is going on, or ask for less"))

    def deliver(self, position: int, image: GeneratedImage) -> None:
        """One image; the last of them ends the job."""
        self.show((position, image))
        with self._lock:
            self._images[position] = image
            complete = len(self._images) == len(self.job.seeds)
        if complete:
            with suppress(InvalidStateError):
                self.future.set_result([self._images[position] for position in range(len(self.job.seeds))])

    def show(self, event: Partial | tuple[int, GeneratedImage]) -> None:
        """A `watch` that raises ends its own job, and no other of the batch."""
        if self.job.watch is None or self.over:
            return
        try:
            self.job.watch(event)
        except Exception as error:
            self.fail(error)


@dataclass(eq=False)
class Task:
    """One image of a job on its way: what batches consist of."""

    handle: Handle
    position: int
    queued: float  # by time.monotonic()
    shown: set[int] = field(default_factory=set)  # stages whose partial image has been sent, which a second attempt does not repeat

    @property
    def job(self) -> Job:
        return self.handle.job

    @property
    def seed(self) -> int:
        return self.job.seeds[self.position]

    @property
    def alive(self) -> bool:
        return not self.handle.over
