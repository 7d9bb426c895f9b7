"""Recorded requests: every stage as one CUDA graph, so that the host only says which comes next.

A recording fixes everything that decides shapes and launches: schedule, batch, guidance, sampling, method, room for the text. What
differs from request to request lies at fixed addresses: the condition and the random numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..accel.method import Method
from ..canvas import Canvas
from ..errors import SettingError
from ..generate import Drawing, Request, StageDone, StageScope, as_drawn, at_once, generate
from ..models.base import Conditioning, NextScaleModel
from ..report import Stopwatch
from ..sampling import Sampling
from ..stage import Schedule, Stage
from ..tokenizers.base import Tokenizer
from .conditions import FixedConditioning, text_tokens, text_width
from .draws import FixedDraws

log = logging.getLogger(__name__)

WARM_UPS = 2  # runs before the recording: libraries allocate their workspaces and kernels are tuned


@dataclass(frozen=True)
class Signature:
    """What a recording is made for; a request with the same one can use it."""

    schedule: Schedule
    batch: int
    rows: int
    scales: tuple[float, ...]
    guided_layers: frozenset[int]
    guides_logits: bool
    sampling: Sampling
    method: Method
    text: int  # room for so many tokens

    @classmethod
    def of(cls, request: Request, cond: Conditioning, method: Method) -> Signature:
        guidance = request.guidance
        return cls(
            request.schedule,
            request.batch,
            cond.start.shape[0],
            guidance.scales,
            guidance.layers,
            guidance.output_scale(request.schedule[0]) == guidance.scales[0],
            request.sampling,
            method,
            text_width(text_tokens(cond)),
        )


@dataclass(frozen=True)
class WarmUp:
    """What a recording cost."""

    seconds: float
    graphs: int
    bytes: int  # that it keeps


class SilentClock(Stopwatch):
    """Times nothing: events inside a recording would be recorded, not measured."""

    def start(self, what: str, stage: int = 0) -> None: ...

    def stop(self, what: str, stage: int = 0) -> None: ...


class Recording:
    """One request as graphs. Its outputs are overwritten by the next replay: copy what is to be kept."""

    def __init__(
        self,
        model: NextScaleModel,
        tokenizer: Tokenizer,
        request: Request,
        cond: Conditioning,
        method: Method,
        text: int,
        pool: Any,
    ) -> None:
        self._fixed = FixedConditioning(cond, text)
        self._fixed.load(cond)
        self._draws, self._method_draws = FixedDraws(), FixedDraws()
        self._pool = pool
        self._stream = torch.cuda.Stream(model.device)
        self._request = replace(request, draws=self._draws, method_draws=self._method_draws, clock=SilentClock(model.device))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._stages: list[tuple[StageDone, Tensor]] = []  # and what the canvas holds after each
        with self._on_own_stream():
            for _ in range(WARM_UPS):
                canvas, _ = self._run(model, tokenizer, method, at_once)
                tokenizer.decode(canvas.latent)
        self.canvas, self._drawing = self._run(model, tokenizer, method, self._captured)
        self._decode_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._decode_graph, pool=self._pool, stream=self._stream):
            self.pixels = tokenizer.decode(self.canvas.latent)
        self.latent = self.canvas.latent

    def _run(self, model: NextScaleModel, tokenizer: Tokenizer, method: Method, scope: StageScope) -> tuple[Canvas, Drawing]:
        self._draws.rewind()
        self._method_draws.rewind()
        self._stages.clear()
        canvas = tokenizer.canvas(self._request.schedule, self._request.batch)
        self._empty = canvas.latent  # the first stage's graph reads it at every replay
        # A shallow copy: rows that a method drops leave the copy, not what replays load into.
        cond = replace(self._fixed.value)

        def stage_done(done: StageDone) -> None:
            self._stages.append((done.without_logits(), canvas.latent))  # logits are large, and later stages can use their memory

        return canvas, generate(model, cond, canvas, self._request, method, stage_done, scope)

    def _captured(self, stage: Stage) -> AbstractContextManager[None]:
        self.graphs[stage.index] = torch.cuda.CUDAGraph()
        return torch.cuda.graph(self.graphs[stage.index], pool=self._pool, stream=self._stream)

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def draw(self, request: Request, cond: Conditioning, watch: Callable[[StageDone], None]) -> Mapping[int, Tensor]:
        """Like `generate`, with what the recording was made from replaced by this request's."""
        self._fixed.load(cond)
        self._draws.refill(request.draws)
        self._method_draws.refill(request.method_draws)
        for done, latent in self._stages:
            self.graphs[done.stage.index].replay()
            self.canvas.latent = latent
            watch(done)
        return self._drawing.finite

    def decode(self) -> Tensor:
        self._decode_graph.replay()
        return self.pixels


class Recordings:
    """All recordings of a pipeline. They share one pool of memory, since only one is replayed at a time."""

    def __init__(self, model: NextScaleModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._recordings: dict[Signature, Recording] = {}
        self._pool: Any = None  # torch names no public type
        self._told: set[Signature] = set()

    def record(self, request: Request, cond: Conditioning, method: Method) -> WarmUp:
        """Makes a recording for requests like this one, unless there is one."""
        require_recordable(self._model, request, method)
        signature = Signature.of(request, cond, method)
        if signature in self._recordings:
            return WarmUp(0.0, 0, 0)
        device = self._model.device
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)
        begun, before = time.perf_counter(), torch.cuda.memory_reserved(device)
        with torch.inference_mode():
            recording = Recording(self._model, self._tokenizer, request, cond, method, signature.text, self._pool)
        torch.cuda.synchronize(device)
        self._recordings[signature] = recording
        return WarmUp(time.perf_counter() - begun, len(recording.graphs) + 1, torch.cuda.memory_reserved(device) - before)

    def find(self, request: Request, cond: Conditioning, method: Method) -> Recording | None:
        """The recording for such a request; None, and said once for each kind, where there is none."""
        if request.revise is not as_drawn or request.track_kept:
            return None
        signature = Signature.of(request, cond, method)
        found = self._recordings.get(signature)
        if found is None:
            alike = [known for known in self._recordings if replace(known, text=signature.text) == signature]
            wider = [known for known in alike if known.text > signature.text]
            found = self._recordings[min(wider, key=lambda known: known.text)] if wider else None
        if found is None and self._recordings and signature not in self._told:
            self._told.add(signature)
            log.warning(
                "no recording for %d image(s) of %s with %s: drawn eagerly; pipe.warmup(...) makes one",
                request.batch,
                request.schedule,
                method.label,
            )
        return found

    def clear(self) -> None:
        self._recordings.clear()
        self._told.clear()


def require_recordable(model: NextScaleModel, request: Request, method: Method) -> None:
    if model.device.type != "cuda":
        raise SettingError(f"graphs are recorded on a GPU; this model is on {model.device}: use engine='eager' there")
    if request.track_kept or request.revise is not as_drawn:
        raise SettingError("masks and revise need the host between stages and cannot be recorded: leave them out of warmup")
    if method.follows_image:
        raise SettingError(f"{method.label} decides by the image how many tokens to run, which no recording can follow: use it eagerly")
