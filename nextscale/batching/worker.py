"""Runs batches on one device in a thread. A batch that fails or runs out of memory is halved until only the failing image is left."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from ..edit_inputs import EditInputs
from ..errors import NextscaleError, OutOfMemory, PromptError
from ..report import Report
from ..text import TextFeatures
from ..text.prompts import PromptReader
from .jobs import GeneratedImage, Job, Partial, Prompt, Task
from .queue import JobQueue, Throughput

log = logging.getLogger(__name__)


class GeneratesImages(Protocol):
    """Interface that a worker needs from a pipeline."""

    reader: PromptReader

    def edit(self, image: EditInputs, prompt: Any, *, seed: Any, **settings: Any) -> Any: ...

    def __call__(self, prompt: Any, *, seed: Any, negative: Any, on_stage: Callable[[Any], None], **settings: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class BatchRecord:
    """Result of a batch, for metrics."""

    model: str
    images: int
    seconds: float
    queue_seconds: tuple[float, ...]  # of each image
    report: Report | None = None  # None if the batch failed or was abandoned
    error: Exception | None = None


class Abandoned(Exception):
    """Raised inside `on_stage` to leave the pipeline once all jobs of the batch have ended."""


class Worker(Thread):
    def __init__(
        self,
        name: str,
        pipelines: Mapping[str, GeneratesImages],
        queue: JobQueue,
        throughput: Throughput,
        on_batch: Callable[[BatchRecord], None],
        same_images: bool,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._pipelines, self._queue, self._throughput, self._on_batch = pipelines, queue, throughput, on_batch
        self._same_images = same_images
        self.broken = False  # True after an unrecoverable CUDA error: the process must be restarted

    def run(self) -> None:
        while (tasks := self._queue.take(self._pipelines)) is not None:
            try:
                self._generate(tasks)
            except Exception as error:  # a bug here: callers get an answer, and the worker continues
                log.error("the worker failed", exc_info=error)
                for task in tasks:
                    task.handle.fail(without_frames(error))
            finally:
                self._queue.finished(tasks)
            del tasks  # images are not kept until the next batch

    def _generate(self, tasks: Sequence[Task]) -> None:
        """Gives every task its image or its error."""
        tasks = [task for task in tasks if task.alive]
        if not tasks:
            return
        key = tasks[0].job.key
        images = self._queue.limit(key) if self._same_images else len(tasks)
        part = images  # the limit may be lower than when they were taken
        if len(tasks) <= images:
            error = self._attempt(tasks, images)
            if error is None:
                return
            # Outside of the `except` block, so that the memory of the failed attempt is free.
            ran_out = isinstance(error, OutOfMemory)
            part = (images if ran_out else len(tasks)) // 2
            if ran_out and torch.cuda.is_available():
                torch.cuda.empty_cache()
            if not part:
                tasks[0].handle.fail(error)
                return
            if ran_out:
                self._queue.lower_limit(key, part)
        self._generate(tasks[:part])
        self._generate(tasks[part:])

    def _attempt(self, tasks: Sequence[Task], images: int) -> Exception | None:
        """Returns the error of the batch, or None. Runs `images` images; extra ones pad the batch."""
        job, begun, run = tasks[0].job, time.monotonic(), [*tasks, *[tasks[-1]] * (images - len(tasks))]
        waited = tuple(begun - task.queued for task in tasks)
        results: list[GeneratedImage] = []
        report = failure = None
        try:
            pipeline = self._pipelines[job.model]
            read = partial(read_alone, pipeline.reader) if self._same_images else list
            prompts = read([task.job.prompt for task in run])
            sources = [task.job.source for task in run if task.job.source is not None]
            call = partial(pipeline.edit, EditInputs.joined(sources)) if sources else pipeline
            output = call(
                prompts,
                seed=[task.seed for task in run],
                negative=None if job.negative is None else read([task.job.negative for task in run]),
                on_stage=StageWatcher(tasks, self._queue),
                # captures at once, since the shapes of eager requests depend on their texts
                **(dict(job.settings) | ({"warmup": True} if self._same_images else {})),
            )
            without = without_fillers(output.report, len(tasks), images)
            results = generated(output, without, tasks, prompt_tokens(pipeline.reader, prompts), waited)
            report = without
        except Abandoned:
            pass
        except Exception as error:
            self._log(error, job, len(tasks))
            failure = without_frames(error)
        seconds = time.monotonic() - begun
        if report is not None:
            self._throughput.add(len(tasks), seconds)
        try:
            self._on_batch(BatchRecord(job.model, len(tasks), seconds, waited, report, failure))
        except Exception as error:
            log.error("a batch could not be recorded", exc_info=error)
        for task, image in zip(tasks, results, strict=False):
            task.handle.deliver(task.position, image)
        return failure

    def _log(self, error: Exception, job: Job, images: int) -> None:
        """Logs an error, with a traceback unless it is one of ours. Prompts are not logged."""
        if not isinstance(error, NextscaleError):
            log.error("a batch of %d image(s) of %s failed", images, job.model, exc_info=error)
            self.broken |= isinstance(error, RuntimeError) and "CUDA error" in str(error)
        elif not isinstance(error, PromptError):
            log.warning("a batch of %d image(s) of %s failed: %s", images, job.model, error)


class StageWatcher:
    """Callback of the stages: stops a batch whose jobs have all ended, and sends partial images."""

    def __init__(self, tasks: Sequence[Task], queue: JobQueue) -> None:
        self._tasks, self._queue = tasks, queue
        self._previous: torch.cuda.Event | None = None

    def __call__(self, preview: Any) -> None:
        self._keep_in_step(preview.latent)
        self._queue.expire()
        for task in self._tasks:
            task.handle.expire(time.monotonic())
        if not any(task.alive for task in self._tasks):
            raise Abandoned
        stage = preview.done.stage.index
        shown = {row: task for row, task in enumerate(self._tasks) if task.alive and stage in task.job.partial_stages - task.shown}
        if shown:
            for task, image in zip(shown.values(), preview.images(list(shown)), strict=True):
                task.shown.add(stage)
                task.handle.show(Partial(task.position, stage, image))

    def _keep_in_step(self, latent: Tensor) -> None:
        """Lets the host launch at most one stage ahead of a GPU; otherwise all stages would be launched before any could be stopped."""
        if not latent.is_cuda:
            return
        if self._previous is not None:
            self._previous.synchronize()
        self._previous = torch.cuda.Event()
        self._previous.record(torch.cuda.current_stream(latent.device))


def generated(output: Any, report: Report, tasks: Sequence[Task], lengths: Sequence[int], waited: Sequence[float]) -> list[GeneratedImage]:
    """Returns the images of the tasks. lengths: tokens per prompt. waited: seconds in the queue per task."""
    masks = [None] * len(tasks) if output.compute_mask is None else list(zip(*(stage.cpu() for stage in output.compute_mask), strict=True))
    return [
        GeneratedImage(image, task.seed, report, len(tasks), lengths[row], waited[row], masks[row])
        for row, (image, task) in enumerate(zip(output.images, tasks, strict=False))
    ]


def prompt_tokens(reader: PromptReader, prompts: Any) -> list[int]:
    """Returns the tokens of each prompt; a class counts as one. Large encoders cache the last prompts, so reading again is cheap."""
    if isinstance(prompts, TextFeatures):
        return list(prompts.lengths) if prompts.mask is None else prompts.mask.sum(dim=1).tolist()
    different = list(dict.fromkeys(prompts))
    read = reader.read(different)
    if not isinstance(read, TextFeatures):
        return [1] * len(prompts)
    lengths = dict(zip(different, prompt_tokens(reader, read), strict=True))
    return [lengths[prompt] for prompt in prompts]


def without_frames(error: Exception) -> Exception:
    """Returns the error without its traceback and causes, which keep the tensors of the failed attempt alive."""
    if isinstance(error, torch.OutOfMemoryError):  # raised outside of the pipeline, which converts its own
        return OutOfMemory("memory ran out while partial images were decoded. Request fewer images, a smaller size or no partial images.")
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def read_alone(reader: PromptReader, prompts: Sequence[Prompt | None]) -> Any:
    """Returns prompts for a pipeline with each text encoded on its own, since features round differently in other batches."""
    read = {prompt: reader.read([prompt]) for prompt in dict.fromkeys(prompts)}
    features = [one for prompt in prompts if isinstance(one := read[prompt], TextFeatures)]
    return TextFeatures.joined(features) if features else list(prompts)  # classes need no encoder


def without_fillers(report: Report, images: int, ran: int) -> Report:
    """Returns the report of the first `images` of `ran` images; times and memory remain the values of the whole batch."""
    if images == ran:
        return report
    stages = tuple(replace(stage, rows=stage.rows * images // ran) for stage in report.stages)
    return replace(report, seeds=None if report.seeds is None else report.seeds[:images], stages=stages)
