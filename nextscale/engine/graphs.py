"""Requests as CUDA graphs: the condition, every stage and the decoder are captured once, so that the host only says which comes next.

A capture fixes everything that decides shapes and launches: schedule, batch, guidance, sampling, method, room for the text. What differs
from request to request lies at fixed addresses: what the prompts give and the random numbers.
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
    """Times nothing: events inside a capture would become part of it."""

    def start(self, what: str, stage: int = 0) -> None: ...

    def stop(self, what: str, stage: int = 0) -> None: ...


class Launches(TorchDispatchMode):
    """Counts what is run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


class CapturedRequest:
    """One request as graphs. Its outputs are overwritten by the next replay."""

    def __init__(
        self, model: NextScaleModel, tokenizer: Tokenizer, request: Request, inputs: PromptInputs, tables: Any, room: int, pool: GraphPool
    ) -> None:
        """`inputs`: what the request's prompts give. `tables`: what the model makes of the schedule. `room`: tokens of a text."""
        self.model, self._tokenizer, self._tables, self._pool = model, tokenizer, tables, pool
        self.batch = request.batch
        self.inputs = StaticInputs(inputs, request.batch, room)
        self._rngs = self.rng, self.method_rng = StaticRng(), StaticRng()
        prefix, edit = tuple(codes.clone() for codes in request.prefix_codes), request.edit and request.edit.clone()
        self._request = replace(request, rng=self.rng, method_rng=self.method_rng, prefix_codes=prefix, edit=edit, captured=True)
        self.image_inputs = self._request.image_inputs
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
        return new_canvas(self._tokenizer, self._request)

    def _condition(self) -> Conditioning:
        return self.model.condition_from(self.inputs.value, self._tables)

    def _begin(self, cond: Conditioning, canvas: Canvas) -> StageState:
        rewind(self._rngs, (0, 0))
        return begin(self.model, cond, canvas, self._request, SilentTimer(self.model.device))

    def _warm_up(self) -> None:
        """Libraries allocate their workspaces and kernels are compiled, neither of which can be captured."""
        request, stream = self._request, self._pool.stream
        current = torch.cuda.current_stream(self.model.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for number in range(WARM_UPS):
                state = self._begin(self._condition(), self._new_canvas())
                for stage in request.schedule:
                    counts, _, _ = self._run_stage(stage, state)
                    if counts is not None:  # as it is captured, whatever this image needs: all cells ask for and launch more
                        run_stage(self.model, request, state, stage, next(iter(self._buckets(stage).values())))
                    for rng in () if number else self._rngs:
                        rng.end_stage()
                if not number:
                    self.rng.share_memory()  # not the noise of a method, which it may keep
                self._tokenizer.decode(state.canvas.latent)
        current.wait_stream(stream)
        torch.cuda.empty_cache()  # else what the runs have left, 6 GB for infinity-2b, is held beside the pool

    def _capture(self) -> list[StageVariants]:
        canvas = self._new_canvas()
        self._empty = copy.copy(canvas)  # its tensors are not from the pool, and read at every replay
        # The condition, keys, values and what methods remember lie in the pool. Nothing keeps them when all stages are captured, so that
        # the decoder and the next capture can use the memory: a request has no use for what another has left there.
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
                if state is None:  # in the first stage's graph: methods may ask for noise before it
                    state = self._begin(
                        cond.copy(), canvas
                    )  # rows that a method drops leave the copy, and no later stage takes their memory
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
        """Returns True if the stage is skipped, the canvas stays as it is and the method looks at nothing: its graph would be empty."""
        if not self._request.plans[stage.index].skip:
            return False
        fork, begun = state.fork(), positions(self._rngs)
        with Launches() as launches:
            self._run_stage(stage, fork)
        rewind(self._rngs, begun)
        return launches.count == 0

    def _run_stage(self, stage: Stage, state: StageState) -> tuple[Tensor | None, StageOutput | None, Tensor | None]:
        """Returns None and what `run_stage` does; or the tokens [B] of each image alone, where they depend on the image."""
        planned = self._request.plans[stage.index]
        counts = count_tokens(state, self._request, stage)
        if counts is not None and not planned.skip:
            state.ctx.keep(planned.cfg_branches)  # here and not in the variants of the stage, whose caches have to share their memory
            return counts, None, None
        return None, *run_stage(self.model, self._request, state, stage, None)

    def _buckets(self, stage: Stage) -> dict[int, TokenCounts]:
        return buckets(stage.cells, self.batch, packs(self._request, self._request.plans[stage.index]))

    def _capture_buckets(
        self, stage: Stage, state: StageState, counter: TokenCounter, forks: list[StageState]
    ) -> tuple[StageVariants, StageState]:
        """The stage with every bucket size, and the state that all of them leave. `forks` must live until all stages are captured."""
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
    """`done` with its codes moved to where another variant has its own, where they fit: mixtures of 4096 codes take 16 KiB a cell."""
    pairs = {"codes": (first.codes, done.codes), "ids": (first.ids, done.ids)}
    moved: dict[str, Any] = {}
    for name, (target, source) in pairs.items():
        if target is not None and source is not None and target.shape == source.shape:
            moved[name] = target.copy_(source)
    return replace(done, **moved)
