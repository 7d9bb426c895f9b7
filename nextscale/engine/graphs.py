"""Capture of a request as CUDA graphs: one for the condition, one or more per stage, and one for the decoder.

A capture fixes everything that determines shapes and launches: schedule, batch, guidance, sampling, method and padded text length. Inputs
that differ between requests, prompts and random numbers, are stored at fixed addresses.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..canvas import Canvas
from ..device import Timer
from ..generate import StageOutput, StageState, begin, count_tokens, packs, run_stage
from ..methods.method import TokenCounts
from ..models.base import NextScaleModel, PromptInputs
from ..models.context import Conditioning
from ..request import Request
from ..stage import Stage
from ..tokenizers.base import Tokenizer
from .buffers import StaticInputs, StaticRng, positions, rewind
from .executor import new_canvas
from .memory import GraphPool
from .variants import StageGraph, StageVariants, TokenCounter, buckets

WARM_UPS = 2  # runs before the capture


class SilentTimer(Timer):
    """A timer without events, which would become part of a graph during capture."""

    def start(self, what: str, stage: int = 0) -> None: ...

    def stop(self, what: str, stage: int = 0) -> None: ...


class Launches(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


class CapturedRequest:
    """One request as CUDA graphs. Each replay overwrites its outputs."""

    def __init__(
        self, model: NextScaleModel, tokenizer: Tokenizer, request: Request, inputs: PromptInputs, tables: Any, room: int, pool: GraphPool
    ) -> None:
        """`inputs`: from the request's prompts. `tables`: of the model, for the schedule. `room`: padded text length."""
        self.model, self._tokenizer, self._tables, self._pool = model, tokenizer, tables, pool
        self.batch = request.batch
        self.inputs = StaticInputs(inputs, request.batch, room)
        self._rngs = self.rng, self.method_rng = StaticRng(), StaticRng()
        prefix, edit = tuple(codes.clone() for codes in request.prefix_codes), request.edit and request.edit.clone()
        self._request = replace(request, rng=self.rng, method_rng=self.method_rng, prefix_codes=prefix, edit=edit, captured=True)
        self.image_inputs = self._request.image_inputs
        self._warm_up()
        self.condition_graph = torch.cuda.CUDAGraph()
        self.canvas = self._new_canvas()  # shown by replays
        self.stages = [stage.on(self.canvas) for stage in self._capture()]
        self.decode_graph = torch.cuda.CUDAGraph()
        with pool.capturing(self.decode_graph):
            self.pixels = tokenizer.decode(self.stages[-1].latent)

    @property
    def graphs(self) -> int:
        """Number of graphs of the condition, the stages and the decoder."""
        return 2 + sum(stage.count for stage in self.stages)

    def _new_canvas(self) -> Canvas:
        return new_canvas(self._tokenizer, self._request)

    def _condition(self) -> Conditioning:
        return self.model.condition_from(self.inputs.value, self._tables)

    def _begin(self, cond: Conditioning, canvas: Canvas) -> StageState:
        rewind(self._rngs, (0, 0))
        return begin(self.model, cond, canvas, self._request, SilentTimer(self.model.device))

    def _warm_up(self) -> None:
        """Runs the request before capture, so that libraries allocate workspaces and kernels are compiled, which graphs cannot do."""
        request, stream = self._request, self._pool.stream
        current = torch.cuda.current_stream(self.model.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for number in range(WARM_UPS):
                state = self._begin(self._condition(), self._new_canvas())
                for stage in request.schedule:
                    counts, _, _ = self._run_stage(stage, state)
                    if counts is not None:  # the largest bucket, as in the capture: it may need more noise and launches than this image
                        run_stage(self.model, request, state, stage, next(iter(self._buckets(stage).values())))
                    for rng in () if number else self._rngs:
                        rng.end_stage()
                if not number:
                    self.rng.share_memory()  # not for method_rng, whose noise a method may keep
                self._tokenizer.decode(state.canvas.latent)
        current.wait_stream(stream)
        torch.cuda.empty_cache()  # frees memory of the runs, 6 GB for infinity-2b, which the pool cannot use

    def _capture(self) -> list[StageVariants]:
        canvas = self._new_canvas()
        self._empty = copy.copy(canvas)  # keeps tensors alive that are not in the pool and are read by every replay
        # The condition, the KV cache and the state of methods are in the pool. No references to them remain after the stages are captured,
        # so the decoder and later captures reuse their memory.
        with self._pool.capturing(self.condition_graph):
            cond = self._condition()
        state: StageState | None = None
        captured: list[StageVariants] = []
        forks: list[StageState] = []
        for stage in self._request.schedule:
            if state is not None and self._launches_nothing(stage, state):
                _, done, finite = self._run_stage(stage, state)
                assert done is not None
                captured.append(StageVariants({0: StageGraph(None, done)}, state.canvas.latent, finite))
                continue
            graph = torch.cuda.CUDAGraph()
            with self._pool.capturing(graph):
                if state is None:  # inside the first graph, because methods may draw noise here
                    # A copy, so that the memory of rows that a method drops is not reused by later stages.
                    state = self._begin(cond.copy(), canvas)
                counts, done, finite = self._run_stage(stage, state)
            if counts is not None:
                variants, state = self._capture_buckets(stage, state, TokenCounter(graph, counts), forks)
            else:
                assert done is not None
                variants = StageVariants({0: StageGraph(graph, done.without_logits())}, state.canvas.latent, finite)
            captured.append(variants)
        assert state is not None
        self._constants = state.constants
        return captured

    def _launches_nothing(self, stage: Stage, state: StageState) -> bool:
        """Returns True if a stage is skipped without changing the canvas or calling the method, so that its graph would be empty."""
        if not self._request.plans[stage.index].skip:
            return False
        fork, begun = state.fork(), positions(self._rngs)
        with Launches() as launches:
            self._run_stage(stage, fork)
        rewind(self._rngs, begun)
        return launches.count == 0

    def _run_stage(self, stage: Stage, state: StageState) -> tuple[Tensor | None, StageOutput | None, Tensor | None]:
        """Runs a stage; returns None and its results. If its token count depends on the image, returns only the counts, [B]."""
        planned = self._request.plans[stage.index]
        counts = count_tokens(state, self._request, stage)
        if counts is not None and not planned.skip:
            state.ctx.keep(planned.cfg_branches)  # before the variants fork, so that their caches share memory
            return counts, None, None
        return None, *run_stage(self.model, self._request, state, stage, None)

    def _buckets(self, stage: Stage) -> dict[int, TokenCounts]:
        return buckets(stage.cells, self.batch, packs(self._request, self._request.plans[stage.index]))

    def _capture_buckets(
        self, stage: Stage, state: StageState, counter: TokenCounter, forks: list[StageState]
    ) -> tuple[StageVariants, StageState]:
        """Captures a stage for every bucket size; returns the variants and their common final state. `forks` keeps states alive."""
        variants: dict[int, StageGraph] = {}
        first, all_finite = state, None
        begun = positions(self._rngs)
        for size, counts in self._buckets(stage).items():
            rewind(self._rngs, begun)
            fork = state.fork()
            graph = torch.cuda.CUDAGraph()
            with self._pool.capturing(graph):
                done, finite = run_stage(self.model, self._request, fork, stage, counts)
                done = done.without_logits()
                if variants and finite is not None and all_finite is not None:
                    torch._foreach_copy_([all_finite, *first.tensors()], [finite, *fork.tensors()])
                    done = with_codes_of(next(iter(variants.values())).done, done)
            if not variants:
                first, all_finite = fork, finite
            variants[size] = StageGraph(graph, done)
        forks += [state, first]
        packed = packs(self._request, self._request.plans[stage.index])
        return StageVariants(variants, first.canvas.latent, all_finite, counter, packed), first


def with_codes_of(first: StageOutput, done: StageOutput) -> StageOutput:
    """Moves codes to the memory of another variant if shapes agree: mixtures of 4096 codes take 16 KiB per cell."""
    pairs = {"codes": (first.codes, done.codes), "ids": (first.ids, done.ids)}
    moved: dict[str, Any] = {}
    for name, (target, source) in pairs.items():
        if target is not None and source is not None and target.shape == source.shape:
            moved[name] = target.copy_(source)
    return replace(done, **moved)
