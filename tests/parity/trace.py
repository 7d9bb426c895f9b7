"""Traces of a generation, taken through the library's own hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from nextscale import Method, Preview, Schedule, Stage, StagePlan, Tokens
from nextscale.cache import CacheSpec, CacheView, LayerCache, StageMemory, Workspace
from nextscale.canvas import Canvas
from nextscale.generate import StageOutput
from nextscale.methods.method import MethodRun, Plans, Restored, RunSetup, Span, TokenCounts
from nextscale.models import NextScaleModel
from nextscale.models.blocks import Block
from nextscale.models.context import ForwardContext
from nextscale.sampling import SharedRng


class Trace(Method):
    """Traces the inputs and outputs of blocks, stage by stage, while `method` runs.

    Of blocks that the method runs as a group the input of the first and the output of the last are seen. `stages` is how many stages to
    run, the rest is skipped. `noise` is the size of random numbers that are added to the guided logits.
    """

    def __init__(
        self,
        observed: Sequence[int] = (),
        stages: int | None = None,
        noise: float = 0.0,
        noise_seed: int = 0,
        method: Method | None = None,
    ) -> None:
        self.noise = noise
        self.generator = torch.Generator().manual_seed(noise_seed)
        self.observed = tuple(sorted(set(observed)))
        self.stages = stages
        self.method = Method() if method is None else method
        self.exclusive |= self.method.exclusive
        self.first_inputs: list[Tensor] = []
        self.inputs: dict[tuple[int, int], Tensor] = {}  # (stage, layer) of the tapped layers, and of the first ones of groups
        self.outputs: dict[tuple[int, int], Tensor] = {}  # likewise, and of the last ones of groups
        self.groups: dict[int, list[range]] = {}  # by stage
        self.memory = StageMemory()
        self.caches: list[CountingCache] = []

    @property
    def data_dependent(self) -> bool:
        return self.method.data_dependent

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return self.method.forecast(model, schedule, guided, kept)

    def start(self, setup: RunSetup) -> MethodRun:
        self.schedule, self.caches = setup.schedule, []
        self.run = self.method.start(setup)
        return TraceRun(self, self.run)


@dataclass(frozen=True)
class TraceRun(MethodRun):
    """Runs the trace's method and records its calls."""

    trace: Trace
    run: MethodRun

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        trace = self.trace
        plan = self.run.plan(stage, planned, counts)
        trace.groups[stage.index] = [span.layers for span in plan.spans]
        grouped = {layer for layers in trace.groups[stage.index] for layer in layers}
        return replace(
            plan,
            skip=plan.skip or (trace.stages is not None and stage.index >= trace.stages),
            spans=tuple(TracedSpan(span, trace) for span in plan.spans),
            observed=tuple(sorted({*plan.observed, *(layer for layer in trace.observed if layer not in grouped)})),
        )

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        return self.run.count(stage, canvas)

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        self.trace.first_inputs.append(x)
        return self.run.select_tokens(x, tokens)

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        if self.trace.noise:
            logits = logits + self.trace.noise * (2 * torch.rand(logits.shape, generator=self.trace.generator) - 1)
        return self.run.restore(logits, tokens)

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        stage = tokens.stage.index
        self.trace.inputs[stage, layer], self.trace.outputs[stage, layer] = tokens.unpack(before), tokens.unpack(after)
        self.run.observe(layer, before, after, tokens)

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        self.trace.caches.append(CountingCache(self.run.layer_cache(spec, workspace)))
        return self.trace.caches[-1]


class TracedSpan:
    """A span whose input and output are traced."""

    def __init__(self, span: Span, trace: Trace) -> None:
        self.span, self.trace = span, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.span, name)

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        out = self.span(blocks, x, tokens, ctx)
        stage, layers = tokens.stage.index, self.span.layers
        self.trace.inputs[stage, layers[0]], self.trace.outputs[stage, layers[-1]] = x, out
        self.trace.memory = ctx.memory
        return out


class CountingCache(LayerCache):
    """A layer cache that knows how many keys the latest stage has seen."""

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.lengths: list[int] = []  # keys that each stage has seen, with its own
        self.rows: list[int] = []  # that each stage has run

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> CacheView:
        view = self.cache.append(k, v, tokens)
        self.lengths.append(view.end)
        self.rows.append(view.keys.shape[0])
        return view

    def keep_rows(self, rows: slice) -> None:
        self.cache.keep_rows(rows)


class StageTrace:
    """Everything that `on_stage` shows: logits, ids, codes, canvas and the next stage's input."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.done: list[StageOutput] = []
        self.latents: list[Tensor] = []
        self.next_inputs: list[Tensor] = []

    def __call__(self, preview: Preview) -> None:
        done = preview.done
        if done.skipped:
            return
        self.done.append(done)
        self.latents.append(preview.canvas.latent)
        if not done.stage.last:
            seen = preview.canvas.input(self.schedule[done.stage.index + 1])
            assert seen is not None
            self.next_inputs.append(seen)


class TracedRng(SharedRng):
    """A generator whose exponential numbers are kept."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator)
        self.exponentials: list[Tensor] = []

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        self.exponentials.append(super().exponential(shape, device))
        return self.exponentials[-1]


class Call(NamedTuple):
    inputs: tuple[Any, ...]
    output: Any


@contextmanager
def calls_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Traces every call of some modules, in order, while the context is open."""
    seen: dict[str, list[Call]] = {name: [] for name in modules}
    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: seen[name].append(Call(inputs, output)))
        for name, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def outputs_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Traces every output of some modules, in order; the lists are complete when the context is closed."""
    outputs: dict[str, list[Tensor]] = {}
    with calls_of(modules) as seen:
        yield outputs
    outputs.update({name: [call.output for call in calls] for name, calls in seen.items()})


@contextmanager
def calls_to(owner: Any, name: str) -> Iterator[list[Call]]:
    """Traces every call of a function that a module finds under its name, in order, while the context is open."""
    seen: list[Call] = []
    function = getattr(owner, name)

    def traced(*inputs: Any) -> Any:
        seen.append(Call(inputs, function(*inputs)))
        return seen[-1].output

    with mock.patch.object(owner, name, traced):
        yield seen
