"""`nextscale demo`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..errors import PromptError, SettingError
from ..eval.methods import parse_methods
from ..eval.quality import OnProgress
from ..eval.timing import UNEVEN_NOTE, is_uneven, percentiles_and_range, repeated, with_range
from ..io import to_pil, write_image
from ..loading.presets import ModelSpec
from ..methods.auto import fitting_profile
from ..methods.method import Method
from ..methods.selection import MeasuredPoint, MeasuredProfile
from ..metrics.lpips import Lpips
from ..metrics.pixels import psnr
from ..output import Output
from ..pipeline import Pipeline
from ..report import Report
from ..stage import Schedule
from .files import require_image_name, require_writable
from .old_options import BATCH_HELP, MACHINE, Force, ModelOptions, PromptFile, Seed, SizeOptions, compared_methods, out_option
from .old_parse import named_profiles, parse_prompt, situation_of
from .options import grouped
from .program import app
from .show import compared, darkened, engines, result_console, share_bar

PROMPTS = (
    "a 3D icon of a red apple",
    "a photo of a blue t-shirt",
    "a 3D render of a fox",
    "a glossy emoji of a sailboat",
    "a flat icon of a rocket",
    "an android style emoji of a cactus",
    "a simple cartoon emoji of a penguin in twitter style",
    "a photo of a red dress",
)
"""One or two of every style in which nano was trained."""
ON_CPU = 3  # of them where a profile asks for large images, one per round: a dense one of 512 px takes 16 s on two cores
NEAR, FAST = 0.05, 3.0  # an LPIPS at which one has to look twice, and a speedup that pays for a visible difference
PUBLISHED = ("sparsevar:metric=logits,tau=0.9", "fastvar", "stagevar:alphas=[]", "stagevar")
OWN_FILE = Path("demo.png")
OWN_BATCH = 4  # where there is no profile to go by
UNTIMED = 2  # calls on a GPU before those that are timed: the first loads its programs, the second captures CUDA graphs


@app.command()
@grouped
def demo(
    *,
    model: ModelOptions,
    prompts: PromptFile,
    method: Annotated[list[str] | None, compared_methods("two points of the model's profile")] = None,
    size: SizeOptions,
    seed: Seed = 0,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", min=1, rich_help_panel=MACHINE, show_default="as in the profile", help=f"{BATCH_HELP}."),
    ] = None,
    out: Annotated[Path, out_option("FILE", "The picture; demo.png is overwritten, a file of another name only with --force.")] = OWN_FILE,
    force: Force = False,
) -> None:
    """Generate the same prompts dense and accelerated, and compare time and images.

    Without options it takes nano, which comes with the package, prompts of ours, and two points of its largest profile.
    """
    spec = model.spec
    columns = read_columns(prompts, spec)
    require_image_name("--out", out)
    require_writable([out], force or out == OWN_FILE)
    if method:
        comparison = Comparison(size.schedule(spec), [("", parse_methods(row)) for row in method], batch or OWN_BATCH)
    else:
        comparison = measured_comparison(model, size, batch, len(columns))
        few = comparison.measured and prompts.prompts_file is None and model.torch_device.type != "cuda"
        columns = columns[:ON_CPU] if few else columns
    for _, chosen in comparison.methods:
        model.settled(chosen, comparison.schedule, comparison.batch)

    methods = [("", Method()), *comparison.methods]
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)

        def on_progress(name: str, share: float) -> None:
            progress.update(task, completed=share, description=escape(name))

        rows = RowMaker(model.load(), columns, comparison.schedule, seed, comparison.batch, on_progress).rows(methods)
    write_image(sheet([str(prompt) for prompt in columns], rows), out)
    console = result_console()
    console.print(row_table(rows, Lpips.load_for(rows[0].reports[0].size, model.torch_device)))
    if any(is_uneven(found) for found in (rows[0].seconds, *(row.speedup(rows[0]) for row in rows[1:]))):
        console.print(UNEVEN_NOTE)
    console.print(f"{len(columns)} images of {size_of(rows[0])} per row, on {machine(rows)}, from the same seeds.")
    console.print(f"Times are medians of {len(rows[0].reports)} rounds, with the range of the speedups.")
    console.print(escape(comparison.words), soft_wrap=True)
    console.print(f"The images, and where each method computed (bright): {escape(str(out))}")


@dataclass(frozen=True)
class Comparison:
    """What is compared with dense generation."""

    schedule: Schedule
    methods: Sequence[tuple[str, Method]]  # with the name of their row; "": the method's own
    batch: int
    words: str = "Speedups are measured here and now, in turns with dense."
    measured: bool = False  # the methods are points of a profile


def measured_comparison(model: ModelOptions, size: SizeOptions, batch: int | None, images: int) -> Comparison:
    """Points of the model's profile, of its largest where no size is asked for. Without one, methods as they are published."""
    spec, profiles = model.spec, list(named_profiles(model.spec, model.weights).values())
    fitting = [profile for profile in profiles if profile.device == model.torch_device.type]
    largest = max((profile.size for profile in fitting), key=math.prod, default=None)
    schedule = size.schedule(spec) if size.given or largest is None else spec.settings.schedules.choose(largest, None)
    try:
        profile = fitting_profile(situation_of(spec, model.torch_device, profiles, schedule, batch or images, model.weights))
    except SettingError as error:
        words = f"These are published settings, which were found for other models. To see what fits this one: {error}."
        return Comparison(schedule, [("", parse_methods(row)) for row in PUBLISHED], batch or OWN_BATCH, words)
    points = shown_points(profile)
    words = "".join(f"{name} is {point.as_method().label}: {point.label} in the profile.\n" for name, point in points.items())
    words += f"That was measured on {profile.described}; speedups above are measured here and now, in turns with dense."
    methods = [(name, point.as_method()) for name, point in points.items()]
    return Comparison(schedule, methods, batch or min(profile.batch, images), words, measured=True)


