"""The commands `suite` and `paper-tables`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from nextscale.cli.files import require_writable
from nextscale.cli.options import Force
from nextscale.cli.show import result_console
from nextscale.errors import SettingError
from nextscale.eval.results import read_rows, where
from nextscale.io import write_text
from nextscale.loading.load import choose_device

from ..program import app
from . import SUITES, export, suite
from .papers import PAPER, PaperItem, Work, measured_hardware, measured_speed, paper_work
from .prompts import as_lines, rewritten

OWN_RESULTS = Path(__file__).parents[3] / "benchmarks" / "results.jsonl"  # read, never written
Results = Annotated[
    Path,
    typer.Option("--results", metavar="FILE", show_default="benchmarks/results.jsonl of a checkout", help="File of measured speeds."),
]


@app.command("suite")
def run_suite(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(SUITES)}.")],
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="Images from `nextscale sample`, for --export.")] = None,
    *,
    prompt_set: Annotated[Path | None, typer.Option("--prompt-set", metavar="PATH", help="Prompts as the authors publish them.")] = None,
    write_prompts: Annotated[
        Path | None, typer.Option("--write-prompts", metavar="FILE", help="Write the prompts in the format of `nextscale sample`.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--export", metavar="FOLDER", help="Copy FOLDER into the layout of the scorer.")] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="K", min=1, show_default="as published", help="Images per prompt, with --export.")
    ] = None,
    results: Results = OWN_RESULTS,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--rewritten", metavar="FILE", help="Rewritten prompts: .jsonl with id and prompt, or .json from original to rewritten."
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Prepare prompts and images for a benchmark's own scorer; without options, list what its tables need."""
    chosen = suite(name)
    if write_prompts is None and out is None:
        show_work([work for work in paper_work() if work.suite == chosen.name], results)
    if write_prompts is not None:
        require_writable([write_prompts], force)
        prompts = chosen.prompts(prompt_set)
        write_text(as_lines(prompts if texts is None else rewritten(prompts, texts)), write_prompts)
        typer.echo(f"{len(prompts)} prompts; next: {chosen.sample_command(write_prompts)}")
    if out is not None:
        if folder is None:
            raise SettingError("FOLDER is missing: --export needs the folder that `nextscale sample` wrote")
        count = export(chosen, folder, out, prompt_set, seeds, texts)
        typer.echo(f"{count} images in {out}. Environment: {chosen.environment}")
        typer.echo(chosen.command.replace("FOLDER", str(out.resolve())))


@app.command()
def paper_tables(
    part: Annotated[str, typer.Argument(metavar="[PART]", help="Only items with this text, such as 'StageVAR Table 2'.")] = "",
    results: Results = OWN_RESULTS,
) -> None:
    """List all tables and figures of SparseVAR, FastVAR and StageVAR: folders of images with their hours, commands, scorers."""
    items = [item for item in PAPER if part.lower() in item.name.lower()]
    if not items:
        raise SettingError(f"PART must be in the name of a table or a figure, such as {PAPER[1].name!r}; got {part!r}")
    console = result_console()
    for item in items:
        show_item(item)
    work = paper_work(items)
    show_work(work, results)
    for one in (SUITES[name] for name in dict.fromkeys(work.suite for work in work)):
        console.print(f"\n{one.title}: {one.prompt_set}", markup=False)
        console.print(f"  {one.sample_command(Path(f'{one.name}.jsonl'))}", markup=False, soft_wrap=True)
        console.print(f"  {one.command}", markup=False, soft_wrap=True)


def show_item(item: PaperItem) -> None:
    """Prints a table or figure, with the number of its folders, the commands and the note."""
    console = result_console()
    folders = len(paper_work([item]))
    console.print(f"{item.name}: {item.shows}" + (f" ({folders} folders)" if folders else ""), markup=False)
    for command in item.commands:
        console.print(f"  {command}", markup=False, soft_wrap=True)
    if item.note:
        console.print(f"  {item.note}", markup=False, soft_wrap=True)


def show_work(listed: Sequence[Work], results: Path) -> None:
    """Prints a row per folder of images, and the sum of the hours."""
    here = where(choose_device(None))["hardware"]
    rows = read_rows(results) if results != OWN_RESULTS or results.exists() else []
    hardware = measured_hardware(rows, here)
    table = Table("benchmark", "model", "pixels", "method", box=None, pad_edge=False)
    for heading in ("images", "images/s", "hours"):
        table.add_column(heading, justify="right")
    table.add_column("table of the paper")
    hours, unknown = 0.0, 0
    for work in listed:
        speed = None if hardware is None else measured_speed(rows, work, hardware)
        taken = None if speed is None else work.images / speed.images_per_second / 3600
        hours, unknown = hours + (taken or 0), unknown + (work.images if taken is None else 0)
        cells = ("", "not measured")
        if speed is not None and taken is not None:
            cells = (f"{speed.images_per_second:.2f}", f"{'' if speed.exact else '< '}{taken:.2f}")
        table.add_row(work.suite, work.model, str(work.side), escape(work.method), str(work.images), *cells, ", ".join(work.tables))
    console = result_console()
    console.print(table)
    left = f", and {unknown} images whose speed was not measured" if unknown else ""
    console.print(
        f"{sum(work.images for work in listed)} images in {len(listed)} folders; {hours:.1f} hours on one {hardware or here}{left}"
    )
    console.print("<: at the speed of dense generation, since this method was not measured")
    if hardware != here:
        console.print(f"This machine ({here}) was not measured: `nextscale bench -m MODEL --out {results}` adds its rows")
