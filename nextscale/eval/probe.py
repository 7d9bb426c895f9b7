"""A method that changes nothing and shows the hidden states of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..methods.method import Method, MethodRun, Plans, RunSetup, StagePlan
from ..models.base import NextScaleModel
from ..stage import Schedule, Stage, Tokens

Watch = Callable[[Stage, int, Tensor, Tensor], None]
"""Called with the stage, the block, its input and its output [R, cells, C]: rows with the prompt first, without text tokens."""


@dataclass(frozen=True)
class FeatureProbe(Method):
    """Dense generation that shows blocks at work. A stage's hidden states are gone afterwards unless a watcher copies them."""

    watchers: tuple[Watch, ...]
    layers: tuple[int, ...] | None = None  # blocks to look at; None: all
    stages: frozenset[int] | None = None  # stages to look at; None: all

    capturable = False  # a captured graph would call no watcher

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        layers = tuple(range(len(model.blocks))) if self.layers is None else self.layers
        watched = {stage.index for stage in schedule} if self.stages is None else self.stages
        return tuple(StagePlan(observed=layers if stage.index in watched else ()) for stage in schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        return ProbeRun(self.watchers)


@dataclass(frozen=True)
class ProbeRun(MethodRun):
    """One request of a probe."""

    watchers: tuple[Watch, ...]

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        before, after = (tokens.unpack(tokens.on_grid(x)[0]) for x in (before, after))
        for watch in self.watchers:
            watch(tokens.stage, layer, before, after)
