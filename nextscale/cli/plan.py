"""`nextscale plan`: cost and memory of a method beside dense generation."""

from __future__ import annotations

import json
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import parse
from .options import DEFAULT_MODEL, DtypeName, Json, KvDtype, Methods, ModelName, Quantize, SizeOptions, option
from .show import percent, plain_table, show_next

if TYPE_CHECKING:
    from ..loading import ModelSpec
    from ..methods import Method
    from ..models import NextScaleModel
    from ..planning.cost import RequestCost, StageCost, Workload
    from ..tokenizers.base import Tokenizer

MAX_COUNT = 1_000_000  # images or tokens
NOT_COUNTED = (
    "Not counted: text encoder, canvas, decoding, and how a method selects and restores tokens, such as SparseVAR's search for anchors;"
    " the matrix products with which StageVAR and ToMe reduce tokens are counted."
)


def plan(
    *,
    model: ModelName = DEFAULT_MODEL,
    method: Methods = None,
    size: SizeOptions,
    batch: Annotated[int, option("--batch", "N", "Images per batch.", min=1, max=MAX_COUNT)] = 1,
    text_tokens: Annotated[
        int, option("--text-tokens", "N", "Tokens of a prompt, for models that attend to them.", min=1, max=MAX_COUNT)
    ] = 64,
    guidance: Annotated[
        str | None, option("--guidance", "SCALE", "CFG scale; constant:1 is without guidance.", None, "as published")
    ] = None,
    keep_ratio: Annotated[
        float, option("--keep-ratio", "SHARE", "Share of the tokens that data-dependent methods are assumed to compute.", min=0, max=1)
    ] = 0.5,
    dtype: Annotated[DtypeName, option("--dtype", "DTYPE", "Type of weights and KV cache: float32, bfloat16 or float16.")] = "bfloat16",
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    as_json: Json = False,
) -> None:
    """Show the cost and memory of a method, without weights and without running it."""
    from ..device import choose_device
    from ..guidance import ResolvedGuidance, resolve_guidance
    from ..loading.artifacts import encoder_bytes
    from ..loading.load import without_weights
    from ..loading.presets import model_spec
    from ..planning.cost import Workload

    spec, chosen = model_spec(model), parse.parse_methods(method)
    schedule, settings = size.schedule(spec), spec.settings
    built, tokenizer = without_weights(spec, parse.torch_dtype(dtype), quantize, kv_dtype)
    built.check_schedule(schedule)
    scale = parse.parse_guidance(guidance, settings.guidance)
    guided = ResolvedGuidance(resolve_guidance(scale, settings.guidance), schedule, len(built.blocks)).needs_both
    workload = Workload(schedule, batch, guided, text_tokens if built.stack[0].has_text else 0, settings.sampling.refine)
    resolved, _ = parse.resolved_method(chosen, spec, schedule, batch, choose_device(None))
    facts = forecast(spec, built, tokenizer, resolved, workload, keep_ratio, encoder_bytes(spec))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    show(facts)
    show_next(f"nextscale compare -m {model}{''.join(f' --method {quote(one)}' for one in method or ())}  # measured time and images")


def forecast(
    spec: ModelSpec, model: NextScaleModel, tokenizer: Tokenizer, method: Method, workload: Workload, keep_ratio: float, text_encoder: int
) -> dict[str, Any]:
    """Returns the output of the command as plain values. `text_encoder`: bytes of its weights."""
    from ..methods.method import DENSE, Plans
    from ..methods.strategy import Strategy
    from ..planning.cost import request_cost
    from ..planning.memory import request_memory, reserved_bytes, reserved_cache
    from ..request import check_cache

    schedule, rows, name = workload.schedule, workload.images * (2 if workload.guided else 1), spec.name
    check_cache(model, method)
    plans = method.forecast(model, schedule, workload.guided, keep_ratio)
    reserved = method.forecast(model, schedule, workload.guided)
    parts: list[tuple[NextScaleModel, Plans, Plans]] = [(model, plans, reserved)]  # models that run one after the other
    dense, planned = request_cost(model, workload), request_cost(model, workload, plans)
    peak, dense_peak = request_memory(model, tokenizer, workload, reserved), request_memory(model, tokenizer, workload)
    if isinstance(method, Strategy) and method.second_model:
        name, planned, peak, others = method.planned(spec, model, tokenizer, workload)
        plain = (DENSE,) * len(schedule)
        text_encoder, parts = 0, [*parts, *((other, plain, plain) for other in others)]
    stages = [stage_facts(stage, same) for stage, same in zip(planned.stages, dense.stages, strict=True)]
    own, whole = (sum(stage.keys for stage in cost.stages if not stage.stage.last) for cost in (planned, dense))
    room = [reserved_bytes(one, schedule, room, workload.images, rows, workload.text_tokens) for one, _, room in parts]
    kept = [reserved_cache(one, schedule, own, workload.images, rows).kept_bytes for one, own, _ in parts]
    return {
        "model": name,
        "method": method.label,
        "batch": workload.images,
        "guided": workload.guided,
        "keep_ratio": keep_ratio if method.data_dependent else None,
        "text_tokens": workload.text_tokens,
        "stages": stages,
        "dense": cost_facts(dense),
        "planned": cost_facts(planned),
        "share": planned.share(dense),
        "key_share": own / whole if len(schedule) > 1 else None,
        "memory": {  # bytes
            "reserved": max(room),  # of the KV cache before a request starts, text included
            "planned": max(kept),  # of it, read by later stages
            "dense": model.cache_spec(schedule, rows).kept_bytes,
            "method_peak": asdict(peak) | {"peak": peak.peak},
            "dense_peak": asdict(dense_peak) | {"peak": dense_peak.peak},
            "text_encoder": text_encoder,  # its weights, in none of the peaks
            "encoding": peak.weights + text_encoder,  # all weights, while a prompt is encoded
            "resident_peak": peak.peak + text_encoder,  # if the text encoder stays on the GPU
            "offloaded_peak": max(peak.peak, peak.weights + text_encoder),  # if it is there only while it encodes
        },
    }


