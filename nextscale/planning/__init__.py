"""Cost of a plan: MACs and memory, computed before anything runs and cached for later requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from ..methods.method import Method, Plans, StagePlan, forecast_of
from ..models.base import NextScaleModel
from ..stage import Schedule
from ..validation import is_hashable
from .cost import RequestCost, Workload, request_cost
from .memory import reserved_bytes

MAX_CACHED = 256  # results per function

Result = TypeVar("Result")


class Planner:
    """Cached forecasts, costs and memory sizes of one model. Methods and plans that are not hashable are recomputed each time."""

    def __init__(self, model: NextScaleModel) -> None:
        self._model = model
        # Lambdas instead of bound methods: a reference cycle would keep the weights in GPU memory until garbage collection.
        self._forecast = cached(lambda table, method, *request: forecast_of(method, model, *request))
        self._cost = cached(lambda workload, plans, counts: request_cost(model, workload, plans, dict(counts)))
        self._bytes = cached(lambda dtype, kv_dtype, *request: reserved_bytes(model, *request))

    def forecast(self, method: Method, schedule: Schedule, guided: bool) -> Plans:
        """Returns `Method.forecast`."""
        return self._forecast(self._model.rank_table, method, schedule, guided)

    def cost(
        self, workload: Workload, plans: Sequence[StagePlan] | None = None, counts: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> RequestCost:
        """Returns `request_cost`."""
        return self._cost(workload, plans and tuple(plans), tuple((stage, tuple(own)) for stage, own in counts.items()))

    def reserved_bytes(self, schedule: Schedule, plans: Plans, images: int, rows: int, text_tokens: int) -> int:
        """Returns `reserved_bytes` for the model's current dtypes."""
        return self._bytes(self._model.dtype, self._model.kv_dtype, schedule, plans, images, rows, text_tokens)


def cached(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function with an LRU cache; calls with unhashable arguments bypass it."""
    known = lru_cache(MAX_CACHED)(function)
    return lambda *given: known(*given) if is_hashable(given) else function(*given)
