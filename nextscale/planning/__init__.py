"""What a plan costs: MACs and memory, counted before anything runs and remembered, since requests of one kind come again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from ..methods.method import Method, Plans, StagePlan
from ..models.base import NextScaleModel
from ..stage import Schedule
from ..validation import is_hashable
from .cost import RequestCost, Workload, request_cost
from .memory import reserved_bytes

MAX_REMEMBERED = 256  # of each kind

Result = TypeVar("Result")


class Planner:
    """Forecasts, costs and bytes of requests of one model. Methods and plans that have no hash are planned anew each time."""

    def __init__(self, model: NextScaleModel) -> None:
        self._model = model
        # Not of bound methods: a cycle would keep the weights on the device until the garbage collector comes.
        self._forecast = remember(lambda table, method, *request: method.forecast(model, *request))
        self._cost = remember(lambda workload, plans, counts: request_cost(model, workload, plans, dict(counts)))
        self._bytes = remember(lambda dtype, kv_dtype, *request: reserved_bytes(model, *request))

    def forecast(self, method: Method, schedule: Schedule, guided: bool) -> Plans:
        """What `Method.forecast` says."""
        return self._forecast(self._model.rank_table, method, schedule, guided)

    def cost(
        self, workload: Workload, plans: Sequence[StagePlan] | None = None, counts: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> RequestCost:
        """What `request_cost` says."""
        return self._cost(workload, plans and tuple(plans), tuple((stage, tuple(own)) for stage, own in counts.items()))

    def reserved_bytes(self, schedule: Schedule, plans: Plans, images: int, rows: int, text_tokens: int) -> int:
        """What `reserved_bytes` says of the model as it is now."""
        return self._bytes(self._model.dtype, self._model.kv_dtype, schedule, plans, images, rows, text_tokens)


def remember(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function with a cache, which arguments without a hash pass by."""
    known = lru_cache(MAX_REMEMBERED)(function)
    return lambda *given: known(*given) if is_hashable(given) else function(*given)
