"""`nextscale demo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table
from torch import Tensor

from ..accel.method import Method
from ..errors import CheckpointError, SettingError
from ..io import IMAGE_FORMATS, to_pil, write_image
from ..lab.evals.methods import parse_methods
from ..lab.metrics.files import LPIPS, metric_file
from ..lab.metrics.lpips import Lpips
from ..lab.metrics.pixels import psnr
from ..loading.load import choose_device, load
from ..loading.presets import NANO
from ..pipeline import Pipeline
from ..report import Report
from ..stage import Schedule
from .files import require_writable
from .generate import progress_bar, result_console
from .options import Size, choose_schedule, parse_prompt, read_prompts, require_fitting
from .program import app
from .sheet import compared

PROMPTS = (
    "a 3D icon of a red apple",
    "a 3D render of a fox",
    "a glossy emoji of a sailboat",
    "a flat icon of a rocket",
    "an android style emoji of a cactus",
    "a simple cartoon emoji of a penguin in twitter style",
    "a photo of a blue t-shirt",
    "a photo of a red dress",
)
"""One or two of every style in which the model was trained."""
METHODS = ("sparsevar:metric=logits,tau=0.9", "fastvar", "stagevar:alphas=[]", "stagevar")
OWN_FILE = Path("demo.png")
BATCH = 4  # images drawn at a time


@app.command()
def demo(
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", show_default="eight of ours", help="Prompts, one per line; a column each.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            show_default=", ".join(METHODS),
            help="A row below the dense one; given again, one more row. In a row, + joins methods: sparsevar+skip:last=1",
        ),
    ] = None,
    size: Size = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first column; every further column takes the next one.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", show_default="cuda if there is a GPU", help="cpu, cuda or cuda:N.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture; demo.png is overwritten, a file of another name only with --force.")
    ] = OWN_FILE,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture whatever its name.")] = False,
) -> None:
    """Draw the same prompts with the model in the package, dense and accelerated, and compare time and images."""
    schedule = choose_schedule(NANO.settings.schedules, size, None, None)
    methods = [parse_methods(row) for row in ("dense", *(method or METHODS))]
    for chosen in methods:
        require_fitting(chosen, NANO, schedule)
    prompts = [str(parse_prompt(prompt, NANO)) for prompt in (read_prompts(prompts_file) if prompts_file else PROMPTS)]
    if out.suffix.lower() not in IMAGE_FORMATS:
        raise SettingError(f"--out {out}: give a name that ends in {', '.join(IMAGE_FORMATS)}")
    require_writable([out], force or out == OWN_FILE)
    lpips = find_lpips(choose_device(device))

    with progress_bar() as progress:
        task = progress.add_task("loading", total=schedule.tokens * len(prompts) * len(methods))
        pipeline = load(NANO.name, device=device)
        pipeline(prompts[:1], seed=seed, size=schedule)  # not timed: whatever runs first pays for memory that all later ones find
        rows = [draw_row(pipeline, prompts, chosen, schedule, seed, progress, task) for chosen in methods]
    write_image(sheet(prompts, rows), out)
    console = result_console()
    console.print(comparison(rows, lpips))
    console.print(f"{len(prompts)} images of {size_of(rows[0])} in each row, on {rows[0].reports[0].device}, from the same seeds.")
    if lpips is None:
        console.print("LPIPS is shown as well where its network is found (NEXTSCALE_METRICS).")
    console.print(f"The images: {escape(str(out))}")


@dataclass(frozen=True, eq=False)
class Row:
    """All prompts drawn with one method."""

    pixels: Tensor  # [B, 3, H, W]
    reports: tuple[Report, ...]  # one per call

    @property
    def method(self) -> str:
        return self.reports[0].method

    @property
    def seconds(self) -> float:
        """Per image."""
        return sum(report.seconds for report in self.reports) / len(self.pixels)

    @property
    def cost_share(self) -> float:
        """MACs against dense generation."""
        return self._mean([report.cost_share for report in self.reports])

    @property
    def tokens_share(self) -> float:
        """Tokens that were run, mean of all blocks, of those of the schedule."""
        cells = sum(stage.height * stage.width for stage in self.reports[0].stages)
        return self._mean([sum(stage.computed for stage in report.stages) / cells for report in self.reports])

    @property
    def padding(self) -> float:
        """Share of these that no image needed."""
        return self._mean([report.padding for report in self.reports])

    def _mean(self, shares: Sequence[float]) -> float:
        """Of all images, each with the share of its call."""
        images = [len(report.seeds or ()) for report in self.reports]
        return sum(share * count for share, count in zip(shares, images, strict=True)) / sum(images)


def draw_row(
    pipeline: Pipeline, prompts: Sequence[str], method: Method, schedule: Schedule, seed: int, progress: Progress, task: TaskID
) -> Row:
    outputs = []
    progress.update(task, description=method.label)
    for first in range(0, len(prompts), BATCH):
        together = prompts[first : first + BATCH]
        if first == 0 and pipeline.model.device.type == "cuda":
            pipeline(together, seed=seed, size=schedule, method=method)  # not timed: a GPU loads its programs at their first use
        outputs.append(pipeline(together, seed=seed + first, size=schedule, method=method))
        progress.advance(task, schedule.tokens * len(together))
    return Row(torch.cat([output.pixels for output in outputs]), tuple(output.report for output in outputs))


def find_lpips(device: torch.device) -> Lpips | None:
    """None where the network is not on this machine."""
    try:
        file = metric_file(LPIPS)
    except CheckpointError:
        return None
    return Lpips.load(file, device)


def comparison(rows: Sequence[Row], lpips: Lpips | None) -> Table:
    table = Table("method", box=None, pad_edge=False)
    padded = any(row.padding for row in rows)
    headings = ["seconds per image", "times as fast", "MACs", "tokens", *(["padding"] if padded else []), "PSNR to dense"]
    headings += ["LPIPS"] if lpips else []
    for heading in headings:
        table.add_column(heading, justify="right")
    dense = rows[0]
    for row in rows:
        measures = [f"{row.seconds:.2f}", f"{dense.seconds / row.seconds:.2f}", percent(row.cost_share), percent(row.tokens_share)]
        if padded:
            measures.append(percent(row.padding))
        likeness = [decibels(psnr(row.pixels, dense.pixels))]
        if lpips:
            likeness.append(f"{lpips(row.pixels.clamp(-1, 1), dense.pixels.clamp(-1, 1)).mean():.3f}")
        table.add_row(escape(row.method), *measures, *(likeness if row is not dense else [""] * len(likeness)))
    return table


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def decibels(each: Tensor) -> str:
    """The median: an image that comes out the same is infinitely close."""
    middle = median(each.tolist())
    return "same" if middle == float("inf") else f"{middle:.1f} dB"


def size_of(row: Row) -> str:
    height, width = row.reports[0].size
    return f"{height}x{width}"


def sheet(prompts: Sequence[str], rows: Sequence[Row]) -> Image.Image:
    titles = [f"{row.method}: {percent(row.cost_share)} of the MACs, {percent(row.tokens_share)} of the tokens" for row in rows]
    return compared(prompts, {title: to_pil(row.pixels) for title, row in zip(titles, rows, strict=True)})
