"""Watches a generation through the library's own hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from nextscale import Method, Preview, Schedule, Stage, StagePlan, Tokens
from nextscale.accel.method import MethodRun, Plans, RunSetup, Span
from nextscale.cache import CacheSpec, Env, LayerCache, StageMemory, Workspace
from nextscale.canvas import Canvas
from nextscale.generate import StageDone
from nextscale.models import NextScaleModel
from nextscale.models.blocks import Block
from nextscale.sampling import SharedRng


class Recorder(Method):
    """Block inputs and outputs per stage. `stages`: how many to run, the rest is skipped. `noise`: added to the guided logits.

    `method`: what runs meanwhile. Of blocks that it runs as a group the input of the first and the output of the last one are seen.
    """

    def __init__(
        self,
        taps: Sequence[int] = (),
        stages: int | None = None,
        noise: float = 0.0,
        noise_seed: int = 0,
        method: Method | None = None,
    ) -> None:
        self.noise = noise
        self.generator = torch.Generator().manual_seed(noise_seed)
        self.taps = tuple(sorted(set(taps)))
        self.stages = stages
        self.method = Method() if method is None else method
        self.first_inputs: list[Tensor] = []
        self.inputs: dict[tuple[int, int], Tensor] = {}  # (stage, layer) of the tapped layers, and of the first ones of groups
        self.outputs: dict[tuple[int, int], Tensor] = {}  # likewise, and of the last ones of groups
        self.groups: dict[int, list[range]] = {}  # by stage
        self.memory = StageMemory()
        self.caches: list[CountingCache] = []

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return self.method.forecast(model, schedule, guided, kept)

    def start(self, setup: RunSetup) -> MethodRun:
        return RecorderRun(self, self.method.start(setup))


@dataclass(frozen=True)
class RecorderRun(MethodRun):
    """Runs what the recorder's method would, and notes it."""

    recorder: Recorder
    run: MethodRun

    def plan(self, planned: StagePlan, stage: Stage, canvas: Canvas) -> StagePlan:
        recorder = self.recorder
        plan = self.run.plan(planned, stage, canvas)
        recorder.groups[stage.index] = [span.layers for span in plan.spans]
        grouped = {layer for layers in recorder.groups[stage.index] for layer in layers}
        return replace(
            plan,
            skip=plan.skip or (recorder.stages is not None and stage.index >= recorder.stages),
            spans=tuple(ObservedSpan(span, recorder) for span in plan.spans),
            taps=tuple(layer for layer in recorder.taps if layer not in grouped),
        )

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        self.recorder.first_inputs.append(x)
        return self.run.reduce(x, tokens)

    def restore(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        if self.recorder.noise:
            out = out + self.recorder.noise * (2 * torch.rand(out.shape, generator=self.recorder.generator) - 1)
        return self.run.restore(out, tokens)

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        stage = tokens.stage.index
        self.recorder.inputs[stage, layer], self.recorder.outputs[stage, layer] = before, after

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        self.recorder.caches.append(CountingCache(self.run.layer_cache(spec, workspace)))
        return self.recorder.caches[-1]


class ObservedSpan:
    def __init__(self, span: Span, recorder: Recorder) -> None:
        self.span, self.recorder = span, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.span, name)

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        out = self.span(blocks, x, tokens, env)
        stage, layers = tokens.stage.index, self.span.layers
        self.recorder.inputs[stage, layers[0]], self.recorder.outputs[stage, layers[-1]] = x, out
        self.recorder.memory = env.memory
        return out


class CountingCache:
    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.length = 0  # keys that the last stage so far has seen

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        keys, values, mask = self.cache.append(q, k, v, tokens)
        self.length = keys.shape[1]
        return keys, values, mask

    def keep_rows(self, rows: slice) -> None:
        self.cache.keep_rows(rows)


class Watch:
    """What `on_stage` shows, kept: logits, ids, codes, canvas and the next stage's input."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.done: list[StageDone] = []
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


class RecordingDraws(SharedRng):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator)
        self.drawn: list[Tensor] = []

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        self.drawn.append(super().exponential(shape, device))
        return self.drawn[-1]


class Call(NamedTuple):
    inputs: tuple[Any, ...]
    output: Any


@contextmanager
def calls_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Every call of some modules, in order, while the block runs."""
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
    """Every output of some modules, in order; complete when the block has ended."""
    outputs: dict[str, list[Tensor]] = {}
    with calls_of(modules) as seen:
        yield outputs
    outputs.update({name: [call.output for call in calls] for name, calls in seen.items()})


@contextmanager
def calls_to(owner: Any, name: str) -> Iterator[list[Call]]:
    """Every call of a function that a module finds under its name, in order, while the block runs."""
    seen: list[Call] = []
    function = getattr(owner, name)

    def noted(*inputs: Any) -> Any:
        seen.append(Call(inputs, function(*inputs)))
        return seen[-1].output

    with mock.patch.object(owner, name, noted):
        yield seen
