"""Requests as CUDA graphs: the condition, every stage and the decoder are captured once, so that the host only says which comes next.

A capture fixes everything that decides shapes and launches: schedule, batch, guidance, sampling, method, room for the text. What differs
from request to request lies at fixed addresses: what the prompts give and the random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..accel.method import MethodRun, TokenCounts
from ..cache import DenseLayerCache
from ..canvas import Canvas
from ..generate import StageDone, begin, run_stage
from ..models.base import NextScaleModel, PromptInputs
from ..models.env import Conditioning, Env
from ..report import Stopwatch
from ..request import Request
from ..stage import Stage
from ..tokenizers.base import Tokenizer
from .buffers import StaticInputs, StaticRng
from .stage_graphs import StageGraph, StageVariants, TokenCounter, buckets

WARM_UPS = 2  # runs before the capture


class SilentClock(Stopwatch):
    """Times nothing: events inside a capture would become part of it."""

    def start(self, what: str, stage: int = 0) -> None: ...

    def stop(self, what: str, stage: int = 0) -> None: ...

    def lap(self, what: str, stage: int) -> None: ...


class Launches(TorchDispatchMode):
    """Counts what is run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


@dataclass(eq=False)
class State:
    """Everything that changes from stage to stage."""

    canvas: Canvas
    env: Env
    run: MethodRun

    def fork(self) -> State:
        """The same tensors in objects of its own, so that a stage can be captured several times from here."""
        env = replace(self.env, cond=self.env.cond.copy(), cache=[copy.copy(cache) for cache in self.env.cache])
        env.memory = self.env.memory.copy()
        return State(copy.copy(self.canvas), env, self.run.fork())

    def state_tensors(self) -> list[Tensor]:
        """What later stages read and what depends on how many tokens were run. Keys and values lie in memory that all forks share."""
        lengths = [cache.lengths for cache in self.env.cache if isinstance(cache, DenseLayerCache) and cache.lengths is not None]
        return [self.canvas.latent, *self.run.state_tensors(), *lengths]


