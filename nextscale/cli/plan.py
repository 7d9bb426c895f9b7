"""`nextscale plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..accel.code import PAIRS, CoDe
from ..accel.method import DENSE, Method
from ..collaborate import pair_cost, pair_memory
from ..errors import SettingError
from ..guidance import GuidedRows
from ..lab.evals.methods import parse_methods
from ..loading.beside import local_weights, rank_table_of
from ..loading.presets import build_model, build_tokenizer, model_spec
from ..models.base import NextScaleModel
from ..models.quantization import quantize_blocks
from ..pipeline import Settings
from ..planning.cost import RequestCost, StageCost, Workload, request_cost
from ..planning.memory import ASSUMED_KEPT, RequestMemory, request_memory, reserved_bytes, reserved_cache
from ..stage import Schedule
from ..tokenizers.base import Tokenizer
from .groups import grouped
from .options import DEFAULT_MODEL, DTYPES, CombinedMethods, Dtype, ModelName, QuantizeName, SizeOptions, as_quantize, as_torch_dtype
from .parse import settled_method
from .program import app

NOT_COUNTED = (
    "Not counted: text encoder and prompt, canvas, decoding, and how a method selects and restores tokens, such as SparseVAR's search for"
    " anchors; the matrix products with which StageVAR, ToMe and PiToMe reduce tokens are counted."
)


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks for besides its size."""

    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Images per batch.")] = 1
    text_tokens: Annotated[
        int, typer.Option("--text-tokens", metavar="N", min=1, help="Tokens of a prompt, for models that attend to them.")
    ] = 64
    unguided: Annotated[bool, typer.Option("--unguided", help="Without guidance: one row per image.")] = False

    def workload(self, model: NextScaleModel, settings: Settings, schedule: Schedule) -> Workload:
        guided = not self.unguided and GuidedRows(settings.guidance, schedule, len(model.blocks)).needs_both
        read = self.text_tokens if model.stack[0].has_text else 0
        return Workload(schedule, self.batch, guided, read, settings.sampling.refine)


