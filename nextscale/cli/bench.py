"""`nextscale bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..device import choose_dtype
from ..errors import SettingError
from ..eval.bench import bench as time_methods
from ..eval.bench import choose_engines, release
from ..eval.results import Row, append_rows
from ..loading.load import choose_device, load, random_encoder, random_pipeline
from ..loading.presets import model_spec
from ..methods.auto import Auto
from ..methods.registry import resolve_method
from ..pipeline import Pipeline
from .files import require_writable
from .old_options import (
    DEFAULT_MODEL,
    Batches,
    Device,
    DtypeName,
    ModelNames,
    QuantizeName,
    Sizes,
    Weights,
    as_quantize,
    as_torch_dtype,
    compared_methods,
    out_option,
)
from .old_parse import choose_schedule, method_name, parse_size
from .options import grouped
from .program import MEASURE, app
from .show import result_console

MOVED = (
    "Suites of cases, named steps, energy, rooflines and the tables of the docs are made in a checkout of the repository:"
    " python -m benchmarks.suites and python -m benchmarks.tables."
)
COLUMNS = ("generate, ms", "speedup", "decode, ms", "end to end, ms", "images/s", "MACs", "GB")


@dataclass(frozen=True)
class Machine:
    """The weights, the device and the number formats."""

    weights: Weights = None
    device: Device = None
    dtype: DtypeName = None
    quantize: QuantizeName = None

    def load(self, name: str) -> Pipeline:
        """Returns a pipeline with a random text encoder: encoding prompts is not timed."""
        place = choose_device(self.device)
        dtype, quantize = choose_dtype(as_torch_dtype(self.dtype), place), as_quantize(self.quantize)
        if self.weights is None:
            return random_pipeline(name, device=place, dtype=dtype, quantize=quantize)
        encoder: dict[str, Any] = {"text_encoder": random_encoder(model_spec(name).model, place)}
        return load(name, weights=self.weights, device=place, dtype=dtype, quantize=quantize, **encoder)


@app.command(rich_help_panel=MEASURE, epilog=MOVED)
@grouped
def bench(
    *,
    models: ModelNames = None,
    methods: Annotated[list[str] | None, compared_methods("none")] = None,
    batch: Batches = None,
    size: Sizes = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Timed rounds, each with a request of every method.")] = 10,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", show_default="graphs, eager on the CPU", help="graphs, eager or both in turns."),
    ] = None,
    machine: Machine,
    out: Annotated[Path | None, out_option("FILE", "A .jsonl file to which a row per method is added.", "none")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, one per line.")] = False,
) -> None:
    """Measure speed and memory of models, dense and with methods, at every size and batch.

    Without --weights the weights are random; prompt features always are. No files are needed, and the images mean nothing.
    """
    names = models or [DEFAULT_MODEL]
    sizes: Sequence[str | None] = size or [None]
    origin = "random" if machine.weights is None else "checkpoint"
    chosen = {method_name(one): resolve_method(one) for one in methods or ()}
    if origin == "random" and (unknown := [name for name, method in chosen.items() if isinstance(method, Auto)]):
        raise SettingError(f"--method {unknown[0]} takes from profiles of trained weights, and these are random: add --weights FILE")
    if origin == "checkpoint" and len(set(names)) > 1:
        raise SettingError("--weights has the weights of one model: choose that model with -m")
    for name, wanted in product(names, sizes):
        choose_schedule(model_spec(name).settings.schedules, wanted)
    engines = choose_engines(engine, choose_device(machine.device))
    require_writable([out] if out else [], force=True)  # rows are added

    for name in dict.fromkeys(names):
        pipe = machine.load(name)
        for wanted, images in product(sizes, batch or [1]):
            pixels = None if wanted is None else parse_size(wanted)
            rows = time_methods(pipe, chosen, size=pixels, batch=images, engines=engines, repeats=repeats)
            rows = [row | {"weights": origin} for row in rows]
            if out:
                append_rows(rows, out)
            show_rows(rows, as_json)
        del pipe
        release(choose_device(machine.device))


def show_rows(rows: Sequence[Row], as_json: bool) -> None:
    if as_json:
        typer.echo("\n".join(json.dumps(row) for row in rows))
        return
    first = rows[0]
    height, width = first["size"]
    format = f", {first['quantize']}" if first["quantize"] else ""
    title = f"{first['model']}{format}, {height}x{width}, batch {first['batch']}, {first['hardware']}"
    table = Table("method", "engine", title=title, title_justify="left", box=None, pad_edge=False)
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(escape(row["method"]), row["engine"], *(escape(cell) for cell in cells(row)))
    result_console().print(table)


def cells(row: Row) -> list[str]:
    if "error" in row:
        return [row["error"]]
    ratio = row["speedup"]
    return [
        f"{row['median_ms']:.1f} ({row['p20_ms']:.1f}–{row['p80_ms']:.1f})",
        "" if ratio is None else f"{ratio['median']:.2f} ({ratio['p20']:.2f}–{ratio['p80']:.2f})",
        f"{row['decode']['median_ms']:.1f}",
        f"{row['end_to_end']['median_ms']:.1f}",
        f"{row['images_per_second']:.2f}",
        f"{row['cost_share']:.0%}",
        f"{row['peak_gb']:.2f}",
    ]
