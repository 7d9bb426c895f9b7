"""`nextscale bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from ..cluster.shard import Shard
from ..errors import OutOfMemory, SettingError
from ..io import write_text
from ..lab.bench.bench import bench_case
from ..lab.bench.energy import EnergyMeter
from ..lab.bench.picture import pictured_row, stages_svg
from ..lab.bench.plan import Plan, chosen_engines
from ..lab.bench.roofline import Rates
from ..lab.bench.rows import BENCHMARK, failed_rows
from ..lab.bench.runner import release
from ..lab.bench.shown_rows import image
from ..lab.bench.suites import ALL, SUITES, TIMED_METHODS, Case, part_of, suite, timed_methods
from ..lab.bench.tables import speed_tables, with_tables
from ..lab.machine import where
from ..lab.results import append_rows, read_rows
from ..loading.load import choose_device, load
from ..loading.presets import model_spec
from ..loading.random_weights import random_encoder, random_pipeline
from ..pipeline import Pipeline
from ..placement import check_quantize
from .console import result_console
from .files import require_writable
from .groups import grouped
from .options import (
    DEFAULT_MODEL,
    OUTPUT,
    Batches,
    Device,
    DtypeName,
    ModelNames,
    QuantizeName,
    Sizes,
    TokenizerFile,
    Weights,
    as_quantize,
    as_torch_dtype,
    compared_methods,
    out_option,
)
from .parse import choose_schedule, method_name, parse_size
from .program import MEASURE, app

CHECKOUT = Path(__file__).parents[2]
OWN_RESULTS = CHECKOUT / "benchmarks" / "results.jsonl"


@dataclass(frozen=True)
class CaseOptions:
    """What is measured: every model at every size and batch, or the cases of suites."""

    models: ModelNames = None
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", metavar="NAME", help=f"Cases that belong together: {', '.join(SUITES)}; can be repeated."),
    ] = None
    methods: Annotated[list[str] | None, compared_methods("none", f"{ALL} or one of {', '.join(repr(name) for name in TIMED_METHODS)}")] = (
        None
    )
    size: Sizes = None
    batch: Batches = None
    shard: Annotated[
        str, typer.Option("--shard", metavar="i/N", help="The part of all cases that is measured: 0/3 to 2/3, about equally long.")
    ] = "0/1"
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out cases of which the results already have rows of this commit, machine and suite.")
    ] = False

    def cases(self) -> list[Case]:
        """The cases that are asked for, none by default; wrong models, sizes and methods are refused now."""
        detailed = bool(self.methods or self.batch or self.size)
        if self.suites and detailed:
            raise SettingError("--suite already fixes methods, sizes and batches: leave out --method, --size and --batch")
        models = self.models or ([DEFAULT_MODEL] if detailed else [])
        cases = [case for name in self.suites or () for case in suite(name)]
        sizes: Sequence[str | None] = self.size or [None]
        for model, size, batch in product(models, sizes, self.batch or [1]):
            choose_schedule(model_spec(model).settings.schedules, size)
            name = "-".join([model, *([size] if size else []), *([f"batch{batch}"] if batch > 1 else [])])
            methods = tuple(method_name(method) for method in self.methods or ())
            cases.append(Case(name, model, None if size is None else parse_size(size), batch, methods))
        for case in cases:
            timed_methods(case.methods, case.ranks)
        shard = Shard.parse(self.shard)
        return part_of(cases, shard.index, shard.count)

    def left(self, cases: Sequence[Case], results: Path, run: RunOptions) -> list[Case]:
        """Those that are still to be measured."""
        if not self.resume or not results.exists():
            return [*cases]
        here = where(choose_device(run.device)) | {"quantize": run.quantize}
        known = {(row.get("suite"), row["case"]) for row in read_rows(results) if row["benchmark"] == BENCHMARK and is_from(row, here)}
        return [case for case in cases if (case.suite, case.name) not in known]


def is_from(row: dict[str, Any], here: Mapping[str, Any]) -> bool:
    return all(row.get(name) == here[name] for name in ("hardware", "torch", "commit", "quantize"))


@dataclass(frozen=True)
class RunOptions:
    """How it is measured."""

    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", show_default="graphs, on the CPU eager", help="graphs, eager, or both in turns."),
    ] = None
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Timed rounds; in each, every method runs one request.")] = (
        10
    )
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            metavar="NAME",
            show_default="the engine, and whether it ran without kernels",
            help="Name of these rows in the waterfall, after its own steps; they are in no other table.",
        ),
    ] = None
    weights: Weights = None
    tokenizer: TokenizerFile = None
    device: Device = None
    dtype: DtypeName = None
    quantize: QuantizeName = None

    def measure(self, cases: Sequence[Case], results: Path) -> None:
        if (self.weights or self.tokenizer) and len({case.model for case in cases}) != 1:
            raise SettingError("--weights and --tokenizer are the files of one model: choose that model with -m")
        origin = "checkpoint" if self.weights or self.tokenizer else "random"
        if origin == "random":
            require_unchosen(cases)
        device = choose_device(self.device)
        dtype = as_torch_dtype(self.dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        quantize = check_quantize(as_quantize(self.quantize), device, dtype)
        engines = chosen_engines(self.engine, device)
        rates, meter = Rates.measured(device, dtype, quantize), EnergyMeter.of(device)
        plan = Plan(device, engines, self.repeats, rates, self.step, origin, meter, quantize)
        measure(cases, plan, lambda model: self.load(model, device, dtype), results)

    def load(self, model: str, device: torch.device, dtype: torch.dtype) -> Pipeline:
        """A pipeline with a random text encoder, since encoding prompts is not measured."""
        quantize = as_quantize(self.quantize)
        if self.weights is None and self.tokenizer is None:
            return random_pipeline(model, device=device, dtype=dtype, quantize=quantize)
        reader: dict[str, Any] = {"text_encoder": random_encoder(model_spec(model).model, device)}
        return load(model, weights=self.weights, tokenizer=self.tokenizer, device=device, dtype=dtype, quantize=quantize, **reader)


def require_unchosen(cases: Sequence[Case]) -> None:
    """Refuses `auto`, whose profiles were measured on trained weights, where weights are random."""
    for name, method in (one for case in cases for one in timed_methods(case.methods, case.ranks).items()):
        if method.chooses:
            raise SettingError(f"--method {name} takes from profiles of trained weights, and these are random: add --weights FILE")


@dataclass(frozen=True)
class TableOptions:
    """Where rows and tables go."""

    out: Annotated[
        Path | None,
        out_option("FILE", "A .jsonl file, to which rows are added.", "benchmarks/results.jsonl of a checkout, else results.jsonl"),
    ] = None
    table: Annotated[
        bool, typer.Option("--table", rich_help_panel=OUTPUT, help="Then write the speed tables from all rows of that file.")
    ] = False
    page: Annotated[
        Path | None,
        typer.Option(
            "--page",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default="docs/benchmarks.md for the results of a checkout, else standard output",
            help="With --table: the page to write them into, between <!-- NAME:begin --> and <!-- NAME:end -->.",
        ),
    ] = None

    @property
    def results(self) -> Path:
        return self.out or (OWN_RESULTS if OWN_RESULTS.exists() else Path("results.jsonl"))

    def write(self) -> None:
        own = self.results.resolve() == OWN_RESULTS.resolve() and self.page is None
        write_tables(self.results, CHECKOUT / "docs" / "benchmarks.md" if own else self.page, pictured=own)


@app.command(rich_help_panel=MEASURE)
@grouped
def bench(*, asked: CaseOptions, run: RunOptions, tables: TableOptions) -> None:
    """Measure how fast models are, dense and accelerated: time, memory, energy, and the distance from the machine's roofline.

    Weights are random unless --weights or --tokenizer is given, and so are prompt features: no files are needed, and images mean nothing.
    """
    cases = asked.cases()
    if tables.page is not None and not tables.table:
        raise SettingError("--page says where tables go: add --table")
    if not cases and not tables.table:
        raise SettingError("nothing to measure: choose a model with -m, or a --suite; or write tables of earlier results with --table")
    if cases := asked.left(cases, tables.results, run):
        run.measure(cases, tables.results)
    if tables.table:
        tables.write()


def measure(cases: Sequence[Case], plan: Plan, load: Callable[[str], Pipeline], results: Path) -> None:
    """Measures model by model, with the weights of one at a time in memory. Rows are written as soon as their case is done."""
    require_writable([results], force=True)  # rows are added
    for model in dict.fromkeys(case.model for case in cases):
        pipe: Pipeline | Exception
        try:
            pipe = load(model)
        except (RuntimeError, OutOfMemory) as error:  # mostly out of memory; a wrong file is the user's to fix
            pipe = error
        for case in cases:
            if case.model == model:
                methods = timed_methods(case.methods, case.ranks)
                rows = bench_case(pipe, case, methods, plan) if isinstance(pipe, Pipeline) else failed_rows(case, methods, plan, pipe)
                append_rows(rows, results)
                show_rows(rows)
        del pipe
        release(plan.device)


def show_rows(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    format = f", {first['quantize']}" if first.get("quantize") else ""
    title = f"{first['model']}{format}, {image(first)}, batch {first['batch']}, {first['hardware']}"
    table = Table("method", "engine", title=title, title_justify="left", box=None, pad_edge=False)
    headings = (
        "generate, ms",
        "speedup",
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
    """Writes the speed tables; `pictured`: the picture of that page as well."""
    rows = read_rows(results)
    tables = speed_tables(rows)
    if not tables:
        raise SettingError(f"{results} has no row measured on a GPU: there is no table to write")
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
