"""Jobs, and handles that return their images or cancel them."""

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from PIL import Image
from torch import Tensor

from ..edit_inputs import EditInputs
from ..errors import DeadlinePassed, JobCancelled
from ..report import Report
from ..validation import is_hashable, require

Prompt = str | int  # text, or a class number


@dataclass(frozen=True, eq=False)
class GeneratedImage:
    """Finished image of a job, with the report of its batch."""

    image: Image.Image
    seed: int
    report: Report
    batch: int  # number of images generated together
    prompt_tokens: int
    queue_seconds: float
    masks: tuple[Tensor, ...] | None = None  # per stage [h, w], where the job asked for compute masks


@dataclass(frozen=True, eq=False)
class Partial:
    """Image of a job, decoded after a stage."""

    position: int  # of the image in its job
    stage: int
    image: Image.Image


@dataclass(frozen=True, eq=False)
class Job:
    """Images with common settings, one for each seed.

    settings: further arguments of the pipeline's call. Jobs share a batch if these are equal and hashable.
    partial_stages: stages after which `watch` gets a decoded canvas. `watch` also gets every finished image; it is called on the worker's
        thread and must return at once.
    deadline: time by `time.monotonic()` after which the job fails with DeadlinePassed.
    """

    model: str
    prompt: Prompt
    seeds: tuple[int, ...]
    negative: Prompt | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    partial_stages: frozenset[int] = frozenset()
    watch: Callable[[Partial | tuple[int, GeneratedImage]], None] | None = None
    deadline: float | None = None
    source: EditInputs | None = None  # a single image that is edited

    def __post_init__(self) -> None:
        require(self.seeds, "seeds", "one int per image", self.seeds)

    @property
    def key(self) -> Hashable:
        """Key of jobs that can share a batch; a job whose settings cannot be hashed runs alone."""
        settings = tuple(sorted(self.settings.items(), key=lambda item: item[0]))
        key = (self.model, self.negative is None, settings, None if self.source is None else self.source.key)
        return key if is_hashable(key) else id(self)


class Handle:
    """Submitted job, whose images can be waited for or canceled."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[list[GeneratedImage]] = Future()
        self._images: dict[int, GeneratedImage] = {}
        self._lock = Lock()

    def result(self, timeout: float | None = None) -> list[GeneratedImage]:
        """Returns the images in the order of the seeds, or raises the job's error."""
        return self.future.result(timeout)

    def cancel(self) -> None:
        """Stops work on the job before its next stage; does nothing after the end."""
        self.fail(JobCancelled("the job was canceled"))

    @property
    def over(self) -> bool:
        """True if the job has finished, failed, expired or been canceled."""
        return self.future.done()

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # another thread may have ended it
            self.future.set_exception(error)

    def expire(self, now: float) -> None:
        if self.job.deadline is not None and now >= self.job.deadline and not self.over:
            self.fail(DeadlinePassed("the images were not ready before the deadline. Try again later, or request fewer or smaller images."))

    def deliver(self, position: int, image: GeneratedImage) -> None:
        """Adds an image; the last one ends the job."""
        self.show((position, image))
        with self._lock:
            self._images[position] = image
            complete = len(self._images) == len(self.job.seeds)
        if complete:
            with suppress(InvalidStateError):
                self.future.set_result([self._images[position] for position in range(len(self.job.seeds))])

    def show(self, event: Partial | tuple[int, GeneratedImage]) -> None:
        """Calls `watch`; an error in it fails this job only."""
        if self.job.watch is None or self.over:
            return
        try:
            self.job.watch(event)
        except Exception as error:
            self.fail(error)


@dataclass(eq=False)
class Task:
    """One image of a job, as a unit of work."""

    handle: Handle
    position: int
    queued: float  # by time.monotonic()
    shown: set[int] = field(default_factory=set)  # stages whose partial image has been sent; a second attempt does not repeat them

    @property
    def job(self) -> Job:
        return self.handle.job

    @property
    def seed(self) -> int:
        return self.job.seeds[self.position]

    @property
    def alive(self) -> bool:
        return not self.handle.over
