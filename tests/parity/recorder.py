"""Watches a generation through the library's own hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nextscale import Method, Preview, Schedule, Stage, StagePlan, Tokens
from nextscale.canvas import Canvas
from nextscale.generate import StageDone
from nextscale.sampling import SharedDraws


class Recorder(Method):
    """Block inputs and outputs per stage. `stages`: how many to run, the rest is skipped. `noise`: added to the guided logits."""

    def __init__(self, taps: Sequence[int] = (), stages: int | None = None, noise: float = 0.0, noise_seed: int = 0) -> None:
        self.noise = noise
        self.generator = torch.Generator().manual_seed(noise_seed)
        self.taps = tuple(sorted(set(taps)))
        self.stages = stages
        self.first_inputs: list[Tensor] = []
        self.inputs: dict[tuple[int, int], Tensor] = {}  # (stage, layer) of the tapped layers
        self.outputs: dict[tuple[int, int], Tensor] = {}

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return StagePlan(skip=self.stages is not None and stage.index >= self.stages, taps=self.taps)

    def enter(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        self.first_inputs.append(x)
        return x, tokens

    def leave(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        if self.noise:
            out = out + self.noise * (2 * torch.rand(out.shape, generator=self.generator) - 1)
        return out, tokens

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        self.inputs[tokens.stage.index, layer], self.outputs[tokens.stage.index, layer] = before, after


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


class RecordingDraws(SharedDraws):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator)
        self.drawn: list[Tensor] = []

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        self.drawn.append(super().exponential(shape, device))
        return self.drawn[-1]


class Call(NamedTuple):
    inputs: tuple[Any, ...]
    output: Tensor


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
