"""What `nextscale plan` works out: cost and memory of a method beside those of dense generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..generate import check_cache
from ..loading.presets import model_spec, require_shared_tokenizer, smaller_models
from ..loading.without_weights import without_weights
from ..methods.code import CoDe, Partner, pair_cost, pair_memory, partner_name, require_pair
from ..methods.method import DENSE, Method
from ..models.base import NextScaleModel
from ..planning.cost import RequestCost, StageCost, Workload, request_cost
from ..planning.memory import ASSUMED_KEPT, RequestMemory, request_memory, reserved_bytes, reserved_cache
from ..tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Memory:
    """Bytes. The first three are those of the KV cache."""

    reserved: int  # before a request with the method starts, text included
    dense: int  # that later stages read, with dense generation
    planned: int  # that later stages read, with the method
    method_peak: RequestMemory  # with what was reserved
    dense_peak: RequestMemory
    text_encoder: int = 0  # of its weights on a GPU, in none of the peaks

    @property
    def resident_peak(self) -> int:
        """The peak where the text encoder stays on the GPU."""
        return self.method_peak.peak + self.text_encoder

    @property
    def offloaded_peak(self) -> int:
        """The peak where the text encoder is there only while a prompt is encoded, before anything else is."""
        return max(self.method_peak.peak, self.encoding)

    @property
    def encoding(self) -> int:
        """While a prompt is encoded: all weights."""
        return self.method_peak.weights + self.text_encoder

    def to_dict(self) -> dict[str, Any]:
        peaks = {"method_peak": self.method_peak, "dense_peak": self.dense_peak}
        turns = {"encoding": self.encoding, "resident_peak": self.resident_peak, "offloaded_peak": self.offloaded_peak}
        return asdict(self) | {name: asdict(peak) | {"peak": peak.peak} for name, peak in peaks.items()} | turns


@dataclass(frozen=True)
class Forecast:
    model: str
    method: str
    workload: Workload
    keep_ratio: float | None  # None: the method is not data-dependent
    dense: RequestCost
    planned: RequestCost
    memory: Memory

    @property
    def thinned(self) -> bool:
        """Some blocks run fewer tokens than enter the first."""
        return any(stage.computed != stage.tokens for stage in self.planned.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        stages = zip(self.planned.stages, self.dense.stages, strict=True)
        return {
            "model": self.model,
            "method": self.method,
            "batch": self.workload.images,
            "guided": self.workload.guided,
            "keep_ratio": self.keep_ratio,
            "text_tokens": self.workload.text_tokens,
            "stages": [stage_facts(stage, dense) for stage, dense in stages],
            "dense": cost_facts(self.dense),
            "planned": cost_facts(self.planned),
            "share": self.planned.share(self.dense),
            "memory": self.memory.to_dict(),
        }


def forecast_of(
    name: str, model: NextScaleModel, tokenizer: Tokenizer, method: Method, workload: Workload, keep_ratio: float, text_encoder: int = 0
) -> Forecast:
    """`text_encoder`: bytes of its weights."""
    if isinstance(method, CoDe):
        return pair_forecast(name, model, tokenizer, method, workload)
    check_cache(model, method)
    schedule = workload.schedule
    plans = method.forecast(model, schedule, workload.guided, keep_ratio)
    reserved = method.forecast(model, schedule, workload.guided, max(keep_ratio, ASSUMED_KEPT))
    dense, planned = request_cost(model, workload), request_cost(model, workload, plans)
    rows = workload.images * (2 if workload.guided else 1)
    return Forecast(
        name,
        method.label,
        workload,
        keep_ratio if method.data_dependent else None,
        dense,
        planned,
        Memory(
            reserved_bytes(model, schedule, reserved, workload.images, rows, workload.text_tokens),
            model.cache_spec(schedule, rows).kept_bytes,
            reserved_cache(model, schedule, plans, workload.images, rows).kept_bytes,
            request_memory(model, tokenizer, workload, reserved),
            request_memory(model, tokenizer, workload),
            text_encoder,
        ),
    )


def pair_forecast(name: str, model: NextScaleModel, tokenizer: Tokenizer, method: CoDe, workload: Workload) -> Forecast:
    """What a large model drafts and a small one refines. The caches of one are gone when the other runs."""
    schedule, draft = workload.schedule, method.drafted(workload.schedule)
    partner = partner_name(name, method.refiner, smaller_models(model_spec(name)))
    require_shared_tokenizer(model_spec(name), model_spec(partner))
    refiner, its_tokenizer = without_weights(model_spec(partner), model.dtype, model.quantize)
    require_pair(Partner(name, model, tokenizer), Partner(partner, refiner, its_tokenizer))
    refiner.check_schedule(schedule)
    rows = workload.images * (2 if workload.guided else 1)
    plans, dense = method.forecast(model, schedule, workload.guided), (DENSE,) * len(schedule)
    both = ((model, plans), (refiner, dense)) if draft < len(schedule) else ((model, plans),)
    planned = pair_cost(model, refiner, workload, draft) if draft < len(schedule) else request_cost(model, workload)
    return Forecast(
        f"{name} + {partner}",
        method.label,
        workload,
        None,
        request_cost(model, workload),
        planned,
        Memory(
            max(reserved_bytes(one, schedule, own, workload.images, rows, workload.text_tokens) for one, own in both),
            model.cache_spec(schedule, rows).kept_bytes,
            max(reserved_cache(one, schedule, own, workload.images, rows).kept_bytes for one, own in both),
            pair_memory(model, refiner, tokenizer, workload, draft),
            request_memory(model, tokenizer, workload),
        ),
    )


def stage_facts(planned: StageCost, dense: StageCost) -> dict[str, Any]:
    stage = planned.stage
    return {
        "index": stage.index,
        "height": stage.height,
        "width": stage.width,
        "cells": stage.cells,
        "skipped": planned.skipped,
        "tokens": planned.tokens,
        "computed": planned.computed,
        "rows": planned.rows,
        "key_share": None if stage.last else planned.keys / dense.keys,
        "dense": dense.total,
        "planned": planned.total,
        "share": planned.share(dense),
    }


def cost_facts(cost: RequestCost) -> dict[str, int]:
    return {"linear": cost.linear, "attention": cost.attention, "head": cost.head, "total": cost.total}
