"""`nextscale evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from ..errors import SettingError
from ..io import write_text
from ..lab.evals.bootstrap import MOST_RESAMPLES
from ..lab.evals.folders import NETWORKS, PAIR_METRICS, ImageFolder, Judged, evaluate_folder
from ..lab.evals.suites import SUITES, export, suite
from ..lab.evals.suites.papers import PAPER_TABLES, Work, measured_hardware, measured_speed, paper_work
from ..lab.evals.suites.prompts import as_lines
from ..lab.machine import where
from ..lab.results import Row, read_rows, write_rows
from ..loading.load import choose_device
from .bench import OWN_RESULTS
from .console import image_bar, result_console
from .files import require_writable
from .groups import grouped
from .options import MACHINE, Batch, Device, Force, Metrics, out_option
from .program import MEASURE, app

METRICS = {  # name to the network that it needs, or to itself where pairs are compared
    **dict.fromkeys(("fid", "kid", "precision", "recall", "inception-score"), "inception"),
    "fd-dinov2": "dinov2",
    "fd-efficientnet": "efficientnet",
    "clip-score": "clip",
    **{name: name for name in PAIR_METRICS},
}
TITLES = {"settings", "hardware", "torch", "commit", "date", "benchmark", "model", "method", "size", "against", "dense", "folder", "images"}


@dataclass(frozen=True)
class JudgeOptions:
    """What folders are compared with, and by what."""

    folders: Annotated[list[Path] | None, typer.Argument(metavar="FOLDER", show_default=False, help="Folders of images.")] = None
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FOLDER", help="Real images, for fid, kid, precision, recall and the like.")
    ] = None
    dense: Annotated[
        Path | None, typer.Option("--dense", metavar="FOLDER", help="Dense images of the same names, for lpips, dists, ssim and psnr.")
    ] = None
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            show_default="fid with --against, lpips, ssim and psnr with --dense",
            help=f"One of {', '.join(METRICS)}; can be repeated.",
        ),
    ] = None
    resamples: Annotated[
        int,
        typer.Option(
            "--resamples",
            metavar="N",
            min=0,
            max=MOST_RESAMPLES,
            help="Resampled sets behind the interval of a Fréchet distance; 0 gives none.",
        ),
    ] = 100
    metrics: Metrics = None
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            rich_help_panel=MACHINE,
            show_default="inside each folder, or in the home folder",
            help="Where features are kept.",
        ),
    ] = None
    batch: Batch = 64
    device: Device = None

    def judged(self) -> Judged:
        names = self.metric or [*(["fid"] if self.against else []), *(["lpips", "ssim", "psnr"] if self.dense else [])]
        if unknown := [name for name in names if name not in METRICS]:
            raise SettingError(f"--metric {unknown[0]!r}: choose one of {', '.join(METRICS)}")
        if not names:
            raise SettingError("nothing to compare with: give --against REAL or --dense FOLDER, or choose --metric clip-score")
        if self.dense is None and (pairs := [name for name in names if name in PAIR_METRICS]):
            raise SettingError(f"--metric {pairs[0]} compares pairs of images: add --dense FOLDER, the dense images of the same prompts")
        alone = (*PAIR_METRICS, "clip-score", "inception-score")
        if self.against is None and (sets := [name for name in names if name not in alone]):
            raise SettingError(f"--metric {sets[0]} compares with real images: add --against FOLDER")
        needed = dict.fromkeys(METRICS[name] for name in names)
        return Judged(
            choose_device(self.device),
            self.metrics,
            [name for name in needed if name in NETWORKS],
            [name for name in needed if name in PAIR_METRICS],
            None if self.against is None else ImageFolder(self.against),
            None if self.dense is None else ImageFolder(self.dense),
            self.resamples,
            self.batch,
            self.cache,
        )


@dataclass(frozen=True)
class SuiteOptions:
    """Benchmarks that others score."""

    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", metavar="NAME", help=f"{', '.join(SUITES)}: prepare images for its scorer; {PAPER_TABLES}: with --dry-run."
        ),
    ] = None
    prompt_set: Annotated[
        Path | None, typer.Option("--prompt-set", metavar="PATH", help="With --suite: the prompts as its authors publish them.")
    ] = None
    write_prompts: Annotated[
        Path | None,
        typer.Option("--write-prompts", metavar="FILE", help="With --suite: write the prompts as `nextscale sample` takes them."),
    ] = None
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FOLDER", help="With --suite: lay the images out as the scorer expects them.")
    ] = None
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="K", min=1, show_default="as published", help="With --export: images per prompt.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --suite: say what would be generated and how long it takes.")] = False
    results: Annotated[
        Path,
        typer.Option(
            "--results", metavar="FILE", show_default="benchmarks/results.jsonl of a checkout", help="With --dry-run: measured speeds."
        ),
    ] = OWN_RESULTS

    def require_suite(self) -> None:
        """Refuses options that belong to a benchmark where none is named."""
        given = {"--prompt-set": self.prompt_set, "--write-prompts": self.write_prompts, "--export": self.export, "--seeds": self.seeds}
        if named := [option for option, value in {**given, "--dry-run": self.dry_run or None}.items() if value is not None]:
            raise SettingError(f"{', '.join(named)}: only with --suite; choose one of {', '.join(SUITES)}, or leave it out")


@app.command(rich_help_panel=MEASURE)
@grouped
def evaluate(
    *,
    judging: JudgeOptions,
    benchmark: SuiteOptions,
    out: Annotated[Path | None, out_option("FILE", "A .jsonl file, to which a row per folder is added.")] = None,
    force: Force = False,
) -> None:
    """Judge folders of images: against real ones, against dense ones of the same seeds, or prepared for a benchmark's own scorer."""
    if benchmark.suite is not None:
        run_suite(benchmark, judging.folders or [], choose_device(judging.device), force)
        return
    benchmark.require_suite()
    if not judging.folders:
        raise SettingError("no folder: name one or more folders of images, or a --suite")
    judged = judging.judged()
    folders = [ImageFolder(folder) for folder in judging.folders]
    total = sum(len(folder.files) for folder in folders) * (len(judged.networks) + bool(judged.pairs))
    earlier = earlier_rows(out)
    judged.load(folders)
    rows: list[Row] = []
    with image_bar() as progress:
        task = progress.add_task("judging", total=total)
        judged = judged.watched(lambda images: progress.advance(task, images))
        for folder in folders:
            rows.append(evaluate_folder(folder, judged))
            if out is not None:  # folder by folder, since each may take hours
                write_rows([*earlier, *rows], out)
    show_rows(rows)


