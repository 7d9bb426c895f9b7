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

from ..accel.method import Method
from ..guidance import GuidedRows
from ..lab.evals.methods import parse_methods
from ..loading.presets import build_model, build_tokenizer, model_spec
from ..models.base import NextScaleModel
from ..planning.cost import RequestCost, StageCost, Workload, request_cost
from ..planning.memory import ASSUMED_KEPT, RequestMemory, planned_cache, request_memory, reserved_bytes
from ..tokenizers.base import Tokenizer
from .options import Aspect, Dtype, ModelName, Sides, Size, as_torch_dtype, choose_schedule
from .program import app

NOT_COUNTED = (
    "Not counted: text encoder and prompt, canvas, decoding, and how a method chooses and restores tokens, such as SparseVAR's search for"
    " anchors; only the products with which StageVAR and ToMe make few tokens of many are."
)


@app.command()
def plan(
    model: ModelName,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            show_default="dense",
            help="A method with its settings, such as skip:last=2; given again, several at once.",
        ),
    ] = None,
    size: Size = None,
    aspect: Aspect = None,
    sides: Sides = None,
    images: Annotated[int, typer.Option(min=1, help="Images drawn at a time.")] = 1,
    kept: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the cells that is assumed to be kept where a method decides by the image.")
    ] = 0.5,
    text_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, for models that attend to them.")] = 64,
    unguided: Annotated[bool, typer.Option("--unguided", help="One row per image.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Type of weights, keys and values.")] = Dtype.bfloat16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a method would run, and what that costs, without weights and without running anything."""
    spec, chosen = model_spec(model), parse_methods(*method or ())
    schedule = choose_schedule(spec.settings.schedules, size, aspect, sides)
    with torch.device("meta"):
        built, tokenizer = build_model(spec.model), build_tokenizer(spec.tokenizer)
    for module in (built, tokenizer):
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if name.startswith(module.float32) else as_torch_dtype(dtype))
    built.check_schedule(schedule)
    guided = not unguided and GuidedRows(spec.settings.guidance, schedule, len(built.blocks)).needs_both
    read = text_tokens if built.stack[0].has_text else 0
    workload = Workload(schedule, images, guided, read, spec.settings.sampling.refine)
    forecast = forecast_of(spec.name, built, tokenizer, chosen, workload, kept)
    if as_json:
        typer.echo(json.dumps(forecast.to_dict(), indent=2))
    else:
        show(forecast)


@dataclass(frozen=True)
class Memory:
    """Bytes. The first three are keys and values."""

    reserved: int  # by a request with the method before it starts, text included
    dense: int  # kept for later stages by dense generation
    planned: int  # and by the method
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
    kept: float | None  # None: what is run does not depend on it
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
            "images": self.workload.images,
            "guided": self.workload.guided,
            "kept": self.kept,
            "text_tokens": self.workload.text_tokens,
            "stages": [stage_facts(stage, dense) for stage, dense in stages],
            "dense": cost_facts(self.dense),
            "planned": cost_facts(self.planned),
            "share": self.planned.share(self.dense),
            "memory": self.memory.to_dict(),
        }


def forecast_of(name: str, model: NextScaleModel, tokenizer: Tokenizer, method: Method, workload: Workload, kept: float) -> Forecast:
    schedule = workload.schedule
    plans, assumed = (method.forecast(model, schedule, share) for share in (kept, ASSUMED_KEPT))
    decides_by_image = method.forecast(model, schedule, 0.5) != method.forecast(model, schedule, 1.0)
    dense, planned = request_cost(model, workload), request_cost(model, workload, plans)
    rows = workload.images * (2 if workload.guided else 1)
    return Forecast(
        name,
        method.label,
        workload,
        kept if decides_by_image else None,
        dense,
        planned,
        Memory(
            reserved_bytes(model, schedule, method, assumed, workload.images, rows, workload.text_tokens),
            model.cache_spec(schedule, rows).kept_bytes,
            planned_cache(model, schedule, plans, workload.images, rows).kept_bytes,
            request_memory(model, tokenizer, workload, method.forecast(model, schedule, max(kept, ASSUMED_KEPT))),
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
    rows = "guided, two rows each" if workload.guided else "one row each"
    console.print(f"[bold]{forecast.model}[/bold], {workload.images} image(s), {rows}; method: {escape(forecast.method)}")
    if forecast.kept is not None:
        console.print(f"Assumed: {percent(forecast.kept)} of the cells are kept where the method decides by the image (--kept).")
    if workload.text_tokens:
        console.print(f"Assumed: {workload.text_tokens} tokens of text (--text-tokens).")
    console.print(stage_table(forecast))
    if forecast.thinned:
        console.print(
            "Run is the mean of all blocks and their parts: some run fewer tokens than enter, and the head sees those that entered."
        )
    dense, planned = forecast.dense, forecast.planned
    parts = [("linear layers", planned.linear, dense.linear), ("attention", planned.attention, dense.attention)]
    shares = [f"{name} {percent(part / whole)}" for name, part, whole in [*parts, ("heads", planned.head, dense.head)]]
    console.print(f"MACs of this request; of the dense ones: {', '.join(shares)}.")
    console.print(NOT_COUNTED)
    memory = forecast.memory
    console.print(
        f"Keys and values: {gib(memory.reserved)} are reserved, text included; for later stages the method keeps"
        f" {gib(memory.planned)} of dense generation's {gib(memory.dense)}."
    )
    if forecast.kept is not None:
        console.print(
            f"They are reserved for {percent(ASSUMED_KEPT)} of the cells where the method decides by the image, and grow if need be."
        )
    peak = memory.method_peak
    console.print(
        f"Peak memory: about {gib(peak.peak)}, dense {gib(memory.dense_peak.peak)}: weights {gib(peak.weights)}, without the text"
        f" encoder's, and {gib(peak.drawing)} for drawing, keys, values and activations together, or {gib(peak.decoding)} for decoding."
    )


def stage_table(forecast: Forecast) -> Table:
    table = Table("stage", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    dense, planned = forecast.dense, forecast.planned
    early = [(stage.keys, same.keys) for stage, same in zip(planned.stages, dense.stages, strict=True) if not stage.stage.last]
    kept_keys, all_keys = (sum(keys) for keys in zip(*early, strict=True)) if early else (0, 0)
    totals = {
        "grid": "",
        "tokens": str(sum(stage.stage.cells for stage in planned.stages)),
        "run": str(round(sum(stage.computed for stage in planned.stages))),
        "rows": "",
        "keys": percent(kept_keys / all_keys) if all_keys else "",
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
