"""Several methods in one request: their plans are merged, and each selects among the tokens that the previous ones kept."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache import CacheSpec, LayerCache, Workspace
from ..errors import SettingError
from ..stage import Schedule, Stage, Tokens
from .method import (
    Method,
    MethodRun,
    Plans,
    Restored,
    RunSetup,
    StagePlan,
    TokenCounts,
    forecast_of,
    restored_by,
    run_of,
    selected_by,
    shown,
)

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel


REFUSAL, ADVICE = "cannot be combined:", "choose one of the methods, or other stages for one of them"


def merged(plans: Sequence[StagePlan], stage: int, names: str) -> StagePlan:
    """Returns the plans of several methods for a stage in one; conflicts raise SettingError."""
    try:
        return reduce(StagePlan.merge, plans)
    except ValueError as error:
        raise SettingError(f"{names} {REFUSAL} at stage {stage} {error}; {ADVICE}.") from error


def source(plans: Sequence[StagePlan], stage: int, name: Hashable) -> int | None:
    """Returns the last stage before `stage` whose spans store `name`; None if there is none."""
    return next((earlier for earlier in reversed(range(stage)) if name in plans[earlier].stores), None)


def require_sources(alone: Sequence[StagePlan], together: Sequence[StagePlan], data_dependent: bool, names: str) -> None:
    """Raises SettingError unless a method, planned `alone`, reads and observes the same stages when all methods run together.

    A data-dependent method runs all cells if it has observed nothing.
    """
    for stage, plan in enumerate(alone):
        observed = [earlier for earlier in range(stage) if alone[earlier].observed and not data_dependent]
        if plan.num_tokens and not together[stage].skip and observed and all(together[earlier].skip for earlier in observed):
            raise SettingError(f"{names} {REFUSAL} stage {stage} chooses cells by stages {observed}, which all are skipped; {ADVICE}.")
        for span in () if together[stage].skip else plan.spans:
            for name in span.needs:
                expected, found = source(alone, stage, name), source(together, stage, name)
                if found is None or expected not in (None, found):
                    needed = (
                        "no stage before it stores"
                        if expected is None
                        else f"stage {expected} computes, and another method skips or replaces"
                    )
                    raise SettingError(f"{names} {REFUSAL} at stage {stage} the span {shown(span)} needs what {needed}; {ADVICE}.")


@dataclass(frozen=True)
class Combined(Method):
    """Several methods in one run.

    Skipping stages or dropping a cfg branch combines with everything, and one method may reduce whole stages in which another has spans.
    Two methods that reduce whole stages or have spans on the same blocks are refused before anything runs. So is a method that skips a
    stage whose outputs another needs.
    """

    methods: tuple[Method, ...]
    exclusive: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if alone := [method.label for method in self.methods if "alone" in method.exclusive]:
            raise SettingError(f"{alone[0]} cannot be combined with other methods: use it alone.")
        every = (method.methods if isinstance(method, Combined) else (method,) for method in self.methods)
        object.__setattr__(self, "methods", tuple(chain.from_iterable(every)))
        object.__setattr__(self, "exclusive", frozenset().union(*(method.exclusive for method in self.methods)))

    @property
    def label(self) -> str:
        return " + ".join(method.label for method in self.methods)

    @property
    def data_dependent(self) -> bool:
        return any(method.data_dependent for method in self.methods)

    @property
    def capturable(self) -> bool:
        return all(method.capturable for method in self.methods)

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        names = " and ".join(type(method).__name__ for method in self.methods)
        for kind in sorted(self.exclusive):
            several = [type(method).__name__ for method in self.methods if kind in method.exclusive]
            if len(several) > 1:
                raise SettingError(f"{names} {REFUSAL} each of {' and '.join(several)} changes {kind}; {ADVICE}.")
        forecasts = [forecast_of(method, model, schedule, guided, kept) for method in self.methods]
        together = tuple(merged(plans, stage, names) for stage, plans in enumerate(zip(*forecasts, strict=True)))
        for method, alone in zip(self.methods, forecasts, strict=True):
            require_sources(alone, together, method.data_dependent, names)
        return together

    def start(self, setup: RunSetup) -> MethodRun:
        return CombinedRun(tuple(run_of(method, setup) for method in self.methods))


@dataclass(frozen=True)
class CombinedRun(MethodRun):
    """One run of each method. Each selects among the tokens that the previous ones kept, and restores them in the reverse order."""

    runs: tuple[MethodRun, ...]

    def __copy__(self) -> CombinedRun:
        return CombinedRun(tuple(map(copy.copy, self.runs)))

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """Returns the counts of the run that reduces stages. Calls all runs, since each may prepare the stage here."""
        counts = [run.count(stage, canvas) for run in self.runs]
        return next((count for count in counts if count is not None), None)

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        for run in self.runs:
            planned = run.plan(stage, planned, counts)
        return planned

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        for run in self.runs:
            tokens = selected_by(run, x, tokens)
        return tokens

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        for run in self.runs:
            run.observe(layer, before, after, tokens)

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        source = None
        for run in reversed(self.runs):
            logits, tokens, own = restored_by(run, logits, tokens)
            source = source if own is None else own
        return Restored(logits, tokens, source)

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        own = [run for run in self.runs if type(run).layer_cache is not MethodRun.layer_cache]
        return (own or self.runs)[0].layer_cache(spec, workspace)

    def state(self) -> list[Tensor]:
        return [tensor for run in self.runs for tensor in run.state()]
