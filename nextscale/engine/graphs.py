"""Recorded requests: the condition and every stage as one CUDA graph each, so that the host only says which comes next.

A recording fixes everything that decides shapes and launches: schedule, batch, guidance, sampling, method, room for the text. What
differs from request to request lies at fixed addresses: what the prompts give and the random numbers.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..accel.method import Method, MethodRun, Plans
from ..cache import DenseLayerCache
from ..canvas import Canvas
from ..errors import SettingError
from ..generate import Request, StageDone, as_sampled, begin, run_stage
from ..models.base import NextScaleModel, PromptInputs
from ..models.env import Conditioning, Env
from ..report import Stopwatch
from ..sampling import Sampling
from ..stage import Schedule, Stage
from ..tokenizers.base import Tokenizer
from .allocator import expandable_segments
from .conditions import StaticInputs, text_bucket
from .draws import StaticRng

log = logging.getLogger(__name__)

WARM_UPS = 2  # runs before the recording
TOLD_AT_MOST = 32  # kinds of requests without a recording that are warned about
# Rungs of the ladder of token numbers: narrow where few are kept and each of them tells, so that padding is a few percent of what is run.
PARTS = 32
BUCKETS = (*range(PARTS, PARTS // 2, -2), *range(PARTS // 2, 0, -1))


@dataclass(frozen=True)
class CaptureKey:
    """What a recording is made for; a request with the same one can use it."""

    schedule: Schedule
    batch: int
    rows: int
    guidance: Hashable
    sampling: Sampling
    method: Method
    text: int  # room for so many tokens

    @classmethod
    def of(cls, request: Request, method: Method, longest: int) -> CaptureKey:
        """`longest`: tokens of the longest prompt; 0 where there is no text."""
        return cls(request.schedule, request.batch, request.rows, request.guidance.key, request.sampling, method, text_bucket(longest))


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


def bucket_sizes(cells: int) -> tuple[int, ...]:
    """The numbers of tokens for which a stage is recorded where the image decides, from all cells down."""
    return tuple(dict.fromkeys(max(1, cells * rung // PARTS) for rung in BUCKETS))


@dataclass(eq=False)
class State:
    """Everything that changes from stage to stage."""

    canvas: Canvas
    env: Env
    run: MethodRun

    def fork(self) -> State:
        """The same tensors in objects of its own, so that a stage can be run in several ways from here."""
        env = replace(self.env, cond=self.env.cond.copy(), cache=[copy.copy(cache) for cache in self.env.cache])
        env.memory = self.env.memory.copy()
        return State(copy.copy(self.canvas), env, self.run.fork())

    def state_tensors(self) -> list[Tensor]:
        """What later stages read and what depends on how this one was run. Keys and values lie in memory that all forks share."""
        lengths = [cache.lengths for cache in self.env.cache if isinstance(cache, DenseLayerCache) and cache.lengths is not None]
        return [self.canvas.latent, *self.run.state_tensors(), *lengths]


class Launches(TorchDispatchMode):
    """Counts what is run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@dataclass(frozen=True, eq=False)
class StageGraph:
    """One way to run a stage: its graph and what it leaves. Most skipped stages launch nothing and have no graph."""

    graph: torch.cuda.CUDAGraph | None
    done: StageDone

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()


class TokenCounter:
    """Counts the tokens of a stage where the image decides."""

    def __init__(self, graph: torch.cuda.CUDAGraph, counts: Tensor) -> None:
        """`counts` [B], on the device."""
        self._graph, self._counts = graph, counts
        self._told = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self._counted = torch.cuda.Event()

    def start(self) -> None:
        self._graph.replay()
        self._told.copy_(self._counts, non_blocking=True)
        self._counted.record(torch.cuda.current_stream(self._counts.device))

    def needed(self) -> int:
        """The most of any image; the host waits for the count, not for what was launched after it."""
        self._counted.synchronize()
        return int(self._told.max())


@dataclass(frozen=True, eq=False)
class StageVariants:
    """A stage of a recording. Where the image decides, `look` counts the tokens and there is a way for every rung of the ladder."""

    ways: Mapping[int, StageGraph]  # by number of tokens, the largest first
    latent: Tensor  # what the canvas holds afterwards, whichever way was taken
    finite: Tensor | None
    look: TokenCounter | None = None

    def way(self) -> StageGraph:
        if self.look is None:
            return next(iter(self.ways.values()))
        needed = self.look.needed()
        return self.ways[min(width for width in self.ways if width >= needed)]


