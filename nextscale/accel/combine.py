"""Several methods at once: plans are merged, and every method sees what the ones before it have left."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache import CacheSpec, LayerCache, Workspace
from ..errors import SettingError
from ..stage import Schedule, Stage, Tokens
from .method import Method, RunSetup, StagePlan

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel


def merged(plans: Sequence[StagePlan], stage: int) -> StagePlan:
    try:
        return reduce(StagePlan.merge, plans)
    except ValueError as error:
        raise SettingError(f"these methods cannot be combined: at stage {stage} {error}") from error


def source(plans: Sequence[StagePlan], stage: int, name: Hashable) -> int | None:
    """The stage whose spans have stored `name` last when `stage` runs; None if none has."""
    return next((earlier for earlier in reversed(range(stage)) if name in plans[earlier].stores), None)


def require_sources(alone: Sequence[StagePlan], together: Sequence[StagePlan]) -> None:
    """SettingError unless the spans of a method, planned `alone`, read the same stages when all methods run together."""
    for stage, plan in enumerate(alone):
        for span in () if together[stage].skip else plan.spans:
            for name in getattr(span, "needs", ()):
                expected, found = source(alone, stage, name), source(together, stage, name)
                if found is not None and expected in (None, found):
                    continue
                if expected is None:
                    reason = "needs what no stage before it stores"
                elif together[expected].skip:
                    reason = f"needs what stage {expected} computes, and another method skips that stage"
                else:
                    reason = f"needs what stage {expected} computes, and another method puts its own of stage {found} in place of it"
                raise SettingError(
                    f"these methods cannot be combined: at stage {stage} the span {span.layers} ({span.key}) {reason};"
                    " choose one of the methods, or other stages for one of them"
                )


@dataclass(frozen=True)
class Combined(Method):
    """What can be combined is: leaving out stages or a guidance branch with anything, one method that reduces whole stages with spans
    of another inside. Two methods that reduce whole stages, or run the same blocks their own way, are refused before anything runs, and so
    is one that skips a stage whose outputs another needs."""

    methods: tuple[Method, ...]

    @property
    def label(self) -> str:
        return " + ".join(method.label for method in self.methods)

    @property
    def data_dependent(self) -> bool:
        return any(method.data_dependent for method in self.methods)

    @property
    def capturable(self) -> bool:
        return all(method.capturable for method in self.methods)

    def fork(self) -> Method:
        return Combined(tuple(method.fork() for method in self.methods))

    def start(self, setup: RunSetup) -> Method:
        for kept in (1.0, 0.5):  # conflicts may show only where tokens are left out
            self.forecast(setup.model, setup.schedule, kept)
        return Combined(tuple(method.start(setup) for method in self.methods))

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        self._require_one("reduces whole stages", "enter")
        self._require_one("keeps keys and values its own way", "layer_cache")
        forecasts = [method.forecast(model, schedule, kept) for method in self.methods]
        together = tuple(merged(plans, stage) for stage, plans in enumerate(zip(*forecasts, strict=True)))
        for alone in forecasts:
            require_sources(alone, together)
        return together

    def _require_one(self, what: str, hook: str) -> None:
        changed = [type(method).__name__ for method in self.methods if method.changes(hook)]
        if len(changed) > 1:
            raise SettingError(f"these methods cannot be combined: each of {' and '.join(changed)} {what}; choose one of them")

    def changes(self, hook: str) -> bool:
        return any(method.changes(hook) for method in self.methods)

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return merged([method.plan(stage, canvas) for method in self.methods], stage.index)

    def count_tokens(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        return next((counts for method in self.methods if (counts := method.count_tokens(stage, canvas)) is not None), None)

    def set_counts(self, fewest: int, num_tokens: int) -> None:
        for method in self.methods:
            method.set_counts(fewest, num_tokens)

    def plan_from_counts(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return merged([method.plan_from_counts(stage, canvas) for method in self.methods], stage.index)

    def state_tensors(self) -> list[Tensor]:
        return [tensor for method in self.methods for tensor in method.state_tensors()]

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        for method in self.methods:
            x, tokens = method.reduce(x, tokens)
        return x, tokens

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        for method in self.methods:
            method.observe(layer, before, after, tokens)

    def restore(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        for method in reversed(self.methods):
            out, tokens = method.restore(out, tokens)
        return out, tokens

    def restore_residual(self, residual: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        for method in reversed(self.methods):
            residual, tokens = method.restore_residual(residual, tokens)
        return residual, tokens

    def compute_mask(self, stage: Stage) -> Tensor | None:
        shares = [share for method in self.methods if (share := method.compute_mask(stage)) is not None]
        return reduce(Tensor.mul, shares) if shares else None

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        own = next((method for method in self.methods if method.changes("layer_cache")), Method())
        return own.layer_cache(spec, workspace)
