"""What planning has worked out for a model, remembered: it follows from settings alone, and requests of one kind come again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..methods.method import Method, Plans, StagePlan
from ..models.base import NextScaleModel
from ..stage import Schedule
from ..validation import is_hashable
from .cost import RequestCost, Workload, request_cost
from .memory import reserved_bytes

if TYPE_CHECKING:
    import torch

KEPT = 256  # of each kind


class Planning:
    """Forecasts, costs and bytes of requests of one model. Methods and plans that have no hash are planned anew each time."""

    def __init__(self, model: NextScaleModel) -> None:
        self._model = model
        self._rank_table = model.rank_table
        # Not of bound methods: a cycle would keep the weights on the device until the garbage collector comes.
        self._forecast = lru_cache(KEPT)(partial(make_forecast, model))
        self._cost = lru_cache(KEPT)(partial(count_cost, model))
        self._bytes = lru_cache(KEPT)(partial(count_bytes, model))

    def forecast(self, method: Method, schedule: Schedule, guided: bool, kept: float) -> Plans:
        """What `Method.forecast` says."""
        if self._model.rank_table is not self._rank_table:  # forecasts may follow it
            self._rank_table = self._model.rank_table
            self._forecast.cache_clear()
        return (self._forecast if is_hashable(method) else self._forecast.__wrapped__)(method, schedule, guided, kept)

    def cost(
        self, workload: Workload, plans: Sequence[StagePlan] | None = None, counts: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> RequestCost:
        """What `request_cost` says."""
        known, counted = None if plans is None else tuple(plans), tuple((stage, tuple(own)) for stage, own in counts.items())
        return (self._cost if is_hashable(known) else self._cost.__wrapped__)(workload, known, counted)

    def reserved_bytes(self, schedule: Schedule, plans: Plans, images: int, rows: int, text_tokens: int) -> int:
        """What `reserved_bytes` says of the model as it is now."""
        count = self._bytes if is_hashable(plans) else self._bytes.__wrapped__
        return count(schedule, plans, images, rows, text_tokens, self._model.dtype, self._model.kv_dtype)


def make_forecast(model: NextScaleModel, method: Method, schedule: Schedule, guided: bool, kept: float) -> Plans:
    return method.forecast(model, schedule, guided, kept)


def count_cost(
    model: NextScaleModel, workload: Workload, plans: Plans | None, counts: tuple[tuple[int, tuple[int, ...]], ...]
) -> RequestCost:
    return request_cost(model, workload, plans, dict(counts))


def count_bytes(
    model: NextScaleModel,
    schedule: Schedule,
    plans: Plans,
    images: int,
    rows: int,
    text_tokens: int,
    dtype: torch.dtype,
    kv_dtype: str | None,
) -> int:
    """`dtype` and `kv_dtype` are the model's, which may change."""
    return reserved_bytes(model, schedule, plans, images, rows, text_tokens)
