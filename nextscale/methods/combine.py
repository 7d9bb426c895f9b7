"""Several methods at once: their plans are merged, and every method sees the tokens that the ones before it have kept."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache import CacheSpec, LayerCache, Workspace
from ..errors import SettingError
from ..stage import Schedule, Stage, Tokens
from .code import CoDe
from .method import Method, MethodRun, Plans, RunSetup, StagePlan, TokenCounts

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel
    from .selection import SelectionContext


def merged(plans: Sequence[StagePlan], stage: int) -> StagePlan:
    """Returns the plans of several methods for a stage in one; conflicts raise SettingError."""
    try:
        return reduce(StagePlan.merge, plans)
    except ValueError as error:
        raise SettingError(f"these methods cannot be combined: at stage {stage} {error}") from error


def source(plans: Sequence[StagePlan], stage: int, name: Hashable) -> int | None:
    """Returns the last stage before `stage` whose spans store `name`; None if there is none."""
    return next((earlier for earlier in reversed(range(stage)) if name in plans[earlier].stores), None)


def require_sources(alone: Sequence[StagePlan], together: Sequence[StagePlan]) -> None:
    """Raises SettingError unless a method, planned `alone`, reads and observes the same stages when all methods run together."""
    for stage, plan in enumerate(alone):
        observed = [earlier for earlier in range(stage) if alone[earlier].observed]
        if plan.num_tokens and not together[stage].skip and observed and all(together[earlier].skip for earlier in observed):
            raise SettingError(
                f"these methods cannot be combined: stage {stage} chooses cells by stages {observed[0]} to {observed[-1]}, which all are"
                " skipped; skip others, or choose one of the methods"
            )
        for span in () if together[stage].skip else plan.spans:
            for name in span.needs:
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
    """Several methods at once.

    Skipping stages or dropping a cfg branch combines with everything, and one method may reduce whole stages in which another has spans.
    Two methods that reduce whole stages, or run the same blocks their own way, are refused before anything runs, and so is one that skips a
    stage whose outputs another needs.
    """

    methods: tuple[Method, ...]
    reduces_stages: bool = field(init=False, repr=False)
    own_cache: bool = field(init=False, repr=False)
    routes_images: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if choosing := [method.label for method in self.methods if method.chooses]:
            raise SettingError(f"{choosing[0]} chooses whole methods, combined ones among them: use it alone")
        if any(isinstance(method, CoDe) for method in self.methods):
            raise SettingError("CoDe runs two models one after the other and cannot be combined with other methods: use it alone")
        object.__setattr__(self, "reduces_stages", any(method.reduces_stages for method in self.methods))
        object.__setattr__(self, "own_cache", any(method.own_cache for method in self.methods))
        object.__setattr__(self, "routes_images", any(method.routes_images for method in self.methods))

    @property
    def label(self) -> str:
        return " + ".join(method.label for method in self.methods)

    @property
    def data_dependent(self) -> bool:
        return any(method.data_dependent for method in self.methods)

    @property
    def capturable(self) -> bool:
        return all(method.capturable for method in self.methods)

    def settle(self, situation: SelectionContext) -> Method:
        return Combined(tuple(method.settle(situation) for method in self.methods))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        self._require_one("reduces whole stages", [method for method in self.methods if method.reduces_stages])
        self._require_one("keeps keys and values its own way", [method for method in self.methods if method.own_cache])
        self._require_one("routes images", [method for method in self.methods if method.routes_images])
        self._require_stateless_beside_routes()
        forecasts = [method.forecast(model, schedule, guided, kept) for method in self.methods]
        together = tuple(merged(plans, stage) for stage, plans in enumerate(zip(*forecasts, strict=True)))
        for alone in forecasts:
            require_sources(alone, together)
        return together

    def _require_one(self, what: str, methods: Sequence[Method]) -> None:
        if len(methods) > 1:
            names = " and ".join(type(method).__name__ for method in methods)
            raise SettingError(f"these methods cannot be combined: each of {names} {what}; choose one of them")

    def _require_stateless_beside_routes(self) -> None:
        of_all = [method for method in self.methods if method.reduces_stages or method.data_dependent]
        if self.routes_images and of_all:
            names = " and ".join(type(method).__name__ for method in self.methods if method.routes_images or method in of_all)
            raise SettingError(
                f"these methods cannot be combined: {names}: one goes on with some images of a batch, and the other has a state of all"
            )

    def start(self, setup: RunSetup) -> MethodRun:
        return CombinedRun(self.methods, tuple(method.start(setup) for method in self.methods))


@dataclass(frozen=True)
class CombinedRun(MethodRun):
    """One run of each method. Each sees the tokens that the ones before it have kept, and restores them in the reverse order."""

    methods: tuple[Method, ...]
    runs: tuple[MethodRun, ...]

    def fork(self) -> MethodRun:
        return CombinedRun(self.methods, tuple(run.fork() for run in self.runs))

    @property
    def _router(self) -> int:
        """The place of the one that routes images; any other routes none."""
        return next((place for place, method in enumerate(self.methods) if method.routes_images), 0)

    def routing_inputs(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        return self.runs[self._router].routing_inputs(stage, canvas)

    def route(self, inputs: Tensor) -> Sequence[int]:
        return self.runs[self._router].route(inputs)

    def routes(self) -> Sequence[MethodRun]:
        router = self._router
        return [
            CombinedRun(self.methods, tuple(own if place == router else run.fork() for place, run in enumerate(self.runs)))
            for own in self.runs[router].routes()
        ]

    def count_tokens(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """Returns the counts of the one that reduces stages. All are called, since a run may prepare the stage here."""
        counts = [run.count_tokens(stage, canvas) for run in self.runs]
        return next((count for count in counts if count is not None), None)

    def set_counts(self, counts: TokenCounts) -> None:
        for run in self.runs:
            run.set_counts(counts)

    def packs(self, planned: StagePlan) -> bool:
        return any(run.packs(planned) for run in self.runs)

    def plan(self, planned: StagePlan, stage: Stage, canvas: Canvas) -> StagePlan:
        for run in self.runs:
            planned = run.plan(planned, stage, canvas)
        return planned

    def state_tensors(self) -> list[Tensor]:
        return [tensor for run in self.runs for tensor in run.state_tensors()]

    def constants(self) -> Collection[object]:
        return [run.constants() for run in self.runs]

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        for run in self.runs:
            x, tokens = run.reduce(x, tokens)
        return x, tokens

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        for run in self.runs:
            run.observe(layer, before, after, tokens)

    def restore(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        for run in reversed(self.runs):
            out, tokens = run.restore(out, tokens)
        return out, tokens

    def restore_hidden(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        for run in reversed(self.runs):
            x, tokens = run.restore_hidden(x, tokens)
        return x, tokens

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        own = (run for method, run in zip(self.methods, self.runs, strict=True) if method.own_cache)
        return next(own, MethodRun()).layer_cache(spec, workspace)
