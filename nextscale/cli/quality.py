"""`nextscale quality` and `nextscale frontier`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..errors import CheckpointError, PromptError, SettingError
from ..eval.agreement import Agreement, real_features
from ..eval.frontier import frontier_svg
from ..eval.judges import Judges
from ..eval.methods import LISTS, chosen_methods
from ..eval.quality import Evaluation, evaluate
from ..eval.results import Row, comparable, judged, read_rows, real_agreement, write_rows
from ..eval.timing import UNEVEN_NOTE, difference, is_uneven, with_range
from ..io import write_image, write_text
from ..loading.presets import build_model
from ..methods.method import Method
from ..metrics.efficientnet import EfficientNetLite0
from ..metrics.files import EFFICIENTNET, VARIABLE, metric_file
from ..offline.prompts import read_eval_prompts
from ..stage import Schedule
from .files import require_image_name, require_writable
from .old_options import (
    MACHINE,
    OUTPUT,
    Batch,
    Force,
    Metrics,
    ModelOptions,
    PromptFile,
    Seed,
    SizeOptions,
    compared_methods,
    out_option,
)
from .old_parse import method_name, parse_size
from .options import grouped
from .program import MEASURE, app
from .show import UNLIMITED_WIDTH, compared, result_console, share_bar

THUMBNAIL = 256  # pixels, the longer side of an image on a sheet
STANDARD = "standard"


@dataclass(frozen=True)
class JudgeOptions:
    """The networks that judge images, and the probes on their features."""

    metrics: Metrics = None
    probe: Annotated[
        Path | None,
        typer.Option(
            "--probe", metavar="FILE", rich_help_panel=MACHINE, help="Probes for agreement with the prompt; --data trains them if missing."
        ),
    ] = None
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="SHARD", rich_help_panel=MACHINE, help="A .tar shard to train missing probes on; can be repeated."),
    ] = None

    def features(self) -> Path | None:
        """Returns the file of EfficientNet; None where it is missing and no option needs it."""
        try:
            return metric_file(EFFICIENTNET, self.metrics)
        except CheckpointError:
            if self.metrics or self.probe or self.data:
                raise
            words = f"Fréchet distances are left out: {EFFICIENTNET} was not found. To add them, pass --metrics FOLDER or set {VARIABLE}."
            typer.echo(words, err=True)
            return None

    def load(self, features: Path | None, prompts: Path, device: torch.device) -> Judges:
        """Trains missing probes first; they are tested on the images of the prompts."""
        if self.data and not (self.probe is not None and self.probe.exists()):
            self._train_probe(self.data, prompts, device)
        return Judges.load(features, self.probe, device)

    def _train_probe(self, data: Sequence[Path], prompts: Path, device: torch.device) -> None:
        """Trains probes on real images as they are and once more augmented, and stores them."""
        if self.probe is None:
            raise SettingError("--data trains probes: add --probe FILE, where they are stored")
        require_writable([self.probe], force=False)
        if prompts.resolve() in [shard.resolve() for shard in data]:
            raise SettingError(
                f"{prompts} is in --data and in --prompts: give other shards, probes cannot be tested on what they learn from"
            )
        network = EfficientNetLite0.load(self.metrics, device)
        shown = [prompt for shard in data for prompt in read_eval_prompts(shard)]
        held = read_eval_prompts(prompts)
        if any(prompt.encoded is None for prompt in held):
            raise SettingError(f"probes are tested on real images, and {prompts} has none: give a .tar shard of held-out images")
        features = torch.cat((real_features(network, shown), real_features(network, shown, augmented=True)))
        Agreement.train(features, [*shown, *shown], real_features(network, held), held).save(self.probe)


@dataclass(frozen=True)
class ResultOptions:
    """Which files to write."""

    out: Annotated[Path | None, out_option("FILE", "A .jsonl file, to which a row per method is added.")] = None
    sheet: Annotated[
        Path | None, typer.Option("--sheet", metavar="FILE", rich_help_panel=OUTPUT, help="Write the same images with every method.")
    ] = None
    force: Force = False

    def require_writable(self) -> None:
        if self.sheet is not None:
            require_image_name("--sheet", self.sheet)
            require_writable([self.sheet], self.force)
        if self.out is not None:
            require_writable([self.out], force=True)  # rows are added
        if any("benchmark" not in row for row in self.earlier_rows()):
            raise SettingError(f"--out {self.out} holds other things than results, and rows would be added to it: give another name")

    def earlier_rows(self) -> list[Row]:
        return [] if self.out is None or not self.out.exists() else read_rows(self.out)

    def write(self, found: Evaluation) -> None:
        if self.out is not None:
            write_rows([*self.earlier_rows(), *found.rows], self.out)
        if self.sheet is not None:
            write_image(contact_sheet(found), self.sheet)


@app.command(rich_help_panel=MEASURE)
@grouped
def quality(
    *,
    model: ModelOptions,
    prompts: PromptFile,
    method: Annotated[list[str] | None, compared_methods(STANDARD, f"a list of methods ({', '.join(LISTS)})")] = None,
    size: SizeOptions,
    seed: Seed = 0,
    batch: Batch = 64,
    judging: JudgeOptions,
    results: ResultOptions,
) -> None:
    """Measure what methods save and what they cost: time, likeness to dense images, agreement with the prompt."""
    if prompts.prompts_file is None:
        raise PromptError("no prompts: pass --prompts FILE, such as a shard of held-out images")
    spec = model.spec
    schedule = size.schedule(spec)
    chosen = fitting_methods(method or [], model, schedule, batch)
    if spec.text_encoder is None:
        raise SettingError(f"prompts of files are text, and {spec.name} takes class numbers: choose a text model")
    judged_prompts = prompts.read_file()
    results.require_writable()
    features = judging.features()
    device = model.torch_device
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        judges = judging.load(features, prompts.prompts_file, device)
        pipeline = model.load()

        def on_batch(name: str, share: float) -> None:
            progress.update(task, completed=share, description=escape(name))

        found = evaluate(pipeline, chosen, judged_prompts, judges, size=schedule, seed=seed, batch=batch, on_progress=on_batch)
    results.write(found)
    show_rows(found.rows)


def fitting_methods(asked: Sequence[str], model: ModelOptions, schedule: Schedule, batch: int) -> dict[str, Method]:
    """Refuses a method that does not fit; one of a list that does not becomes a row that says so."""
    with torch.device("meta"):
        blocks = len(build_model(model.spec.model).blocks)
    names = [method_name(method) for method in asked]
    chosen = chosen_methods(names or [STANDARD], len(schedule), blocks)
    for one in names:
        if one not in LISTS:
            model.settled(chosen[one], schedule, batch)
    return chosen


@app.command(rich_help_panel=MEASURE)
def frontier(
    results: Annotated[
        Path, typer.Argument(metavar="RESULTS", show_default=False, help="A .jsonl file that `nextscale quality --out` wrote.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", show_default="that of the last row", help="Plot the rows of this model.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", metavar="SIZE", show_default="that of the last row", help="Plot images of HEIGHTxWIDTH pixels, or of a square's side."
        ),
    ] = None,
    out: Annotated[Path, out_option("FILE", "An .svg file.")] = Path("frontier.svg"),
    force: Force = False,
) -> None:
    """Plot what methods save against what they cost, from results of `nextscale quality`."""
    if out.suffix.lower() != ".svg":
        raise SettingError(f"--out {out}: give a name that ends in .svg")
    require_writable([out], force)
    write_text(frontier_svg(newest_run(read_rows(results), model, None if size is None else pixels_of(size))), out)


def pixels_of(size: str) -> list[int]:
    """Height and width in pixels."""
    match parse_size(size):
        case int(side):
            return [side, side]
        case (height, width):
            return [height, width]
        case _:
            raise SettingError(f"--size {size!r}: give HEIGHTxWIDTH in pixels, or the side of a square")


def newest_run(rows: Sequence[Row], model: str | None, size: list[int] | None) -> list[Row]:
    """The last row of every method that can be compared with the last row of this model and size."""
    known = judged(rows)
    fitting = [row for row in known if model in (None, row["model"]) and size in (None, row["size"])]
    if not fitting:
        there = sorted({f"{row['model']} at {row['size'][0]}x{row['size'][1]}" for row in known})
        raise SettingError(f"no row of `nextscale quality` fits; there are {', '.join(there) or 'none'}")
    return comparable(fitting, fitting[-1])


def contact_sheet(found: Evaluation) -> Image.Image:
    """A row of images per method."""
    return compared(found.shown, {name: [thumbnail(image) for image in images] for name, images in found.samples.items()})


def thumbnail(image: Tensor) -> Image.Image:
    """A small copy of [3, H, W] in 8 bits."""
    whole = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    whole.thumbnail((THUMBNAIL, THUMBNAIL))
    return whole


def show_rows(rows: Sequence[Row]) -> None:
    """Prints all measures with their intervals where the terminal is wide enough, else the main ones in 80 columns."""
    console = result_console()
    whole = table_of(rows, WHOLE)
    dense, *others = [row for row in rows if "error" not in row]
    rounds = [dense["ms_per_image"], *(row["speedup"] for row in others)]
    fits = console.measure(whole, options=console.options.update(max_width=UNLIMITED_WIDTH)).maximum <= console.width
    console.print(whole if fits else table_of(rows, BRIEF))
    if not fits:
        console.print("Speedup and MACs: relative to dense; PSNR and LPIPS: to the dense image; top-5: label among the first five.")
        console.print(f"Speedups are medians; the rounds of a method differ by up to {max(map(difference, rounds)):.0%}.")
    milliseconds = [dense[name]["median"] for name in ("ms_per_image", "decode_ms_per_image")]
    console.print(
        f"{dense['images']} images of {dense['size'][0]}x{dense['size'][1]}, batch {dense['batch']}, {dense['engine']},"
        f" on {dense['hardware']}: dense {milliseconds[0]:.1f} ms per image, of which decoding {milliseconds[1]:.1f} ms."
    )
    if real := real_agreement(dense):
        console.print(f"Style and label are judged by probes; their accuracy on held-out real images: {real}.")
    if any(map(is_uneven, rounds)):
        console.print(UNEVEN_NOTE)
    for row in rows:
        if "error" in row:
            console.print(f"{row['method']} did not run: {row['error']}", markup=False)


def table_of(rows: Sequence[Row], columns: Mapping[str, Column]) -> Table:
    """A table of the methods that ran, without the columns that no row fills."""
    ran = [row for row in rows if "error" not in row]
    shown = {heading: column for heading, column in columns.items() if any(column(row) for row in ran)}
    table = Table("method", box=None, pad_edge=False)
    for heading in shown:
        table.add_column(heading, justify="right")
    for row in ran:
        table.add_row(escape(row["method"]), *(column(row) for column in shown.values()))
    return table


def value(name: str, form: str, bounds: bool = False) -> Column:
    """A column with a measure, empty where it was not taken."""

    def written(row: Row) -> str:
        interval = row.get(name)
        if interval is None:
            return ""
        middle, low, high = (format(interval[key], form) for key in ("value", "low", "high"))
        return f"{middle} ({low} to {high})" if bounds else middle

    return written


Column = Callable[[Row], str]
BRIEF: dict[str, Column] = {
    "speedup": lambda row: f"{row['speedup']['median']:.2f}",
    "MACs": lambda row: f"{row['cost_share']:.0%}",
    "PSNR": value("psnr", ".1f"),
    "LPIPS": value("lpips", ".3f"),
    "style": value("style", ".0%"),
    "top-5": value("label_top5", ".0%"),
    "Fréchet": value("frechet_real", ".1f"),
}
WHOLE: dict[str, Column] = {
    "ms per image": lambda row: with_range(row["ms_per_image"]),
    "speedup": lambda row: with_range(row["speedup"]),
    "MACs": BRIEF["MACs"],
    "tokens": lambda row: "" if row["kept"] is None else f"{row['kept']:.0%}",
    "PSNR": value("psnr", ".1f", bounds=True),
    "SSIM": value("ssim", ".3f", bounds=True),
    "LPIPS": value("lpips", ".3f", bounds=True),
    "Fréchet to real": value("frechet_real", ".1f", bounds=True),
    "to dense": value("frechet_dense", ".1f", bounds=True),
    "style": value("style", ".1%", bounds=True),
    "label": value("label", ".1%", bounds=True),
    "label top-5": value("label_top5", ".1%", bounds=True),
}
