"""Generates the batches of a plan, and writes each one while the next is generated."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..errors import SettingError
from ..io import to_arrays
from ..output import Output
from ..pipeline import Pipeline
from ..stage import Schedule
from .manifest import Entry
from .plan import Batch, Picture
from .store import WRITERS, Encoded, Store

BATCHES_WAITING = 3  # to be written before the generator waits, which limits memory on slow disks
LONGEST_TRIED = 8  # prompts with most letters; the one with most tokens is used

OnImages = Callable[[int], None]
"""Called with the number of images written since the last call."""
LongestPrompts = Mapping[Schedule, Sequence[str | int]]
"""Prompts with most letters, by size."""


@dataclass(frozen=True)
class Done:
    """Result of a run."""

    written: int
    there: int
    seconds: float  # of all batches but the first, including their files
    timed: int  # images of these batches

    @property
    def images_per_second(self) -> float | None:
        """None if only one batch ran."""
        return self.timed / self.seconds if self.timed else None


class Generator:
    """Generates batches with one pipeline. settings: further arguments of the pipeline's call."""

    def __init__(self, pipeline: Pipeline, settings: Mapping[str, Any]) -> None:
        self._pipeline, self._settings = pipeline, dict(settings)
        self._captures = pipeline.engine == "graphs"

    def prepare(self, batches: Sequence[Batch], longest_prompts: LongestPrompts) -> None:
        """Encodes the longest prompts, so that a text that is too long fails early, and captures requests with the longest one.

        Its graphs also serve shorter prompts, so that images do not depend on the first prompt after a restart.
        """
        for batch in {(batch.schedule, batch.images): batch for batch in batches}.values():
            longest = max(longest_prompts[batch.schedule], key=lambda prompt: self._pipeline.reader.read(prompt).longest)
            if not self._captures:
                continue
            try:
                self._pipeline.warmup([longest] * batch.images, size=batch.schedule, **self._settings)
            except SettingError:
                self._captures = False  # runs eagerly

    def output(self, batch: Batch) -> Output:
        """Generates a batch; the images of its pictures come first."""
        pictures = batch.filled
        return self._pipeline(
            [picture.prompt for picture in pictures],
            seed=[picture.seed for picture in pictures],
            size=batch.schedule,
            warmup=self._captures,
            **self._settings,
        )


def longest_prompts(batches: Iterable[Batch]) -> LongestPrompts:
    """Returns the longest prompts by size. batches: of all shards, so that each shard captures the same graphs."""
    prompts: dict[Schedule, set[str | int]] = {}
    for batch in batches:
        prompts.setdefault(batch.schedule, set()).update(picture.prompt for picture in batch.pictures)
    return {size: sorted(found, key=lambda prompt: (len(str(prompt)), str(prompt)))[-LONGEST_TRIED:] for size, found in prompts.items()}


def missing(batches: Sequence[Batch], store: Store, on_images: OnImages) -> tuple[set[str], Sequence[Batch], list[Batch]]:
    """Returns the names of the shard's complete images, its batches, and its incomplete batches. batches: of all shards.

    Incomplete batches keep their complete images, which are generated again since rounding depends on the batch.
    """
    there, mine = store.verified(batches), store.shard.part(batches)
    on_images(len(there))
    return there, mine, [batch for batch in mine if any(picture.file not in there for picture in batch.pictures)]


def sample(
    load: Callable[[], Pipeline],
    settings: Mapping[str, Any],
    batches: Sequence[Batch],
    store: Store,
    on_images: OnImages = lambda _: None,
) -> Done:
    """Generates the missing images of the store's shard; loads the model only if needed. batches: of all shards."""
    there, mine, todo = missing(batches, store, on_images)
    if not todo:
        return Done(0, len(there), 0.0, 0)
    generator = Generator(load(), settings)
    generator.prepare(mine, longest_prompts(batches))
    started, untimed, writing = time.perf_counter(), 0, Writing(store, on_images)
    with writing:
        for number, batch in enumerate(todo):
            output = generator.output(batch)
            chosen = [(place, picture) for place, picture in enumerate(batch.pictures) if picture.file not in there]
            if number == 0:
                started, untimed = time.perf_counter(), len(chosen)
            writing.add(output, chosen)
    seconds = time.perf_counter() - started
    return Done(writing.written, len(there), seconds, writing.written - untimed)


class Writing:
    """Threads that copy, encode and write images, and one thread that appends to the manifest in order."""

    def __init__(self, store: Store, on_images: OnImages) -> None:
        self._store, self._on_images = store, on_images
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="write")
        self._recorder = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._waiting: deque[Future[None]] = deque()
        self.written = 0

    def add(self, output: Output, pictures: Sequence[tuple[int, Picture]]) -> None:
        """Queues pictures with their positions in the batch; blocks while too many batches are queued."""
        levels = self._writers.submit(copied, output.pixels)  # submitted first: there may be only one thread
        entries = [self._writers.submit(self._write, picture, levels, place) for place, picture in pictures]
        self._waiting.append(self._recorder.submit(self._record, entries))
        while len(self._waiting) > BATCHES_WAITING or self._waiting[0].done():
            self._waiting.popleft().result()
            if not self._waiting:
                break

    def _write(self, picture: Picture, levels: Future[NDArray[np.uint8]], place: int) -> Entry:
        return self._store.write(picture, Encoded.of(Image.fromarray(levels.result()[place]), Path(picture.file).suffix))

    def _record(self, entries: Sequence[Future[Entry]]) -> None:
        for entry in entries:
            self._store.record(entry.result())
        self.written += len(entries)
        self._on_images(len(entries))

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finishes queued images; after an error only the ones in progress."""
        try:
            while kind is None and self._waiting:
                self._waiting.popleft().result()
        finally:
            self._writers.shutdown(wait=True, cancel_futures=True)
            self._recorder.shutdown(wait=True, cancel_futures=True)


def copied(pixels: Tensor) -> NDArray[np.uint8]:
    """Returns the levels of all images on the host. They are copied on a separate stream, so that the next batch does not wait.

    The engine has already waited for the device, so the pixels are complete. They are held until `.cpu()` has waited for this stream.
    """
    with torch.cuda.stream(copying_stream(pixels.device)) if pixels.is_cuda else nullcontext():
        return to_arrays(pixels)


@cache
def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all copies: torch cycles through 32 streams, and graphs run on one of them."""
    return torch.cuda.Stream(device)
