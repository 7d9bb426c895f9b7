"""`nextscale evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..errors import SettingError
from .files import require_results
from .options import Device, option, out_option
from .show import image_bar, plain_table, result_console, show_next, stopping

if TYPE_CHECKING:
    from ..eval.results import Row

PAIRS = ("lpips", "ssim", "psnr")
RESEARCH = "fid, kid, precision, recall, inception-score, fd-dinov2, fd-efficientnet, clip-score, dists"


def evaluate(
    *,
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", show_default=False, help="Folders of images.")],
    real: Annotated[Path | None, option("--real", "FOLDER", "Real images, for fid, kid, precision, recall.")] = None,
    dense: Annotated[Path | None, option("--dense", "FOLDER", "Dense images of the same names, for lpips, ssim, psnr, dists.")] = None,
    metric: Annotated[
        list[str] | None,
        option(
            "--metric",
            "NAME",
            f"{', '.join(PAIRS)}; with the package nextscale-research {RESEARCH}. Can be repeated.",
            None,
            "fid with --real; lpips, ssim and psnr with --dense",
        ),
    ] = None,
    device: Device = None,
    out: Annotated[Path | None, out_option("FILE", "Add a row per folder to this .jsonl file.", "none")] = None,
) -> None:
    """Score folders of images, against real images or against dense images of the same seeds."""
    from ..device import choose_device
    from ..eval.folders import PAIR_METRICS, ImageFolder, PairJudge, describe
    from ..eval.results import append_rows, research

    names = metric or [*(["fid"] if real else []), *(PAIRS if dense else [])]
    if not names:
        raise SettingError("nothing to compare with. Pass --real FOLDER or --dense FOLDER, or choose --metric clip-score.")
    pairs, others = [name for name in names if name in PAIRS], [name for name in names if name not in PAIRS]
    if pairs and dense is None:
        raise SettingError(f"--metric {pairs[0]} compares with dense images. Add --dense FOLDER.")
    require_results(out)
    place = choose_device(device)
    real_folder, dense_folder = (None if path is None else ImageFolder(path) for path in (real, dense))
    judges = research("metrics.judges").judges(others, real_folder, dense_folder, place) if others else []
    if pairs and dense_folder:
        judges.append(PairJudge({name: PAIR_METRICS[name](place) for name in pairs}, dense_folder, place))
    judged = [ImageFolder(folder) for folder in folders]
    for judge, folder in product(judges, judged):
        judge.check(folder)
    rows: list[Row] = []
    with stopping(lambda: f"{len(rows)} of {len(judged)} rows are in {out}." if out else ""), image_bar() as progress:
        task = progress.add_task("judging", total=sum(len(folder.files) for folder in judged) * len(judges))
        for folder in judged:
            row = describe(folder, place) | {"real": real and real.name, "dense": dense and dense.name}
            for judge in judges:
                row |= judge.row(folder, lambda images: progress.advance(task, images))
            rows.append(row)
            if out:  # folder by folder, since each may take hours
                append_rows([row], out)
    show_rows(rows)
    show_next("nextscale sample --method METHOD --out FOLDER  # images of another method, to be scored with --dense")


def show_rows(rows: Sequence[Row]) -> None:
    measured = list(dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, dict) and name != "settings"))
    table = plain_table("folder", "images", *measured, left=("folder",))
    for row in rows:
        table.add_row(escape(row["folder"]), str(row["images"]), *(cell(row.get(name)) for name in measured))
    result_console().print(table)


def cell(value: dict[str, float] | None) -> str:
    if not value or "value" not in value:
        return "" if not value else f"{value['equal']:.0f} equal"
    bounds = f" ({value['low']:.4g} to {value['high']:.4g})" if "low" in value else ""
    return f"{value['value']:.4g}{bounds}"
