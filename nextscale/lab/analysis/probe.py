"""A method that changes nothing and shows the hidden states of a request."""

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
"""Called with the stage, the block, its input and its output [R, cells, C]: rows with the prompt first, without text tokens."""


@dataclass(frozen=True)
class FeatureProbe(Method):
    """Dense generation that shows blocks at work. A stage's hidden states are gone afterwards unless a watcher copies them."""

    watchers: tuple[Watch, ...]
    layers: tuple[int, ...] | None = None  # blocks to look at; None: all
    stages: frozenset[int] | None = None  # stages to look at; None: all

    @property
    def capturable(self) -> bool:
        """A captured graph would call no watcher."""
        return False

    def start(self, setup: RunSetup) -> Method:
        return _ProbeRun(self.watchers, self.forecast(setup.model, setup.schedule))

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        layers = tuple(range(len(model.blocks))) if self.layers is None else self.layers
        watched = {stage.index for stage in schedule} if self.stages is None else self.stages
        return tuple(StagePlan(taps=layers if stage.index in watched else ()) for stage in schedule)


@dataclass(frozen=True)
class _ProbeRun(Method):
    watchers: tuple[Watch, ...]
    plans: tuple[StagePlan, ...]

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return self.plans[stage.index]

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        before, after = (tokens.on_grid(x)[0] for x in (before, after))
        for watch in self.watchers:
            watch(tokens.stage, layer, before, after)