class CapturedRequest:
    """One request as graphs. Its outputs are overwritten by the next replay: copy what is to be kept."""

    def __init__(
        self,
        model: NextScaleModel,
        tokenizer: Tokenizer,
        request: Request,
        given: PromptInputs,
        tables: Any,
        method: Method,
        plans: Plans,
        text: int,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """`tables`: what the model makes of the schedule. `pool`, `stream`: where it is recorded; memory is shared where both are."""
        self._model, self._tokenizer, self._method, self._pool, self._stream = model, tokenizer, method, pool, stream
        self._given, self._tables = StaticInputs(given, text), tables
        self._draws, self._method_draws = StaticRng(), StaticRng()
        self._request = replace(request, rng=self._draws, method_rng=self._method_draws, clock=SilentClock(model.device), captured=True)
        self._plans = plans
        self._warm_up()
        self._condition_graph = torch.cuda.CUDAGraph()
        self._steps = self._capture()
        self.canvas = tokenizer.canvas(request.schedule, request.batch)
        self._decode_graph = torch.cuda.CUDAGraph()
        with self._captured(self._decode_graph):
            self.pixels = tokenizer.decode(self._steps[-1].latent)

    @property
    def graphs(self) -> int:
        ways = [way for step in self._steps for way in step.ways.values()]
        return 2 + sum(way.graph is not None for way in ways) + sum(step.look is not None for step in self._steps)

    def _condition(self) -> Conditioning:
        return self._model.condition_from(self._given.value, self._tables)

    def _begin(self, cond: Conditioning) -> tuple[MethodRun, Env]:
        self._draws.rewind()
        self._method_draws.rewind()
        return begin(self._model, cond, self._request, self._method, self._plans, all_cells=self._method.data_dependent)

    def _warm_up(self) -> None:
        """Libraries allocate their workspaces and kernels are compiled, neither of which can be recorded."""
        request = self._request
        current = torch.cuda.current_stream(self._model.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for run in range(WARM_UPS):
                canvas = self._tokenizer.canvas(request.schedule, request.batch)
                method, env = self._begin(self._condition())
                state = State(canvas, env, method)
                for stage in request.schedule:
                    counts, _, _ = self._run_stage(stage, state)
                    if counts is not None:  # as it is recorded, whatever this image needs: it draws and launches more
                        state.run.set_counts(0, stage.cells)
                        plan = state.run.plan(self._plans[stage.index], stage, canvas)
                        run_stage(self._model, canvas, request, state.run, plan, env, stage)
                    if not run:
                        self._draws.end_stage()
                        self._method_draws.end_stage()
                if not run:
                    self._draws.share_memory()  # not what a method draws, which it may keep
                self._tokenizer.decode(canvas.latent)
        current.wait_stream(self._stream)
        torch.cuda.empty_cache()  # else what the runs have left, 6 GB for infinity-2b, is held beside the pool

    def _capture(self) -> list[StageVariants]:
        canvas = self._tokenizer.canvas(self._request.schedule, self._request.batch)
        self._empty = canvas.latent  # not from the pool, and read at every replay
        # The condition, keys, values and what methods remember lie in the pool. Nothing keeps them when all stages are recorded, so that
        # the decoder and the next recording can use the memory: a request has no use for what another has left there.
        with self._captured(self._condition_graph):
            cond = self._condition()
        state: State | None = None
        steps: list[StageVariants] = []
        forks: list[State] = []
        for stage in self._request.schedule:
            if state is not None and self._launches_nothing(stage, state):
                _, done, finite = self._run_stage(stage, state)
                assert done is not None
                steps.append(StageVariants({0: StageGraph(None, done)}, state.canvas.latent, finite))
                continue
            graph = torch.cuda.CUDAGraph()
            with self._captured(graph):
                if state is None:  # in the first stage's graph: methods may draw before it
                    run, env = self._begin(cond.copy())  # rows that a method drops leave the copy, and no later stage takes their memory
                    state = State(canvas, env, run)
                counts, done, finite = self._run_stage(stage, state)
            if counts is not None:
                step, state = self._capture_buckets(stage, state, graph, counts, forks)
            else:
                assert done is not None
                step = StageVariants({0: StageGraph(graph, done.without_logits())}, state.canvas.latent, finite)
            steps.append(step)
        return steps

    def _launches_nothing(self, stage: Stage, state: State) -> bool:
        """Of skipped stages: where the canvas stays as it is and the method looks at nothing, a graph would be empty."""
        if not self._plans[stage.index].skip:
            return False
        drawn = self._draws.drawn, self._method_draws.drawn
        with Launches() as launches:
            self._run_stage(stage, state.fork())
        self._draws.rewind(drawn[0])
        self._method_draws.rewind(drawn[1])
        return launches.count == 0

    def _run_stage(self, stage: Stage, state: State) -> tuple[Tensor | None, StageDone | None, Tensor | None]:
        """What was drawn and whether it is finite, as `draw_stage` tells it; or, where the image decides, its tokens [B] alone."""
        planned = self._plans[stage.index]
        if self._method.data_dependent:
            counts = state.run.count_tokens(stage, state.canvas)
            # Rows leave here and not in the ways of the stage, whose caches have to share their memory.
            state.env.keep(planned.cfg_branches)
            if counts is not None and not planned.skip:
                return counts, None, None
        plan = state.run.plan(planned, stage, state.canvas)
        return None, *run_stage(self._model, state.canvas, self._request, state.run, plan, state.env, stage)

    def _capture_buckets(
        self, stage: Stage, state: State, look: torch.cuda.CUDAGraph, counts: Tensor, forks: list[State]
    ) -> tuple[StageVariants, State]:
        """The step, and the state that all of its ways leave behind. `forks`: states that must live until all stages are recorded."""
        ways: dict[int, StageGraph] = {}
        first, good = state, None
        drawn = self._draws.drawn, self._method_draws.drawn
        for width in bucket_sizes(stage.cells):
            self._draws.rewind(drawn[0])
            self._method_draws.rewind(drawn[1])
            fork = state.fork()
            fork.run.set_counts(0, width)
            graph = torch.cuda.CUDAGraph()
            with self._captured(graph):
                plan = fork.run.plan(self._plans[stage.index], stage, fork.canvas)  # a method may draw for it
                done, finite = run_stage(self._model, fork.canvas, self._request, fork.run, plan, fork.env, stage)
                done = done.without_logits()
                if ways and finite is not None and good is not None:
                    torch._foreach_copy_([good, *first.state_tensors()], [finite, *fork.state_tensors()])
                    done = with_codes_of(next(iter(ways.values())).done, done)
            if not ways:
                first, good = fork, finite
            ways[width] = StageGraph(graph, done)
        forks += [state, first]
        return StageVariants(ways, first.canvas.latent, good, TokenCounter(look, counts)), first

    @contextmanager
    def _captured(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            yield

    def condition(self, given: PromptInputs) -> None:
        """Puts these prompts in the place of those before."""
        self._given.load(given)
        self._condition_graph.replay()

    def run(self, request: Request, watch: Callable[[StageDone], None]) -> dict[int, Tensor]:
        """Like `generate`, for the prompts of `condition`, with this request's random numbers."""
        for stage, step in enumerate(self._steps):
            self._method_draws.refill(request.method_rng, stage)
            if step.look is not None:
                step.look.start()
            self._draws.refill(request.rng, stage)
            way = step.way()
            way.replay()
            self.canvas.latent = step.latent
            watch(replace(way.done, canvas=self.canvas))
        return {stage: step.finite for stage, step in enumerate(self._steps) if step.finite is not None}

    def decode(self) -> Tensor:
        self._decode_graph.replay()
        return self.pixels


def with_codes_of(first: StageDone, done: StageDone) -> StageDone:
    """`done` with its codes moved to where another way has put its own, where they fit: mixtures of 4096 codes take 16 KiB a cell."""
    pairs = {"codes": (first.codes, done.codes), "ids": (first.ids, done.ids)}
    moved: dict[str, Any] = {}
    for name, (target, source) in pairs.items():
        if target is not None and source is not None and target.shape == source.shape:
            moved[name] = target.copy_(source)
    return replace(done, **moved)


class Captures:
    """All recordings of a pipeline. They share one pool of memory, since only one is replayed at a time."""

    def __init__(self, model: NextScaleModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._recordings: dict[CaptureKey, CapturedRequest] = {}
        self._pool: Any = None  # torch names no public type
        self._stream: torch.cuda.Stream | None = None  # of all captures: torch shares a pool's memory within a stream
        self._weights: tuple[int, ...] = ()
        self._replaying = Lock()
        self._told: set[CaptureKey] = set()
        self.bytes = 0  # that all of them keep

    def capture(self, request: Request, method: Method, plans: Plans, longest: int, given: PromptInputs, tables: Any) -> WarmUp:
        """Makes a recording for requests like this one, unless there is one. `longest`: tokens of the longest prompt."""
        require_capturable(self._model, request, method)
        signature = CaptureKey.of(request, method, longest)
        if signature in self._recordings:
            return WarmUp(0.0, 0, 0)
        device = self._model.device
        self._forget_if_weights_moved()
        if not self._recordings:  # torch refuses a pool that no graph uses any more while something in it is still held
            self._pool, self._stream, self._weights = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device), self._addresses()
        assert self._stream is not None
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # so that what is reserved afterwards is what the recording keeps
        begun, before = time.perf_counter(), torch.cuda.memory_reserved(device)
        with torch.inference_mode(), expandable_segments():
            recording = CapturedRequest(
                self._model, self._tokenizer, request, given, tables, method, plans, signature.text, self._pool, self._stream
            )
        torch.cuda.synchronize(device)
        self._recordings[signature] = recording
        taken = torch.cuda.memory_reserved(device) - before
        self.bytes += taken
        return WarmUp(time.perf_counter() - begun, recording.graphs, taken)

    @contextmanager
    def taken(self, request: Request, method: Method, longest: int) -> Iterator[CapturedRequest | None]:
        """`find`, for this caller alone until the end of the `with` block. None also where another thread, or a caller further up, is
        replaying: all recordings share their memory."""
        recording = self.find(request, method, longest)
        if recording is None or not self._replaying.acquire(blocking=False):
            yield None
            return
        try:
            yield recording
        finally:
            self._replaying.release()

    def find(self, request: Request, method: Method, longest: int) -> CapturedRequest | None:
        """The recording for such a request; None, and said once for each kind, where there is none."""
        if request.revise is not as_sampled or request.compute_mask or not method.capturable:
            return None
        self._forget_if_weights_moved()
        signature = CaptureKey.of(request, method, longest)
        found = self._recordings.get(signature)
        if found is None:
            alike = [known for known in self._recordings if replace(known, text=signature.text) == signature]
            wider = [known for known in alike if known.text > signature.text]
            found = self._recordings[min(wider, key=lambda known: known.text)] if wider else None
        if found is None and self._recordings and signature not in self._told and len(self._told) < TOLD_AT_MOST:
            self._told.add(signature)
            log.warning(
                "no recording for %d image(s) of %s with %s, up to %d tokens of text, this guidance and this sampling: drawn eagerly;"
                " pipe.warmup(...) makes one",
                request.batch,
                request.schedule,
                method.label,
                signature.text,
            )
        return found

    def clear(self) -> None:
        self._recordings.clear()
        self._told.clear()
        self.bytes = 0

    def _addresses(self) -> tuple[int, ...]:
        """Where the weights lie, which recordings read there."""
        modules = (self._model, self._tokenizer)
        return tuple(tensor.data_ptr() for module in modules for tensors in (module.parameters(), module.buffers()) for tensor in tensors)

    def _forget_if_weights_moved(self) -> None:
        if self._recordings and self._addresses() != self._weights:
            log.warning("the weights have moved since pipe.warmup(...), to another device or type: its recordings are forgotten")
            self.clear()


def require_capturable(model: NextScaleModel, request: Request, method: Method) -> None:
    if model.device.type != "cuda":
        raise SettingError(f"graphs are recorded on a GPU; this model is on {model.device}: use engine='eager' there")
    if request.compute_mask or request.revise is not as_sampled:
        raise SettingError("masks and revise need the host between stages and cannot be recorded: leave them out of warmup")
    if not method.capturable:
        raise SettingError(f"{method.label} reads from the device between stages and cannot be recorded: calls with it run eagerly")
