"""Lifecycle of a server: loading models in the background, the batcher, and draining."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Literal

from ..batching import Batcher, Handle, Job
from ..errors import NextscaleError, SettingError
from ..methods.registry import resolve_method
from ..pipeline import Pipeline
from ..text.prompts import ClassReader
from .catalogue import SIZE, Catalogue, ParsedRequest, Served, text_of
from .errors import retry_later
from .metrics import ServeMetrics
from .settings import ServeSettings

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "failed"]
Watch = Callable[[object], None]


@dataclass(frozen=True)
class Warmup:
    """Size and batches that run before the server is ready. On a GPU this captures their CUDA graphs."""

    size: tuple[int, int]  # height, width
    batches: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Warmup:
        """Reads WIDTHxHEIGHT:BATCH,BATCH, such as 1024x1024:1,4."""
        size, colon, numbers = text.partition(":")
        found, batches = SIZE.fullmatch(size), [part for part in numbers.split(",") if part.isdecimal() and int(part)]
        if not found or not colon or len(batches) != numbers.count(",") + 1:
            raise SettingError(f"--warmup must be WIDTHxHEIGHT:BATCH,BATCH, such as 1024x1024:1,4; got {text!r}")
        return cls((int(found[2]), int(found[1])), tuple(map(int, batches)))


@dataclass(frozen=True)
class Content:
    """Models, devices and warm-ups of a server. load: opens a model by its name on one of the devices."""

    models: tuple[str, ...]
    devices: tuple[str | None, ...]  # None: the GPU, if any
    load: Callable[[str, str | None], Pipeline]
    aliases: Mapping[str, str]
    method: str = "dense"
    warmups: tuple[Warmup, ...] = ()
    lora_dir: Path | None = None  # adapters that requests may name


class Service:
    def __init__(self, content: Content, settings: ServeSettings) -> None:
        self.content, self.settings = content, settings
        self.metrics = ServeMetrics()
        self.started = int(time.time())
        self.error: BaseException | None = None  # of loading
        self.catalogue: Catalogue | None = None
        self._batcher: Batcher | None = None
        self._draining = False
        self._loading: Thread | None = None

    # --- life

    def start(self, failed: Callable[[], None]) -> None:
        """Loads in the background; calls `failed` after an error."""

        def load() -> None:
            try:
                self.open()
            except BaseException as error:
                self.error = error
                failed()

        self._loading = Thread(target=load, name="nextscale-loading", daemon=True)
        self._loading.start()

    def open(self) -> None:
        """Loads and warms up the models, then accepts requests."""
        content, settings = self.content, self.settings
        full = (settings.max_batch,)  # the size of filled-up batches
        warmups = [replace(warmup, batches=full) if settings.same_images else warmup for warmup in content.warmups]
        devices = [{model: content.load(model, device) for model in content.models} for device in content.devices]
        for pipelines in devices:
            for pipeline in pipelines.values():
                if content.lora_dir is not None:
                    pipeline.loras.offer(content.lora_dir)
                warm_up(pipeline, warmups, content.method)
        served = [Served(name, pipeline) for name, pipeline in devices[0].items()]
        catalogue = Catalogue(served, content.aliases, content.method, settings.limits)
        self._batcher = Batcher(
            devices,
            on_batch=self.metrics.batch_done,
            **settings.model_dump(include={"max_batch", "batch_delay", "max_queue", "same_images"}),
        )
        self.metrics.watch(self._batcher, [pair for pipelines in devices for pair in pipelines.items()])
        if self._draining:
            self._batcher.drain(0)
        self.catalogue = catalogue
        log.info("%s", self.described(devices))

    def described(self, devices: Sequence[Mapping[str, Pipeline]]) -> str:
        """Returns the log line with the models, their devices and the addresses."""
        where = ", ".join(str(next(iter(pipelines.values())).model.device) for pipelines in devices)
        models = [f"{name} ({str(pipeline.model.dtype).removeprefix('torch.')})" for name, pipeline in devices[0].items()]
        address = self.settings.address
        return f"serving {' and '.join(models)} on {where}, method {self.content.method}. API: {address}/v1, studio: {address}/"

    def drain(self, seconds: float) -> bool:
        """Refuses new requests and finishes accepted ones. Returns False if time ran out."""
        self._draining = True
        return self._batcher is None or self._batcher.drain(seconds)

    def close(self) -> bool:
        """Fails unfinished requests. Returns True if all threads have ended."""
        self._draining = True
        ended = self._batcher is None or self._batcher.close()
        return ended and (self._loading is None or not self._loading.is_alive())

    @property
    def state(self) -> State:
        if self.error is not None or (self._batcher is not None and self._batcher.broken):
            return "failed"
        if self._draining:
            return "draining"
        return "loading" if self.catalogue is None else "ready"

    # --- requests

    def require_catalogue(self) -> Catalogue:
        if self.catalogue is None:
            raise retry_later(503, "the models are being loaded. Try again soon.", "loading")
        return self.catalogue

    def submit(self, parsed: ParsedRequest, watch: Watch | None = None) -> Handle:
        """Queues a request. Raises Overloaded or ShuttingDown."""
        assert self._batcher is not None  # set before the catalogue
        job = Job(
            parsed.model,
            parsed.prompt,
            parsed.seeds,
            parsed.negative,
            parsed.settings,
            frozenset(parsed.partial_stages),
            watch,
            time.monotonic() + self.settings.request_timeout,
            parsed.source,
        )
        return self._batcher.submit(job)


def warm_up(pipeline: Pipeline, warmups: Sequence[Warmup], method: str) -> None:
    """Runs the warm-ups whose size the model offers."""
    chosen = resolve_method(method)
    for warmup in warmups:
        if warmup.size not in pipeline.settings.schedules.offers():
            continue
        for batch in warmup.batches:
            prompts = [0 if isinstance(pipeline.reader, ClassReader) else "a red apple"] * batch
            begun = time.monotonic()
            try:
                pipeline(prompts, seed=0, size=warmup.size, method=chosen, warmup=True)
            except NextscaleError as error:
                raise NextscaleError(f"warm-up of {pipeline.name}, {batch} image(s) of {text_of(warmup.size)}: {error}") from error
            log.info("warmed up %s, %d image(s) of %s: %.1f s", pipeline.name, batch, text_of(warmup.size), time.monotonic() - begun)
