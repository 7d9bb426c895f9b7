"""`nextscale quality` and `nextscale frontier`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..errors import SettingError
from ..io import IMAGE_FORMATS, write_image, write_text
from ..lab.evals.agreement import Agreement, real_features
from ..lab.evals.frontier import frontier_svg
from ..lab.evals.judges import Judges
from ..lab.evals.methods import LISTS, chosen_methods
from ..lab.evals.prompts import EvalPrompt, read_eval_prompts
from ..lab.evals.quality import Evaluation, evaluate
from ..lab.metrics.efficientnet import EfficientNetLite0
from ..lab.metrics.files import EFFICIENTNET, LPIPS, metric_file
from ..lab.results import Row, comparable, judged, read_rows, real_agreement, write_rows
from ..loading.load import choose_device, load
from ..loading.presets import build_model, model_spec
from .files import require_writable
from .generate import UNLIMITED_WIDTH, result_console
from .options import (
    DEFAULT_MODEL,
    MACHINE,
    OUTPUT,
    Device,
    DtypeName,
    Size,
    TextEncoderSource,
    TokenizerFile,
    Weights,
    as_torch_dtype,
    choose_schedule,
    require_fitting,
)
from .program import app
from .progress import share_bar
from .sheet import compared

THUMBNAIL = 256  # pixels, the longer side of an image on a sheet


@app.command()
def quality(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name from `nextscale models`.")] = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Prompts, one per line; a .jsonl with caption, style and label; or a .tar shard of captions and real images.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD",
            show_default="standard",
            help=f"A list of methods ({', '.join(LISTS)}) or one such as 'fastvar + skip:last=1'; can be given again.",
        ),
    ] = None,
    size: Size = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first prompt; every further one takes the next, with every method.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, show_default="all", help="So many prompts, spread over the file.")] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", rich_help_panel=MACHINE, show_default="NEXTSCALE_METRICS", help="Where the networks lie that judge images."
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=MACHINE, help="Probes for agreement with the prompt; written if --data is given."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="SHARD",
            rich_help_panel=MACHINE,
            help="Training shards (.tar) to train the probes on, if --probe is not there yet; can be given again.",
        ),
    ] = None,
    weights: Weights = None,
    tokenizer: TokenizerFile = None,
    text_encoder: TextEncoderSource = None,
    device: Device = None,
    dtype: DtypeName = None,
    batch: Annotated[int, typer.Option(min=1, rich_help_panel=MACHINE, help="Images drawn at a time; times are per image of such.")] = 64,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="A .jsonl file, to which a row per method is added.")
    ] = None,
    sheet: Annotated[Path | None, typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="The same images with every method.")] = None,
    force: Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Overwrite the sheet.")] = False,
) -> None:
    """Measure what methods save and what they cost: time, likeness to dense images, agreement with the prompt."""
    if prompts is None:
        raise SettingError("no prompts: pass --prompts FILE, such as the shard of held-out images")
    spec = model_spec(model)
    schedule = choose_schedule(spec.settings.schedules, size, None, None)
    with torch.device("meta"):
        blocks = len(build_model(spec.model).blocks)
    chosen = chosen_methods(methods or ["standard"], len(schedule), blocks)
    for asked in methods or ():
        if asked not in LISTS:  # of a list, what does not fit becomes a row that says so
            require_fitting(chosen[asked], spec, schedule)
    drawn = read_eval_prompts(prompts, limit)
    earlier = [] if out is None or not out.exists() else read_rows(out)
    if any("benchmark" not in row for row in earlier):
        raise SettingError(f"--out {out} holds other things than results, and rows would be added to it: give another name")
    for name in (LPIPS, EFFICIENTNET):
        metric_file(name, metrics)  # missing ones are told before anything is loaded
    if sheet is not None:
        if sheet.suffix.lower() not in IMAGE_FORMATS:
            raise SettingError(f"--sheet {sheet}: give a name that ends in {', '.join(IMAGE_FORMATS)}")
        require_writable([sheet], force)
    if out is not None:
        require_writable([out], force=True)  # rows are added
    place = choose_device(device)
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        train_missing_probe(probe, data or [], prompts, metrics, place)
        judges = Judges.load(metrics, probe, place)
        pipeline = load(model, weights=weights, tokenizer=tokenizer, text_encoder=text_encoder, device=device, dtype=as_torch_dtype(dtype))

        def on_progress(name: str, share: float) -> None:
            progress.update(task, completed=share, description=escape(name))

        found = evaluate(pipeline, chosen, drawn, judges, size=schedule, seed=seed, batch=batch, on_progress=on_progress)
    if out is not None:
        write_rows([*earlier, *found.rows], out)
    if sheet is not None:
        write_image(contact_sheet(found), sheet)
    show_rows(found.rows)


@app.command()
def frontier(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A .jsonl file that `nextscale quality --out` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="An .svg file.")] = Path("frontier.svg"),
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", show_default="that of the last row")] = None,
    size: Annotated[
        int | None, typer.Option(metavar="HEIGHT", show_default="that of the last row", help="Of the images, in pixels.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Draw what methods save against what they cost, from results of `nextscale quality`."""
    if out.suffix.lower() != ".svg":
        raise SettingError(f"--out {out}: give a name that ends in .svg")
    require_writable([out], force)
    write_text(frontier_svg(newest_run(read_rows(results), model, size)), out)


