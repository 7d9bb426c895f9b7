"""`nextscale evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import SettingError
from ..eval.folders import NETWORKS, PAIR_METRICS, EvaluationSetup, ImageFolder, evaluate_folder
from ..eval.results import Row, read_rows, write_rows
from ..loading.load import choose_device
from ..metrics.intervals import MOST_RESAMPLES
from .files import require_writable
from .old_options import MACHINE, Batch, Device, Metrics, out_option
from .options import grouped
from .program import MEASURE, app
from .show import image_bar, result_console

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

    def judged(self) -> EvaluationSetup:
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
        return EvaluationSetup(
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


@app.command(rich_help_panel=MEASURE)
@grouped
def evaluate(
    *,
    judging: JudgeOptions,
    out: Annotated[Path | None, out_option("FILE", "A .jsonl file, to which a row per folder is added.")] = None,
) -> None:
    """Judge folders of images, against real ones or against dense ones of the same seeds."""
    if not judging.folders:
        raise SettingError("FOLDER is missing: name one or more folders of images")
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
