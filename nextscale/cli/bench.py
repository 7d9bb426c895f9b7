"""`nextscale bench`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from ..errors import OutOfMemory, SettingError
from ..io import write_text
from ..lab.bench.bench import bench_case
from ..lab.bench.energy import EnergyMeter
from ..lab.bench.plan import Plan, chosen_engines
from ..lab.bench.roofline import Rates
from ..lab.bench.rows import failed_rows
from ..lab.bench.runner import release
from ..lab.bench.suites import ALL, SUITES, TIMED_METHODS, Case, suite, timed_methods
from ..lab.bench.tables import image, pictured_row, speed_tables, stages_svg, with_tables
from ..lab.results import read_rows
from ..loading.load import choose_device, load
from ..loading.presets import model_spec
from ..loading.random_weights import random_encoder, random_pipeline
from ..pipeline import Pipeline
from .generate import result_console
from .options import MACHINE, OUTPUT, Device, DtypeName, TokenizerFile, as_torch_dtype, choose_schedule, parse_size
from .program import app

CHECKOUT = Path(__file__).parents[2]
OWN_RESULTS = CHECKOUT / "benchmarks" / "results.jsonl"


@app.command()
def bench(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Names from `nextscale models`.", show_default=False)] = None,
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", metavar="NAME", help=f"Cases that belong together: {', '.join(SUITES)}; can be given again."),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            show_default="none",
            help="Besides dense generation: one such as 'fastvar + skip:last=1', "
            f"one of {', '.join(repr(name) for name in TIMED_METHODS)}, or {ALL} of these; can be given again.",
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, show_default="1", help="Images per request; can be given again.")] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            show_default="the model's own",
            help="HEIGHTxWIDTH in pixels, the side of a square, or a pixel budget such as 0.25M; can be given again.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default="graphs, on the CPU eager", help="graphs, eager, or both in turns."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; in each, every method draws one request.")] = 10,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="the engine, and whether it ran without kernels",
            help="What these rows are in the waterfall, after the steps that it has of itself; they are in no other table.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="PATH", rich_help_panel=MACHINE, show_default="random weights", help="File or folder of the model."),
    ] = None,
    tokenizer: TokenizerFile = None,
    device: Device = None,
    dtype: DtypeName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default="benchmarks/results.jsonl of a checkout, else results.jsonl",
            help="A .jsonl file, to which rows are added.",
        ),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", rich_help_panel=OUTPUT, help="Then write the tables of speed from all rows of that file.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default="docs/benchmarks.md for the results of a checkout, else standard output",
            help="With --table: where they go, between <!-- NAME:begin --> and <!-- NAME:end -->.",
        ),
    ] = None,
) -> None:
    """Measure how fast models are, dense and accelerated: time, memory, energy, and how near that is to what the machine can do.

    Weights are random and prompt features are given, so no files are needed; images mean nothing and their quality is not measured.
    """
    results = out or (OWN_RESULTS if OWN_RESULTS.exists() else Path("results.jsonl"))
    cases = [*suite_cases(suites or []), *asked_cases(models or [], size or [], batch or [1], methods or [])]
    if suites and (methods or batch or size):
        raise SettingError("--suite already says which methods, sizes and batches: leave out --methods, --size and --batch")
    if not cases and not table:
        raise SettingError("nothing to measure: name models, or a --suite; or write the tables of earlier results with --table")
    if page is not None and not table:
        raise SettingError("--page says where tables go: add --table")
    if (weights or tokenizer) and len({case.model for case in cases}) != 1:
        raise SettingError("--weights and --tokenizer are the files of one model: name that model")
    for case in cases:
        timed_methods(case.methods)  # refuses a wrong one now
    if cases:
        place = choose_device(device)
        kind = as_torch_dtype(dtype) or (torch.bfloat16 if place.type == "cuda" else torch.float32)
        engines = chosen_engines(engine, place)
        origin = "checkpoint" if weights or tokenizer else "random"
        plan = Plan(place, engines, repeats, Rates.measured(place, kind), step, origin, EnergyMeter.of(place))
        measure(cases, plan, partial(open_pipeline, device=place, dtype=kind, weights=weights, tokenizer=tokenizer), results)
    if table:
        own = results.resolve() == OWN_RESULTS.resolve() and page is None
        write_tables(results, CHECKOUT / "docs" / "benchmarks.md" if own else page, pictured=own)


def suite_cases(names: Iterable[str]) -> list[Case]:
    return [replace(case, suite=name) for name in names for case in suite(name)]


def asked_cases(models: Sequence[str], sizes: Sequence[str], batches: Sequence[int], methods: Sequence[str]) -> list[Case]:
    """Every model at every size and batch."""
    cases = []
    for model, size, batch in product(models, [None, *sizes][bool(sizes) :], batches):
        choose_schedule(model_spec(model).settings.schedules, size, None, None)  # refuses a wrong size now
        name = "-".join([model, *([size] if size else []), *([f"batch{batch}"] if batch > 1 else [])])
        cases.append(Case(name, model, None if size is None else parse_size(size), batch, tuple(methods)))
    return cases


def measure(cases: Sequence[Case], plan: Plan, opened: Callable[[str], Pipeline], results: Path) -> None:
    """Model by model, so that the weights of one at a time are there. Rows are written as soon as their case is done."""
    for model in dict.fromkeys(case.model for case in cases):
        pipe: Pipeline | Exception
        try:
            pipe = opened(model)
        except (RuntimeError, OutOfMemory) as error:  # most of all no memory; a wrong file is the user's to mend
            pipe = error
        for case in cases:
            if case.model == model:
                methods = timed_methods(case.methods)
                rows = bench_case(pipe, case, methods, plan) if isinstance(pipe, Pipeline) else failed_rows(case, methods, plan, pipe)
                append_rows(rows, results)
                show_rows(rows)
        del pipe
        release(plan.device)


def open_pipeline(name: str, *, device: torch.device, dtype: torch.dtype, weights: Path | None, tokenizer: Path | None) -> Pipeline:
    """Texts are read by a random encoder: encoding them is not measured."""
    if weights is None and tokenizer is None:
        return random_pipeline(name, device=device, dtype=dtype)
    encoder = random_encoder(model_spec(name).model, device)
    return load(name, weights=weights, tokenizer=tokenizer, text_encoder=encoder, device=device, dtype=dtype)


def append_rows(rows: Iterable[dict[str, Any]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def show_rows(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    title = f"{first['model']}, {image(first)}, batch {first['batch']}, {first['hardware']}"
    table = Table("method", "engine", title=title, title_justify="left", box=None, pad_edge=False)
    headings = (
        "generate, ms",
        "times faster",
        "decode, ms",
        "end to end, ms",
        "images/s",
        "MACs",
        "x roofline",
        "GB",
        "J/image",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(escape(row["method"]), row["engine"], *(escape(cell) for cell in cells(row)))
    result_console().print(table)


def cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["error"]]
    ratio, energy = row["speedup"], row["joules_per_image"]
    return [
        f"{row['median_ms']:.1f} ({row['p20_ms']:.1f}–{row['p80_ms']:.1f})",
        "" if ratio is None else f"{ratio['median']:.2f} ({ratio['p20']:.2f}–{ratio['p80']:.2f})",
        f"{row['decode']['median_ms']:.1f}",
        f"{row['end_to_end']['median_ms']:.1f}",
        f"{row['images_per_second']:.2f}",
        f"{row['cost_share']:.0%}",
        f"{row['times_roofline']:.2f}",
        f"{row['peak_gb']:.2f}",
        "" if energy is None else f"{energy:.1f}",
    ]


def write_tables(results: Path, page: Path | None, pictured: bool) -> None:
    """pictured: the picture of that page as well."""
    rows = read_rows(results)
    tables = speed_tables(rows)
    if not tables:
        raise SettingError(f"{results} has no row of speed on a GPU: there is no table to write")
    if page is None:
        typer.echo("\n\n".join(tables.values()))
        return
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--page {page} cannot be read ({error}): give a text file") from error
    if missing := [name for name in tables if f"<!-- {name}:begin -->" not in text or f"<!-- {name}:end -->" not in text]:
        raise SettingError(
            f"{page} has no place for {', '.join(missing)}: write <!-- NAME:begin --> and <!-- NAME:end --> on lines of their own"
        )
    write_text(with_tables(text, tables), page)
    if pictured and (row := pictured_row(rows)) is not None:
        write_text(stages_svg(row), CHECKOUT / "docs" / "stages.svg")