def shown_points(profile: MeasuredProfile) -> dict[str, MeasuredPoint]:
    """What `auto` takes where images should be nearly the same, and where they should be fast, as far as the profile goes."""
    points: dict[str, MeasuredPoint] = {}
    with suppress(SettingError):
        points[f"auto:lpips={NEAR:g}"] = profile.fastest(NEAR)
    try:
        name, fast = f"auto:speedup={FAST:g}", profile.nearest(FAST)
    except SettingError:
        name, fast = "the fastest point", profile.fastest(math.inf)
    if fast not in points.values():
        points[name] = fast
    return points


def read_columns(prompts: PromptFile, spec: ModelSpec) -> list[str | int]:
    texts = [prompt.text for prompt in prompts.read_file()]
    if not texts and spec.text_encoder is None:
        raise PromptError(f"the demo's own prompts are text, and {spec.name} takes class numbers: pass --prompts FILE")
    return [parse_prompt(text, spec) for text in texts or PROMPTS]


@dataclass(frozen=True, eq=False)
class MethodImages:
    """All prompts with one method."""

    pixels: Tensor  # [B, 3, H, W]
    masks: tuple[Tensor, ...]  # by stage, [B, h, w]: the share of the network that ran for each cell
    reports: tuple[Report, ...]  # one per round
    name: str = ""  # of its row

    @property
    def method(self) -> str:
        return self.name or self.reports[0].method

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that an image takes."""
        return percentiles_and_range([report.seconds / len(report.seeds or ()) for report in self.reports])

    def speedup(self, dense: MethodImages) -> dict[str, float]:
        """Compares each round with the dense call just before it."""
        pairs = zip(dense.reports, self.reports, strict=True)
        return percentiles_and_range([theirs.seconds / ours.seconds for theirs, ours in pairs])

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
    """Generates the prompts with every method, in turns."""

    pipeline: Pipeline
    prompts: Sequence[str | int]
    schedule: Schedule
    seed: int
    batch: int
    on_progress: OnProgress

    def rows(self, methods: Sequence[tuple[str, Method]]) -> list[MethodImages]:
        """Returns a row per method, dense first. Batches are repeated until there are enough rounds; images are those of the first time."""
        self.warm_up([method for _, method in methods])
        starts = range(0, len(self.prompts), self.batch)
        on_gpu = self.pipeline.model.device.type == "cuda"
        outputs: list[list[Output]] = [[] for _ in methods]
        masked: list[list[Output]] = [[] for _ in methods]
        reports: list[list[Report]] = [[] for _ in methods]
        turns = repeated(starts)
        for turn, first in enumerate(turns):
            for row, (name, method) in enumerate(methods):
                self.on_progress(name or method.label, (turn + row / len(methods)) / len(turns))
                output = self.generate(first, method, compute_mask=not on_gpu)
                reports[row].append(output.report)
                if turn < len(starts):  # masks are read between stages, which graphs cannot: on a GPU they come from calls of their own
                    outputs[row].append(output)
                    masked[row].append(self.generate(first, method, compute_mask=True) if on_gpu else output)
        return [
            MethodImages(
                torch.cat([output.pixels for output in outputs[row]]),
                tuple(map(torch.cat, zip(*(output.compute_mask or () for output in masked[row]), strict=True))),
                tuple(reports[row]),
                name,
            )
            for row, (name, _) in enumerate(methods)
        ]

    def warm_up(self, methods: Sequence[Method]) -> None:
        """Runs what is not timed: whatever runs first pays for memory that all later calls find. On a GPU graphs are captured."""
        on_gpu = self.pipeline.model.device.type == "cuda"
        for method in methods if on_gpu else methods[-1:]:
            for _ in range(UNTIMED if on_gpu else 1):
                self.generate(0, method)

    def generate(self, first: int, method: Method, compute_mask: bool = False) -> Output:
        together = self.prompts[first : first + self.batch]
        return self.pipeline(together, seed=self.seed + first, size=self.schedule, method=method, compute_mask=compute_mask)


def row_table(rows: Sequence[MethodImages], lpips: Lpips | None) -> Table:
    table = Table("method", box=None, pad_edge=False)
    padded = any(row.padding for row in rows)
    headings = ["seconds per image", "speedup", "MACs", "tokens", *(["padding"] if padded else []), "PSNR to dense"]
    headings += ["LPIPS"] if lpips else []
    for heading in headings:
        table.add_column(heading, justify="right")
    dense = rows[0]
    for row in rows:
        measures = [f"{row.seconds['median']:.2f}", with_range(row.speedup(dense)), percent(row.cost_share), percent(row.tokens_share)]
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
    """A row for each prompt: the dense image, then for each method its image and where it computed."""
    columns: dict[str, list[Image.Image]] = {}
    for row in rows:
        images = to_pil(row.pixels)
        shares = f"{percent(row.cost_share)} of the MACs, {percent(row.tokens_share)} of the tokens"
        columns[row.method if row is rows[0] else f"{row.speedup(rows[0])['median']:.2f}x: {row.method}, {shares}"] = images
        if row is not rows[0]:
            columns[f"computed by {row.method}"] = darkened(images, row.masks)
    return compared(list(columns), {prompt: [images[i] for images in columns.values()] for i, prompt in enumerate(prompts)})
