"""`nextscale plan`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from ..guidance import ResolvedGuidance
from ..loading.artifacts import encoder_bytes
from ..loading.beside import local_weights, rank_table_of
from ..loading.presets import model_spec
from ..loading.without_weights import without_weights
from ..methods.registry import resolve_method
from ..models.base import NextScaleModel
from ..pipeline import Settings
from ..planning.cost import Workload
from ..stage import Schedule
from .old_options import (
    DEFAULT_MODEL,
    DTYPES,
    CombinedMethods,
    Dtype,
    KvDtypeName,
    ModelName,
    QuantizeName,
    SizeOptions,
    as_kv_dtype,
    as_quantize,
    as_torch_dtype,
)
from .old_parse import settled_method
from .options import grouped
from .plan_forecast import forecast_of
from .plan_table import show
from .program import app

MOST = 1_000_000  # images or tokens


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks for besides its size."""

    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, max=MOST, help="Images per batch.")] = 1
    text_tokens: Annotated[
        int, typer.Option("--text-tokens", metavar="N", min=1, max=MOST, help="Tokens of a prompt, for models that attend to them.")
    ] = 64
    unguided: Annotated[bool, typer.Option("--unguided", help="Without guidance: one row per image.")] = False

    def workload(self, model: NextScaleModel, settings: Settings, schedule: Schedule) -> Workload:
        guided = not self.unguided and ResolvedGuidance(settings.guidance, schedule, len(model.blocks)).needs_both
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
    kv_dtype: KvDtypeName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a method would compute, and its cost, without weights and without running anything."""
    spec, chosen = model_spec(model), resolve_method(method)
    schedule = size.schedule(spec)
    built, tokenizer = without_weights(spec, as_torch_dtype(dtype), as_quantize(quantize), as_kv_dtype(kv_dtype))
    built.check_schedule(schedule)
    built.rank_table = rank_table_of(built, weights) if (weights := local_weights(spec)) else None
    workload = request.workload(built, spec.settings, schedule)
    settled = settled_method(chosen, spec, schedule, request.batch)
    forecast = forecast_of(spec.name, built, tokenizer, settled, workload, keep_ratio, encoder_bytes(spec))
    if as_json:
        typer.echo(json.dumps(forecast.to_dict(), indent=2))
    else:
        show(forecast)
