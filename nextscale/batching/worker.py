"""The thread that runs batches on one device: what fails or does not fit is halved, until only the culprit is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import NextscaleError, OutOfMemory, PromptError
from ..io import to_pil
from ..report import Report
from ..text import TextFeatures
from ..text.prompts import PromptReader
from .filling import filled, read_alone, without_fillers
from .jobs import GeneratedImage, Job, Partial, Prompt, Task
from .queue import Waiting
from .throughput import Throughput

log = logging.getLogger(__name__)


class GeneratesImages(Protocol):
    """What a worker asks of a pipeline."""

    reader: PromptReader

    def __call__(self, prompt: Any, *, seed: Any, negative: Any, on_stage: Callable[[Any], None], **settings: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class BatchRecord:
    """What became of a batch, for whoever measures."""

    model: str
    images: int
    seconds: float
    queue_seconds: tuple[float, ...]  # of each image
    report: Report | None = None  # None where it failed or was given up
    error: Exception | None = None  # what made it fail


class Abandoned(Exception):
    """Leaves the pipeline from inside `on_stage` when nobody is left who wants the batch."""


class Worker(Thread):
    def __init__(
        self,
        name: str,
        pipelines: Mapping[str, GeneratesImages],
        waiting: Waiting,
        throughput: Throughput,
        on_batch: Callable[[BatchRecord], None],
        same_images: bool,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._pipelines, self._waiting, self._throughput, self._on_batch = pipelines, waiting, throughput, on_batch
        self._same_images = same_images
        self.broken = False  # the device answers no more: nothing but a new process helps

    def run(self) -> None:
        while (tasks := self._waiting.take(self._pipelines)) is not None:
            try:
                self._generate(tasks)
            except Exception as error:  # a fault of ours: nobody must wait for ever, and the worker goes on
                log.error("the worker failed", exc_info=error)
                for task in tasks:
                    task.handle.fail(without_frames(error))
            finally:
                self._waiting.finished(tasks)
            del tasks  # images are not kept until the next batch

    def _generate(self, tasks: Sequence[Task]) -> None:
        """Every task has its image or its error afterwards."""
        tasks = [task for task in tasks if task.alive]
        if not tasks:
            return
        key = tasks[0].job.key
        images = self._waiting.limit(key) if self._same_images else len(tasks)
        if len(tasks) > images:  # the limit is lower than when they were taken
            self._generate(tasks[:images])
            self._generate(tasks[images:])
            return
        error = self._attempt(tasks, images)
        if error is None:
            return
        # Outside of the `except` block, so that what the failed attempt allocated is free.
        halved = len(tasks)
        if isinstance(error, OutOfMemory):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if images > 1:
                self._waiting.lower_limit(key, images // 2)
            halved = images
        if halved == 1:
            tasks[0].handle.fail(error)
            return
        self._generate(tasks[: halved // 2])
        self._generate(tasks[halved // 2 :])

    def _attempt(self, tasks: Sequence[Task], images: int) -> Exception | None:
        """`images`: how many run, of which those beyond the tasks are dropped."""
        job, begun = tasks[0].job, time.monotonic()
        waited = tuple(begun - task.queued for task in tasks)
        try:
            reader, run = self._pipelines[job.model].reader, filled(tasks, images)
            prompts = self._prompts(reader, [task.job.prompt for task in run])
            output = self._call(job, tasks, run, prompts)
            report = without_fillers(output.report, len(tasks), images)
            results = generated(output, report, tasks, prompt_tokens(reader, prompts), waited)
        except Abandoned:
            self._record(BatchRecord(job.model, len(tasks), time.monotonic() - begun, waited))
            return None
        except Exception as error:
            self._failed(error, job, len(tasks))
            kept = without_frames(error)
            self._record(BatchRecord(job.model, len(tasks), time.monotonic() - begun, waited, error=kept))
            return kept
        seconds = time.monotonic() - begun
        self._throughput.add(len(tasks), seconds)
        self._record(BatchRecord(job.model, len(tasks), seconds, waited, report))
        for task, image in zip(tasks, results, strict=True):
            task.handle.deliver(task.position, image)
        return None

    def _prompts(self, reader: PromptReader, prompts: Sequence[Prompt | None]) -> Any:
        """Prompts as the pipeline takes them."""
        return read_alone(reader, prompts) if self._same_images else list(prompts)

    def _call(self, job: Job, tasks: Sequence[Task], run: Sequence[Task], prompts: Any) -> Any:
        """`run`: the tasks, and what the batch is filled up with."""
        pipeline, settings = self._pipelines[job.model], dict(job.settings)
        if self._same_images:
            settings["warmup"] = True  # graphs from the first request on: eager ones have other shapes, those of the texts
        return pipeline(
            prompts,
            seed=[task.seed for task in run],
            negative=None if job.negative is None else self._prompts(pipeline.reader, [task.job.negative for task in run]),
            on_stage=StageWatcher(tasks, self._waiting),
            **settings,
        )

    def _record(self, record: BatchRecord) -> None:
        try:
            self._on_batch(record)
        except Exception as error:
            log.error("a batch could not be recorded", exc_info=error)

    def _failed(self, error: Exception, job: Job, images: int) -> None:
        """Only what is no fault of the request is worth a traceback. Prompts are not logged."""
        if isinstance(error, PromptError):
            return
        if isinstance(error, NextscaleError):
            log.warning("a batch of %d image(s) of %s failed: %s", images, job.model, error)
            return
        log.error("a batch of %d image(s) of %s failed", images, job.model, exc_info=error)
        if isinstance(error, RuntimeError) and "CUDA error" in str(error):
            self.broken = True


class StageWatcher:
    """Looks after every stage who is still there, and shows partial images to those who asked for them."""

    def __init__(self, tasks: Sequence[Task], waiting: Waiting) -> None:
        self._tasks, self._waiting = tasks, waiting
        self._previous: torch.cuda.Event | None = None

    def __call__(self, preview: Any) -> None:
        self._keep_in_step(preview.latent)
        self._waiting.expire()
        now = time.monotonic()
        for task in self._tasks:
            task.handle.expire(now)
        if not any(task.alive for task in self._tasks):
            raise Abandoned
        stage = preview.done.stage.index
        rows = [row for row, task in enumerate(self._tasks) if self._wanted(task, stage)]
        if rows:
            for row, image in zip(rows, to_pil(decoded(preview, rows)), strict=True):
                self._tasks[row].shown.add(stage)
                self._tasks[row].handle.show(Partial(self._tasks[row].position, stage, image))

    @staticmethod
    def _wanted(task: Task, stage: int) -> bool:
        return task.alive and stage in task.job.partial_stages and stage not in task.shown

    def _keep_in_step(self, latent: Tensor) -> None:
        """The host launches at most one stage ahead of a GPU: otherwise nothing could be stopped, all would be launched already."""
        if not latent.is_cuda:
            return
        if self._previous is not None:
            self._previous.synchronize()
        self._previous = torch.cuda.Event()
        self._previous.record(torch.cuda.current_stream(latent.device))


@torch.inference_mode()
def decoded(preview: Any, rows: Sequence[int]) -> Tensor:
    """Pixels [R, 3, H, W] of some images of the batch, as they would be if generation stopped here."""
    return preview.tokenizer.decode(preview.latent[list(rows)])


def generated(output: Any, report: Report, tasks: Sequence[Task], lengths: Sequence[int], waited: Sequence[float]) -> list[GeneratedImage]:
    """`lengths`: tokens of each prompt. `waited`: seconds in the queue, of each task. What there is beyond the tasks is dropped."""
    masks = None if output.compute_mask is None else [stage.cpu() for stage in output.compute_mask]
    return [
        GeneratedImage(
            image,
            task.seed,
            report,
            len(tasks),
            lengths[row],
            seconds,
            None if masks is None else tuple(stage[row] for stage in masks),
        )
        for row, (image, task, seconds) in enumerate(zip(output.images[: len(tasks)], tasks, waited, strict=True))
    ]


def prompt_tokens(reader: PromptReader, prompts: Any) -> list[int]:
    """Tokens of each prompt; a class counts as one. Large encoders remember what they have just read."""
    if isinstance(prompts, TextFeatures):
        return list(prompts.lengths) if prompts.mask is None else prompts.mask.sum(dim=1).tolist()
    different = list(dict.fromkeys(prompts))
    read = reader.read(different)
    if not isinstance(read, TextFeatures):
        return [1] * len(prompts)
    lengths = dict(zip(different, prompt_tokens(reader, read), strict=True))
    return [lengths[prompt] for prompt in prompts]


def without_frames(error: Exception) -> Exception:
    """The error without its traceback and those of its causes, which keep the tensors of the failed attempt alive."""
    if isinstance(error, torch.OutOfMemoryError):  # outside of the pipeline, which explains its own
        return OutOfMemory("memory ran out while images were shown: ask for fewer images, a smaller size or no partial images")
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