def stage_facts(planned: StageCost, dense: StageCost) -> dict[str, Any]:
    stage = planned.stage
    facts = {name: getattr(stage, name) for name in ("index", "height", "width", "cells")}
    facts |= {name: getattr(planned, name) for name in ("skipped", "tokens", "computed", "rows")}
    keys = None if stage.last else planned.keys / dense.keys  # nothing reads the last stage's keys again
    return facts | {"key_share": keys, "dense": dense.total, "planned": planned.total, "share": planned.share(dense)}


def cost_facts(cost: RequestCost) -> dict[str, int]:
    return {name: getattr(cost, name) for name in ("linear", "attention", "head", "total")}


def show(facts: dict[str, Any]) -> None:
    console, memory, peak = Console(highlight=False), facts["memory"], facts["memory"]["method_peak"]
    rows = "guided (two rows per image)" if facts["guided"] else "unguided"
    console.print(f"[bold]{facts['model']}[/bold], batch {facts['batch']}, {rows}; method: {escape(facts['method'])}")
    if (assumed := facts["keep_ratio"]) is not None:
        console.print(f"Assumed: {percent(assumed)} of the tokens are computed where the method is data-dependent (--keep-ratio).")
    if facts["text_tokens"]:
        console.print(f"Assumed: {facts['text_tokens']} text tokens (--text-tokens).")
    console.print(stage_table(facts))
    if any(stage["computed"] != stage["tokens"] for stage in facts["stages"]):
        console.print("Computed is the mean over all sublayers: some run fewer tokens than enter; the head runs those that enter.")
    linear, attention, heads = (percent(facts["planned"][kind] / facts["dense"][kind]) for kind in ("linear", "attention", "head"))
    console.print(
        "Dense, planned: MACs of this request. Planned relative to dense:"
        f" linear layers {linear}, attention {attention}, heads {heads}.\n{NOT_COUNTED}\n"
        f"KV cache: {gib(memory['reserved'])} are reserved, text included; later stages read {gib(memory['planned'])} of it,"
        f" with dense generation {gib(memory['dense'])}.\n"
        f"Peak memory: about {gib(peak['peak'])}, dense {gib(memory['dense_peak']['peak'])}: weights {gib(peak['weights'])} without the"
        f" text encoder, and the larger of {gib(peak['generating'])} for the stages (KV cache and activations) and"
        f" {gib(peak['decoding'])} for decoding."
    )
    if memory["text_encoder"]:
        console.print(
            f"Text encoder: {gib(memory['text_encoder'])}; with it the peak is {gib(memory['resident_peak'])}. With --offload-text weights"
            f" take {gib(memory['encoding'])} while a prompt is encoded, and the peak is {gib(memory['offloaded_peak'])}."
        )


def stage_table(facts: dict[str, Any]) -> Table:
    table = plain_table("stage", "grid", "tokens", "computed", "rows", "keys", "dense", "planned", "share", left=("stage",))
    sums = {name: sum(stage[name] for stage in facts["stages"]) for name in ("cells", "computed", "dense", "planned")}
    for stage in (*facts["stages"], facts | sums):
        table.add_row(
            str(stage.get("index", "all")),
            f"{stage['width']}x{stage['height']}" if "width" in stage else "",
            str(stage["cells"]),
            "skipped" if stage.get("skipped") else str(round(stage["computed"])),
            str(stage.get("rows", "")),
            "" if stage["key_share"] is None else percent(stage["key_share"]),
            *map(short, (stage["dense"], stage["planned"])),
            percent(stage["share"]),
        )
    return table


def short(number: int) -> str:
    """Returns three digits and a unit."""
    value, units = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{f'{value:#.3g}'.rstrip('.')} {units[0]}".strip() if number else "0"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
