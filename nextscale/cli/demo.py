"""`nextscale demo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from PIL import Image
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table
from torch import Tensor

from ..accel.method import Method
from ..errors import PromptError
from ..io import to_pil, write_image
from ..lab.evals.methods import parse_methods
from ..lab.metrics.lpips import Lpips
from ..lab.metrics.pixels import psnr
from ..loading.presets import ModelSpec
from ..pipeline import Pipeline
from ..report import Report
from ..stage import Schedule
from .console import result_console, token_bar
from .files import require_image_name, require_writable
from .groups import grouped
from .metrics import find_lpips
from .options import Batch, Force, Metrics, ModelOptions, PromptFile, Seed, SizeOptions, compared_methods, out_option
from .parse import parse_prompt
from .program import app
from .results import engines
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
"""One or two of every style in which nano was trained."""
COMPARED = ("sparsevar:metric=logits,tau=0.9", "fastvar", "stagevar:alphas=[]", "stagevar")
OWN_FILE = Path("demo.png")
UNTIMED = 2  # calls on a GPU before those that are timed: the first loads its programs, the second captures CUDA graphs


@app.command()
@grouped
def demo(
    *,
    model: ModelOptions,
    prompts: PromptFile,
    method: Annotated[list[str] | None, compared_methods(", ".join(COMPARED))] = None,
    size: SizeOptions,
    seed: Seed = 0,
    batch: Batch = 4,
    metrics: Metrics = None,
    out: Annotated[Path, out_option("FILE", "The picture; demo.png is overwritten, a file of another name only with --force.")] = OWN_FILE,
    force: Force = False,
) -> None:
    """Generate the same prompts dense and accelerated, and compare time and images.

    Without options it takes nano, which comes with the package, and eight prompts of ours.
    """
    spec = model.spec
    schedule = size.schedule(spec)
    methods = [parse_methods(row) for row in ("dense", *(method or COMPARED))]
    for chosen in methods:
        model.settled(chosen, schedule, batch)
    columns = read_columns(prompts, spec)
    require_image_name("--out", out)
    require_writable([out], force or out == OWN_FILE)
    lpips = find_lpips(metrics, model.torch_device)

    with token_bar() as progress:
        task = progress.add_task("loading", total=schedule.tokens * len(columns) * len(methods))
        pipeline = model.load()
        pipeline(columns[:1], seed=seed, size=schedule)  # not timed: whatever runs first pays for memory that all later calls find
        maker = RowMaker(pipeline, columns, schedule, seed, batch, progress, task)
        rows = [maker.row(chosen) for chosen in methods]
    write_image(sheet([str(prompt) for prompt in columns], rows), out)
    console = result_console()
    console.print(comparison(rows, lpips))
    console.print(f"{len(columns)} images of {size_of(rows[0])} per row, on {machine(rows)}, from the same seeds.")
    if lpips is None:
        console.print("LPIPS is shown as well where its network is found (NEXTSCALE_METRICS).")
    console.print(f"The images: {escape(str(out))}")


def read_columns(prompts: PromptFile, spec: ModelSpec) -> list[str | int]:
    texts = [prompt.text for prompt in prompts.read_file()]
    if not texts and spec.text_encoder is None:
        raise PromptError(f"the demo's own prompts are text, and {spec.name} takes class numbers: pass --prompts FILE")
    return [parse_prompt(text, spec) for text in texts or PROMPTS]


@dataclass(frozen=True, eq=False)
class MethodImages:
    """All prompts with one method."""

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
        """MACs relative to dense generation."""
        return self._mean([report.cost_share for report in self.reports])

    @property
    def tokens_share(self) -> float:
        """Share of the schedule's tokens that were computed, mean of all blocks."""
        cells = sum(stage.height * stage.width for stage in self.reports[0].stages)
        return self._mean([sum(stage.computed for stage in report.stages) / cells for report in self.reports])

    @property
    def padding(self) -> float:
        """Share of the computed tokens that no image needed."""
        return self._mean([report.padding for report in self.reports])

    def _mean(self, shares: Sequence[float]) -> float:
        """Mean over images, each with the share of its call."""
        images = [len(report.seeds or ()) for report in self.reports]
        return sum(share * count for share, count in zip(shares, images, strict=True)) / sum(images)


@dataclass(frozen=True, eq=False)
class RowMaker:
    """Generates the prompts once per method."""

    pipeline: Pipeline
    prompts: Sequence[str | int]
    schedule: Schedule
    seed: int
    batch: int
    progress: Progress
    task: TaskID

    def row(self, method: Method) -> MethodImages:
        outputs = []
        self.progress.update(self.task, description=method.label)
        for first in range(0, len(self.prompts), self.batch):
            together = self.prompts[first : first + self.batch]
            if first == 0 and self.pipeline.model.device.type == "cuda":
                for _ in range(UNTIMED):
                    self.pipeline(together, seed=self.seed, size=self.schedule, method=method)
            outputs.append(self.pipeline(together, seed=self.seed + first, size=self.schedule, method=method))
            self.progress.advance(self.task, self.schedule.tokens * len(together))
        return MethodImages(torch.cat([output.pixels for output in outputs]), tuple(output.report for output in outputs))


def comparison(rows: Sequence[MethodImages], lpips: Lpips | None) -> Table:
    table = Table("method", box=None, pad_edge=False)
    padded = any(row.padding for row in rows)
    headings = ["seconds per image", "speedup", "MACs", "tokens", *(["padding"] if padded else []), "PSNR to dense"]
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


def size_of(row: MethodImages) -> str:
    height, width = row.reports[0].size
    return f"{height}x{width}"


def machine(rows: Sequence[MethodImages]) -> str:
    reports = [report for row in rows for report in row.reports]
    return f"{reports[0].device} ({engines(reports)})"


def sheet(prompts: Sequence[str], rows: Sequence[MethodImages]) -> Image.Image:
    titles = [f"{row.method}: {percent(row.cost_share)} of the MACs, {percent(row.tokens_share)} of the tokens" for row in rows]
    return compared(prompts, {title: to_pil(row.pixels) for title, row in zip(titles, rows, strict=True)})