@dataclass(frozen=True, eq=False)
class GraphPool:
    """Where captures lie. They share memory where they share both, since only one is replayed at a time."""

    handle: Any  # torch names no public type
    stream: torch.cuda.Stream  # torch shares a pool's memory within a stream

    @classmethod
    def fresh(cls, device: torch.device) -> GraphPool:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched inside becomes the graph. Other threads may allocate meanwhile: theirs is no part of it."""
        try:
            with torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        """Torch leaves the pool of a capture that failed open, and as long as one is open it gives no cached memory back to the device."""
        close = getattr(torch._C, "_cuda_endAllocateToPool", None)  # which has no public name
        if close is not None:
            with suppress(RuntimeError):  # it was closed
                close(self.stream.device_index, self.handle)


class CapturedRequest:
    """One request as graphs. Its outputs are overwritten by the next replay."""

    def __init__(
        self, model: NextScaleModel, tokenizer: Tokenizer, request: Request, inputs: PromptInputs, tables: Any, room: int, pool: GraphPool
    ) -> None:
        """`inputs`: what the request's prompts give. `tables`: what the model makes of the schedule. `room`: tokens of a text."""
        self._model, self._tokenizer, self._tables, self._pool = model, tokenizer, tables, pool
        self.batch = request.batch
        self.inputs = StaticInputs(inputs, request.batch, room)
        self.rng, self.method_rng = StaticRng(), StaticRng()
        self.given = tuple(codes.clone() for codes in request.given)
        silent = SilentClock(model.device)
        self._request = replace(request, rng=self.rng, method_rng=self.method_rng, given=self.given, clock=silent, captured=True)
        self._warm_up()
        self.condition_graph = torch.cuda.CUDAGraph()
        self.canvas = self._new_canvas()  # what a replay shows
        self.stages = [stage.on(self.canvas) for stage in self._capture()]
        self.decode_graph = torch.cuda.CUDAGraph()
        with pool.capturing(self.decode_graph):
            self.pixels = tokenizer.decode(self.stages[-1].latent)

    @property
    def graphs(self) -> int:
        """How many there are: those of the stages, of the condition and of the decoder."""
        return 2 + sum(stage.count for stage in self.stages)

    def _new_canvas(self) -> Canvas:
        return self._tokenizer.canvas(self._request.schedule, self.batch)

    def _condition(self) -> Conditioning:
        return self._model.condition_from(self.inputs.value, self._tables)

    def _begin(self, cond: Conditioning) -> tuple[MethodRun, Env]:
        self._rewind((0, 0))
        return begin(self._model, cond, self._request)

    def _positions(self) -> tuple[int, int]:
        return self.rng.position, self.method_rng.position

    def _rewind(self, positions: tuple[int, int]) -> None:
        self.rng.rewind(positions[0])
        self.method_rng.rewind(positions[1])

    def _warm_up(self) -> None:
        """Libraries allocate their workspaces and kernels are compiled, neither of which can be captured."""
        request, stream = self._request, self._pool.stream
        current = torch.cuda.current_stream(self._model.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for number in range(WARM_UPS):
                canvas = self._new_canvas()
                run, env = self._begin(self._condition())
                state = State(canvas, env, run)
                for stage in request.schedule:
                    counts, _, _ = self._run_stage(stage, state)
                    if counts is not None:  # as it is captured, whatever this image needs: all cells ask for and launch more
                        run.set_counts(next(iter(self._buckets(stage, run).values())))
                        plan = run.plan(request.plans[stage.index], stage, canvas)
                        run_stage(self._model, canvas, request, run, plan, env, stage)
                    if not number:
                        self.rng.end_stage()
                        self.method_rng.end_stage()
                if not number:
                    self.rng.share_memory()  # not the noise of a method, which it may keep
                self._tokenizer.decode(canvas.latent)
        current.wait_stream(stream)
        torch.cuda.empty_cache()  # else what the runs have left, 6 GB for infinity-2b, is held beside the pool

    def _capture(self) -> list[StageVariants]:
        canvas = self._new_canvas()
        self._empty = copy.copy(canvas)  # its tensors are not from the pool, and read at every replay
        # The condition, keys, values and what methods remember lie in the pool. Nothing keeps them when all stages are captured, so that
        # the decoder and the next capture can use the memory: a request has no use for what another has left there.
        with self._pool.capturing(self.condition_graph):
            cond = self._condition()
        state: State | None = None
        captured: list[StageVariants] = []
        forks: list[State] = []
        for stage in self._request.schedule:
            if state is not None and self._launches_nothing(stage, state):
                _, done, finite = self._run_stage(stage, state)
                assert done is not None
                captured.append(StageVariants({0: StageGraph(None, done)}, state.canvas.latent, finite))
                continue
            graph = torch.cuda.CUDAGraph()
            with self._pool.capturing(graph):
                if state is None:  # in the first stage's graph: methods may ask for noise before it
                    run, env = self._begin(cond.copy())  # rows that a method drops leave the copy, and no later stage takes their memory
                    state = State(canvas, env, run)
                counts, done, finite = self._run_stage(stage, state)
            if counts is not None:
                variants, state = self._capture_buckets(stage, state, TokenCounter(graph, counts), forks)
            else:
                assert done is not None
                variants = StageVariants({0: StageGraph(graph, done.without_logits())}, state.canvas.latent, finite)
            captured.append(variants)
        return captured

    def _launches_nothing(self, stage: Stage, state: State) -> bool:
        """Whether the stage is skipped, the canvas stays as it is and the method looks at nothing: its graph would be empty."""
        if not self._request.plans[stage.index].skip:
            return False
        positions = self._positions()
        with Launches() as launches:
            self._run_stage(stage, state.fork())
        self._rewind(positions)
        return launches.count == 0

    def _run_stage(self, stage: Stage, state: State) -> tuple[Tensor | None, StageDone | None, Tensor | None]:
        """What `run_stage` returns, after None; or, where the number of tokens depends on the image, the tokens [B] of each alone."""
        planned = self._request.plans[stage.index]
        if self._request.method.data_dependent:
            counts = state.run.count_tokens(stage, state.canvas)
            # Rows leave here and not in the variants of the stage, whose caches have to share their memory.
            state.env.keep(planned.cfg_branches)
            if counts is not None and not planned.skip:
                return counts, None, None
        plan = state.run.plan(planned, stage, state.canvas)
        return None, *run_stage(self._model, state.canvas, self._request, state.run, plan, state.env, stage)

    def _buckets(self, stage: Stage, run: MethodRun) -> dict[int, TokenCounts]:
        planned = self._request.plans[stage.index]
        return buckets(stage.cells, self._most(stage), self.batch, run.packs(planned))

    def _most(self, stage: Stage) -> int:
        """Tokens of an image for which the caches have room."""
        planned = self._request.plans[stage.index].num_tokens
        return stage.cells if planned is None else planned

    def _capture_buckets(self, stage: Stage, state: State, counter: TokenCounter, forks: list[State]) -> tuple[StageVariants, State]:
        """The stage with every bucket size, and the state that all of them leave. `forks` must live until all stages are captured."""
        variants: dict[int, StageGraph] = {}
        first, all_finite = state, None
        positions = self._positions()
        for size, counts in self._buckets(stage, state.run).items():
            self._rewind(positions)
            fork = state.fork()
            fork.run.set_counts(counts)
            graph = torch.cuda.CUDAGraph()
            with self._pool.capturing(graph):
                plan = fork.run.plan(self._request.plans[stage.index], stage, fork.canvas)  # a method may ask for noise to make it
                done, finite = run_stage(self._model, fork.canvas, self._request, fork.run, plan, fork.env, stage)
                done = done.without_logits()
                if variants and finite is not None and all_finite is not None:
                    torch._foreach_copy_([all_finite, *first.state_tensors()], [finite, *fork.state_tensors()])
                    done = with_codes_of(next(iter(variants.values())).done, done)
            if not variants:
                first, all_finite = fork, finite
            variants[size] = StageGraph(graph, done)
        forks += [state, first]
        packed = state.run.packs(self._request.plans[stage.index])
        return StageVariants(variants, first.canvas.latent, all_finite, counter, packed, self._most(stage)), first


def with_codes_of(first: StageDone, done: StageDone) -> StageDone:
    """`done` with its codes moved to where another variant has its own, where they fit: mixtures of 4096 codes take 16 KiB a cell."""
    pairs = {"codes": (first.codes, done.codes), "ids": (first.ids, done.ids)}
    moved: dict[str, Any] = {}
    for name, (target, source) in pairs.items():
        if target is not None and source is not None and target.shape == source.shape:
            moved[name] = target.copy_(source)
    return replace(done, **moved)
