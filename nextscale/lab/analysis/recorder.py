"""A method that changes nothing and lets others look at every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...accel.method import Method, MethodRun, Plans, RunSetup, StagePlan
from ...models.base import NextScaleModel
from ...stage import Schedule, Stage, Tokens

Watch = Callable[[Stage, int, Tensor, Tensor], None]
"""Stage, block, its input and output [B, cells, C]: the rows with the prompt only, without text tokens."""


@dataclass(frozen=True)
class Recorder(Method):
    """Dense generation. Nothing is kept here: a stage's hidden states are gone unless a watcher copies them."""

    watchers: tuple[Watch, ...]

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return (StagePlan(taps=tuple(range(len(model.blocks)))),) * len(schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        return RecorderRun(self.watchers, setup.batch)


@dataclass(frozen=True)
class RecorderRun(MethodRun):
    watchers: tuple[Watch, ...]
    batch: int

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        before, after = (tokens.on_grid(x)[0][: self.batch] for x in (before, after))
        for watch in self.watchers:
            watch(tokens.stage, layer, before, after)
