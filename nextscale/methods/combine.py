"""Several methods at once: their plans are merged, and every method sees the tokens that the ones before it have kept."""

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
from .method import Method, MethodRun, Plans, Restored, RunSetup, StagePlan, TokenCounts

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel


def merged(plans: Sequence[StagePlan], stage: int) -> StagePlan:
    """Returns the plans of several methods for a stage in one; conflicts raise SettingError."""
    try:
        return reduce(StagePlan.merge, plans)
    except ValueError as error:
        raise SettingError(f"these methods cannot be combined: at stage {stage} {error}") from error


def source(plans: Sequence[StagePlan], stage: int, name: Hashable) -> int | None:
    """Returns the last stage before `stage` whose spans store `name`; None if there is none."""
    return next((earlier for earlier in reversed(range(stage)) if name in plans[earlier].stores), None)


def require_sources(alone: Sequence[StagePlan], together: Sequence[StagePlan], data_dependent: bool) -> None:
    """Raises SettingError unless a method, planned `alone`, reads and observes the same stages when all methods run together.

    A data-dependent method runs all cells where it has observed nothing.
    """
    for stage, plan in enumerate(alone):
        observed = [earlier for earlier in range(stage) if alone[earlier].observed and not data_dependent]
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


KINDS = {
    "tokens": "reduces whole stages",
    "cache": "keeps keys and values its own way",
    "images": "chooses stages for each image",
}
"""What only one of several methods may do: see `Method.exclusive`."""


@dataclass(frozen=True)
class Combined(Method):
    """Several methods in one run.

    Skipping stages or dropping a cfg branch combines with everything, and one method may reduce whole stages in which another has spans.
    Two methods that reduce whole stages, or run the same blocks their own way, are refused before anything runs, and so is one that skips a
    stage whose outputs another needs.
    """

    methods: tuple[Method, ...]
    exclusive: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if alone := [method.label for method in self.methods if "alone" in method.exclusive]:
            raise SettingError(f"{alone[0]} cannot be combined with other methods: use it alone")
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
        self._require_compatible()
        forecasts = [method.forecast(model, schedule, guided, kept) for method in self.methods]
        together = tuple(merged(plans, stage) for stage, plans in enumerate(zip(*forecasts, strict=True)))
        for method, alone in zip(self.methods, forecasts, strict=True):
            require_sources(alone, together, method.data_dependent)
        return together

    def _require_compatible(self) -> None:
        for kind, reason in KINDS.items():
            several = [type(method).__name__ for method in self.methods if kind in method.exclusive]
            if len(several) > 1:
                raise SettingError(f"these methods cannot be combined: each of {' and '.join(several)} {reason}; choose one of them")
        if "images" in self.exclusive and ("tokens" in self.exclusive or self.data_dependent):
            names = [type(one).__name__ for one in self.methods if one.data_dependent or one.exclusive & {"images", "tokens"}]
            raise SettingError(
                f"these methods cannot be combined: {' and '.join(names)}: one chooses stages for each image, and the other has a state of"
                " the whole batch; choose one of them"
            )

    def start(self, setup: RunSetup) -> MethodRun:
        own_cache = [number for number, method in enumerate(self.methods) if "cache" in method.exclusive]
        return CombinedRun(tuple(method.start(setup) for method in self.methods), own_cache[0] if own_cache else None)


@dataclass(frozen=True)
class CombinedRun(MethodRun):
    """One run of each method. Each selects among the tokens that the ones before it have kept, and restores them in the reverse order."""

    runs: tuple[MethodRun, ...]
    own_cache: int | None  # position of the run that has a cache of its own

    def __copy__(self) -> CombinedRun:
        return CombinedRun(tuple(map(copy.copy, self.runs)), self.own_cache)

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """Returns the counts of the run that reduces stages. All are called, since a run may prepare the stage here."""
        counts = [run.count(stage, canvas) for run in self.runs]
        return next((count for count in counts if count is not None), None)

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        for run in self.runs:
            planned = run.plan(stage, planned, counts)
        return planned

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        for run in self.runs:
            tokens = run.select_tokens(x, tokens)
        return tokens

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        for run in self.runs:
            run.observe(layer, before, after, tokens)

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        source = None
        for run in reversed(self.runs):
            logits, tokens, own = run.restore(logits, tokens)
            source = source if own is None else own
        return Restored(logits, tokens, source)

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        run = MethodRun() if self.own_cache is None else self.runs[self.own_cache]
        return run.layer_cache(spec, workspace)

    def state(self) -> list[Tensor]:
        return [tensor for run in self.runs for tensor in run.state()]