@app.command()
@grouped
def plan(
    *,
    model: ModelName = DEFAULT_MODEL,
    method: CombinedMethods = None,
    size: SizeOptions,
    request: RequestOptions,
    keep_ratio: Annotated[
        float,
        typer.Option(
            "--keep-ratio",
            metavar="SHARE",
            min=0,
            max=1,
            help="Share of the tokens assumed to be computed where a method is data-dependent.",
        ),
    ] = 0.5,
    dtype: Annotated[Dtype, typer.Option("--dtype", metavar="DTYPE", help=f"Type of weights, keys and values: {DTYPES}.")] = Dtype.bfloat16,
    quantize: QuantizeName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a method would compute, and its cost, without weights and without running anything."""
    spec, chosen = model_spec(model), parse_methods(*method or ())
    schedule = size.schedule(spec)
    with torch.device("meta"):
        built, tokenizer = build_model(spec.model), build_tokenizer(spec.tokenizer)
    for module in (built, tokenizer):
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if name.startswith(module.float32) else as_torch_dtype(dtype))
    if (form := as_quantize(quantize)) is not None:
        quantize_blocks(built, form)
    built.check_schedule(schedule)
    built.rank_table = rank_table_of(built, weights) if (weights := local_weights(spec)) else None
    workload = request.workload(built, spec.settings, schedule)
    settled = settled_method(chosen, spec, schedule, request.batch)
    forecast = forecast_of(spec.name, built, tokenizer, settled, workload, keep_ratio)
    if as_json:
        typer.echo(json.dumps(forecast.to_dict(), indent=2))
    else:
        show(forecast)


@dataclass(frozen=True)
class Memory:
    """Bytes of a request; the first three are those of the KV cache."""

    reserved: int  # before a request with the method starts, text included
    dense: int  # that later stages read, with dense generation
    planned: int  # that later stages read, with the method
    method_peak: RequestMemory  # with what was reserved
    dense_peak: RequestMemory

    def to_dict(self) -> dict[str, Any]:
        peaks = {"method_peak": self.method_peak, "dense_peak": self.dense_peak}
        return asdict(self) | {name: asdict(peak) | {"peak": peak.peak} for name, peak in peaks.items()}


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
        """Whether some blocks run fewer tokens than enter the first."""
        return any(stage.computed != stage.tokens for stage in self.planned.stages)

    def to_dict(self) -> dict[str, Any]:
        """The forecast as plain values, for JSON."""
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


def forecast_of(name: str, model: NextScaleModel, tokenizer: Tokenizer, method: Method, workload: Workload, keep_ratio: float) -> Forecast:
    if isinstance(method, CoDe):
        return pair_forecast(name, model, tokenizer, method, workload)
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
        ),
    )


def pair_forecast(name: str, model: NextScaleModel, tokenizer: Tokenizer, method: CoDe, workload: Workload) -> Forecast:
    """What a large model drafts and a small one refines. The caches of one are gone when the other runs."""
    schedule, draft = workload.schedule, method.drafted(workload.schedule)
    partner = PAIRS.get(name) if method.refiner is None else method.refiner
    if partner is None:
        raise SettingError(f"CoDe: no smaller model is known for {name}: name one, as in code:refiner=var-d16")
    with torch.device("meta"):
        refiner = build_model(model_spec(partner).model)
    for known, parameter in refiner.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if known.startswith(refiner.float32) else model.dtype)
    if model.quantize is not None:
        quantize_blocks(refiner, model.quantize)
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


# --- as a table


def show(forecast: Forecast) -> None:
    console = Console(highlight=False)
    workload = forecast.workload
    rows = "guided (two rows per image)" if workload.guided else "unguided"
    console.print(f"[bold]{forecast.model}[/bold], batch {workload.images}, {rows}; method: {escape(forecast.method)}")
    if forecast.keep_ratio is not None:
        share = percent(forecast.keep_ratio)
        console.print(f"Assumed: {share} of the tokens are computed where the method is data-dependent (--keep-ratio).")
    if workload.text_tokens:
        console.print(f"Assumed: {workload.text_tokens} text tokens (--text-tokens).")
    console.print(stage_table(forecast))
    if forecast.thinned:
        console.print("Computed is the mean over all sublayers: some run fewer tokens than enter, and the head sees those that entered.")
    dense, planned = forecast.dense, forecast.planned
    parts = [("linear layers", planned.linear, dense.linear), ("attention", planned.attention, dense.attention)]
    shares = [f"{name} {percent(part / whole)}" for name, part, whole in [*parts, ("heads", planned.head, dense.head)]]
    console.print(f"Dense, planned: MACs of this request. Planned relative to dense: {', '.join(shares)}.")
    console.print(NOT_COUNTED)
    memory = forecast.memory
    console.print(
        f"KV cache: {gib(memory.reserved)} are reserved, text included; later stages read {gib(memory.planned)} of it,"
        f" with dense generation {gib(memory.dense)}."
    )
    if forecast.keep_ratio is not None:
        console.print(f"It is reserved for {percent(ASSUMED_KEPT)} of the tokens where the method is data-dependent, and grows if needed.")
    peak = memory.method_peak
    console.print(
        f"Peak memory: about {gib(peak.peak)}, dense {gib(memory.dense_peak.peak)}: weights {gib(peak.weights)} without the text encoder,"
        f" and the larger of {gib(peak.generating)} for the stages (KV cache and activations) and {gib(peak.decoding)} for decoding."
    )


def stage_table(forecast: Forecast) -> Table:
    table = Table("stage", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    dense, planned = forecast.dense, forecast.planned
    early = [(stage.keys, same.keys) for stage, same in zip(planned.stages, dense.stages, strict=True) if not stage.stage.last]
    later_keys, all_keys = (sum(keys) for keys in zip(*early, strict=True)) if early else (0, 0)
    totals = {
        "grid": "",
        "tokens": str(sum(stage.stage.cells for stage in planned.stages)),
        "computed": str(round(sum(stage.computed for stage in planned.stages))),
        "rows": "",
        "keys": percent(later_keys / all_keys) if all_keys else "",
        "dense": short(dense.total),
        "planned": short(planned.total),
        "share": percent(planned.share(dense)),
    }
    table.columns[0].footer = "all"
    for heading, total in totals.items():
        table.add_column(heading, total, justify="right")
    for stage, same in zip(planned.stages, dense.stages, strict=True):
        size = stage.stage
        table.add_row(
            str(size.index),
            f"{size.height}x{size.width}",
            str(size.cells),
            "skipped" if stage.skipped else str(round(stage.computed)),
            str(stage.rows),
            "" if size.last else percent(stage.keys / same.keys),  # nothing reads the last stage's keys again
            short(same.total),
            short(stage.total),
            percent(stage.share(same)),
        )
    return table


def short(number: int) -> str:
    """Three digits and a unit."""
    if number == 0:
        return "0"
    value, units = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{f'{value:#.3g}'.rstrip('.')} {units[0]}".strip()


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