def earlier_rows(out: Path | None) -> list[Row]:
    if out is None:
        return []
    require_writable([out], force=True)  # rows are added
    rows = read_rows(out) if out.exists() else []
    if any("benchmark" not in row for row in rows):
        raise SettingError(f"--out {out} holds other things than results, and rows would be added to it: give another name")
    return rows


def show_rows(rows: Sequence[Row]) -> None:
    measured = list(dict.fromkeys(name for row in rows for name in row if name not in TITLES))
    table = Table("folder", "images", *measured, box=None, pad_edge=False)
    for row in rows:
        table.add_row(escape(row["folder"]), str(row["images"]), *(cell(row.get(name)) for name in measured))
    result_console().print(table)


def cell(value: dict[str, float] | None) -> str:
    if not value or "value" not in value:
        return "" if not value else f"{value['equal']:.0f} equal"
    bounds = f" ({value['low']:.4g} to {value['high']:.4g})" if "low" in value else ""
    return f"{value['value']:.4g}{bounds}"


# --- benchmarks of others


def run_suite(asked: SuiteOptions, folders: Sequence[Path], device: torch.device, force: bool) -> None:
    assert asked.suite is not None
    if asked.suite == PAPER_TABLES:
        if not asked.dry_run:
            raise SettingError(
                f"--suite {PAPER_TABLES} lists what the papers' tables need: add --dry-run, then run each benchmark's --suite"
            )
        show_work(paper_work(), asked.results, where(device)["hardware"])
        return
    chosen = suite(asked.suite)
    if asked.dry_run:
        show_work([work for work in paper_work() if work.suite == chosen.name], asked.results, where(device)["hardware"])
    if asked.write_prompts is not None:
        require_writable([asked.write_prompts], force)
        prompts = chosen.prompts(asked.prompt_set)
        write_text(as_lines(prompts), asked.write_prompts)
        seeds = f" --seeds {chosen.seeds}" if chosen.seeds > 1 else ""
        typer.echo(f"{len(prompts)} prompts; next: nextscale sample --prompts {asked.write_prompts}{seeds} --out FOLDER")
    if asked.export is not None:
        if len(folders) != 1:
            raise SettingError(f"--export lays out one folder of images; got {len(folders)}: name the folder that `nextscale sample` wrote")
        count = export(chosen, folders[0], asked.export, asked.prompt_set, asked.seeds)
        typer.echo(f"{count} images in {asked.export}. Environment: {chosen.environment}")
        typer.echo(chosen.command.replace("FOLDER", str(asked.export.resolve())))
    elif asked.write_prompts is None and not asked.dry_run:
        raise SettingError(f"--suite {chosen.name}: add --write-prompts FILE, --export FOLDER or --dry-run")


def show_work(listed: Sequence[Work], results: Path, here: str) -> None:
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
        console.print(f"This machine ({here}) was not measured: `nextscale bench -m MODEL` adds its rows to {results}")