def newest_run(rows: Sequence[Row], model: str | None, size: int | None) -> list[Row]:
    """The last row of every method that can be compared with the last row of this model and size."""
    known = judged(rows)
    fitting = [row for row in known if model in (None, row["model"]) and size in (None, row["size"][0])]
    if not fitting:
        there = sorted({f"{row['model']} at {row['size'][0]}" for row in known})
        raise SettingError(f"no row of `nextscale quality` fits; there are {', '.join(there) or 'none'}")
    return comparable(fitting, fitting[-1])


def train_missing_probe(probe: Path | None, data: Sequence[Path], prompts: Path, metrics: Path | None, device: torch.device) -> None:
    """Real images as they are and once more varied; judged on the images of the prompts, which must not be among them."""
    if not data or (probe is not None and probe.exists()):
        return
    if probe is None:
        raise SettingError("--data trains probes: say with --probe FILE where to keep them")
    if prompts.resolve() in [shard.resolve() for shard in data]:
        raise SettingError(f"{prompts} is in --data and in --prompts: what probes learn from cannot tell how good they are")
    network = EfficientNetLite0.load(metrics, device)
    shown: list[EvalPrompt] = [prompt for shard in data for prompt in read_eval_prompts(shard)]
    held = read_eval_prompts(prompts)
    if any(prompt.encoded is None for prompt in held):
        raise SettingError(f"probes are judged on real images of the prompts, and {prompts} has none: give a .tar shard of held-out images")
    features = torch.cat((real_features(network, shown), real_features(network, shown, augmented=True)))
    Agreement.train(features, [*shown, *shown], real_features(network, held), held).save(probe)


def contact_sheet(found: Evaluation) -> Image.Image:
    """A row of images per method."""
    return compared(found.shown, {name: [thumbnail(image) for image in images] for name, images in found.samples.items()})


def thumbnail(image: Tensor) -> Image.Image:
    """Of [3, H, W] in 8 bits."""
    whole = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    whole.thumbnail((THUMBNAIL, THUMBNAIL))
    return whole


def show_rows(rows: Sequence[Row]) -> None:
    """All measures with their intervals where the terminal is wide enough, else the most telling ones in 80 columns."""
    console = result_console()
    whole = table_of(rows, WHOLE)
    fits = console.measure(whole, options=console.options.update(max_width=UNLIMITED_WIDTH)).maximum <= console.width
    console.print(whole if fits else table_of(rows, BRIEF))
    if not fits:
        console.print("Times faster than dense; work: MACs; PSNR and LPIPS: to the dense image; of 5: label among the first five.")
    dense = rows[0]
    console.print(
        f"{dense['images']} images of {dense['size'][0]}x{dense['size'][1]}, {dense['batch']} at a time, on {dense['hardware']}: dense"
        f" {dense['ms_per_image']['median']:.1f} ms per image, of which decoding {dense['decode_ms_per_image']['median']:.1f} ms."
    )
    if real := real_agreement(dense):
        console.print(f"Style and label are named by probes, which are right about held-out real images so often: {real}.")
    for row in rows:
        if "error" in row:
            console.print(f"{row['method']} did not run: {row['error']}", markup=False)


def table_of(rows: Sequence[Row], columns: Mapping[str, Column]) -> Table:
    """Without the columns that no row fills."""
    ran = [row for row in rows if "error" not in row]
    shown = {heading: column for heading, column in columns.items() if any(column(row) for row in ran)}
    table = Table("method", box=None, pad_edge=False)
    for heading in shown:
        table.add_column(heading, justify="right")
    for row in ran:
        table.add_row(escape(row["method"]), *(column(row) for column in shown.values()))
    return table


def value(name: str, form: str, bounds: bool = False) -> Column:
    """A measure, empty where it was not taken."""

    def written(row: Row) -> str:
        interval = row.get(name)
        if interval is None:
            return ""
        middle, low, high = (format(interval[key], form) for key in ("value", "low", "high"))
        return f"{middle} ({low} to {high})" if bounds else middle

    return written


Column = Callable[[Row], str]
BRIEF: dict[str, Column] = {
    "faster": lambda row: f"{row['speedup']['median']:.2f}",
    "work": lambda row: f"{row['cost_share']:.0%}",
    "PSNR": value("psnr", ".1f"),
    "LPIPS": value("lpips", ".3f"),
    "style": value("style", ".0%"),
    "of 5": value("label_top5", ".0%"),
    "Fréchet": value("frechet_real", ".1f"),
}
WHOLE: dict[str, Column] = {
    "ms per image": lambda row: f"{row['ms_per_image']['median']:.2f}",
    "times faster": BRIEF["faster"],
    "MACs": BRIEF["work"],
    "cells run": lambda row: "" if row["kept"] is None else f"{row['kept']:.0%}",
    "PSNR": value("psnr", ".1f", bounds=True),
    "SSIM": value("ssim", ".3f", bounds=True),
    "LPIPS": value("lpips", ".3f", bounds=True),
    "Fréchet to real": value("frechet_real", ".1f", bounds=True),
    "to dense": value("frechet_dense", ".1f", bounds=True),
    "style": value("style", ".1%", bounds=True),
    "label": value("label", ".1%", bounds=True),
    "label of 5": value("label_top5", ".1%", bounds=True),
}
