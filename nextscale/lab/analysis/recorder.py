"""A method that changes nothing and lets others look at every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ...accel.method import Method, RunSetup, StagePlan
from ...models.base import NextScaleModel
from ...stage import Schedule, Stage, Tokens

if TYPE_CHECKING:
    from ...canvas import Canvas

Watch = Callable[[Stage, int, Tensor, Tensor], None]
"""Stage, block, its input and output [B, cells, C]: the rows with the prompt only, without text tokens."""


@dataclass(frozen=True)
class Recorder(Method):
    """Dense generation. Nothing is kept here: a stage's hidden states are gone unless a watcher copies them."""

    watchers: tuple[Watch, ...]
    layers: tuple[int, ...] = ()
    batch: int = 0

    def start(self, setup: RunSetup) -> Recorder:
        return Recorder(self.watchers, tuple(range(len(setup.model.blocks))), setup.batch)

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        return (StagePlan(taps=tuple(range(len(model.blocks)))),) * len(schedule)

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return StagePlan(taps=self.layers)

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        before, after = (tokens.on_grid(x)[0][: self.batch] for x in (before, after))
        for watch in self.watchers:
            watch(tokens.stage, layer, before, after)
