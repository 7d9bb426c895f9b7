"""The executor interface, and the eager executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from ..canvas import Canvas
from ..device import Timer
from ..edit import EditCanvas
from ..errors import SettingError
from ..generate import StageOutput, begin, count_tokens, run_stage
from ..methods.method import TokenCounts
from ..models.base import NextScaleModel, PromptInputs
from ..request import Request
from ..stage import Schedule
from ..tokenizers.base import Tokenizer

Engine = Literal["graphs", "eager"]


class Generated(NamedTuple):
    """Results of a request, which later requests may overwrite."""

    latent: Tensor  # [B, Z, H, W]
    pixels: Tensor  # [B, 3, H, W], or [B, 3, 0, 0] without decoding
    finite: Mapping[int, Tensor]  # for each stage that ran: [] bool, all of its values are finite
    text_tokens: int  # read by attention, including padding


class Executor(Protocol):
    """Interface for running requests."""

    @property
    def engine(self) -> Engine: ...

    @property
    def captured_batch(self) -> int | None:
        """Batch size of the replayed graphs, which may exceed the request's; None in eager mode."""
        ...

    def run(self, request: Request, timer: Timer, watch: Callable[[StageOutput], None], decode: bool) -> Generated:
        """Runs all stages; `watch` is called with each stage after its launch."""
        ...


MAX_TABLES = 8  # 5 MB each for images of 1024 x 1024 pixels


class ScheduleTables:
    """Cache of a model's tables for recent schedules."""

    def __init__(self, model: NextScaleModel) -> None:
        self._model = model
        self._tables: dict[tuple[Schedule, torch.device], Any] = {}  # least recently used first
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, schedule: Schedule) -> Any:
        key = schedule, self._model.device
        with self._lock:
            tables = self._tables.pop(key) if key in self._tables else self._model.schedule_tables(schedule)
            if len(self._tables) == MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = tables
        return tables


class EagerExecutor:
    """Runs a request with eager kernel launches."""

    engine: ClassVar[Engine] = "eager"
    captured_batch: ClassVar[int | None] = None

    def __init__(self, model: NextScaleModel, tokenizer: Tokenizer, tables: Any) -> None:
        """tables: of the model, for the request's schedule."""
        self._model, self._tokenizer, self._tables = model, tokenizer, tables

    def run(self, request: Request, timer: Timer, watch: Callable[[StageOutput], None], decode: bool) -> Generated:
        with timer.time("condition"):
            inputs = prompt_inputs(self._model, request)
            cond = self._model.condition_from(inputs, self._tables)
        timer.start("stage")
        canvas, finite = new_canvas(self._tokenizer, request), dict[int, Tensor]()
        state = begin(self._model, cond, canvas, request, timer)
        for stage in request.schedule:
            counts = count_tokens(state, request, stage)
            known = None if counts is None else tuple(counts.tolist())  # the only device-to-host copy of a stage
            kept = None if known is None else TokenCounts(min(known), max(known), sum(known))
            done, good = run_stage(self._model, request, state, stage, kept)
            if good is not None:
                finite[stage.index] = good
            watch(replace(done, known_counts=known))
        with timer.time("decode"):
            pixels = self._tokenizer.decode(canvas.latent) if decode else canvas.latent.new_empty(request.batch, 3, 0, 0)
        return Generated(canvas.latent, pixels, finite, text_length(inputs))


def new_canvas(tokenizer: Tokenizer, request: Request) -> Canvas:
    canvas = tokenizer.canvas(request.schedule, request.batch)
    return canvas if request.edit is None else EditCanvas(canvas, request.edit)


def prompt_inputs(model: NextScaleModel, request: Request) -> PromptInputs:
    return model.prompt_inputs(request.prompts, request.guidance.needs_both, request.schedule, request.negative)


def text_length(inputs: PromptInputs) -> int:
    return 0 if inputs.text is None else inputs.text.length


def checked_engine(engine: Engine | None) -> Engine | None:
    if engine is not None and engine not in get_args(Engine):
        raise SettingError(f"engine must be one of {', '.join(get_args(Engine))}; got {engine!r}.")
    return engine


def checked_memory(graph_memory: int | None) -> int | None:
    if graph_memory is not None and (isinstance(graph_memory, bool) or not isinstance(graph_memory, int) or graph_memory <= 0):
        raise SettingError(f"graph_memory must be a positive int (bytes); got {graph_memory!r}. engine='eager' captures nothing.")
    return graph_memory
