"""`nextscale quality` and `nextscale frontier`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image, ImageDraw
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from ..errors import NextscaleError, SettingError
from ..evals.agreement import Agreement, real_features
from ..evals.frontier import frontier_svg
from ..evals.methods import LISTS, chosen_methods
from ..evals.prompts import EvalPrompt, read_eval_prompts
from ..evals.quality import BENCHMARK, Evaluation, Judges, evaluate, mixed_batches
from ..files import IMAGE_FORMATS, write_image, write_text
from ..loading import choose_device, load
from ..metrics.efficientnet import EfficientNetLite0
from ..metrics.files import EFFICIENTNET, LPIPS, metric_file
from ..presets import build_model, model_spec
from .files import require_writable
from .generate import result_console
from .options import DEFAULT_MODEL, Dtype, Size, as_torch_dtype, choose_schedule
from .program import app

MACHINE, OUTPUT = "Model and machine", "What to write"
THUMBNAIL, MARGIN = 192, 18  # pixels on a sheet: of an image, and of the line above a method's images


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
    weights: Annotated[Path | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="File or folder of the model.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="File of the tokenizer.")] = None,
    text_encoder: Annotated[
        str | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="Folder, file or hub name of the text encoder.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", rich_help_panel=MACHINE, show_default="cuda if there is a GPU", help="cpu, cuda or cuda:N."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(rich_help_panel=MACHINE, show_default="bfloat16, on the CPU float32", help="Type of the weights.")
    ] = None,
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
    drawn = read_eval_prompts(prompts, limit)
    for name in (LPIPS, EFFICIENTNET):
        metric_file(name, metrics)  # missing ones are told before anything is loaded
    if sheet is not None:
        if sheet.suffix.lower() not in IMAGE_FORMATS:
            raise SettingError(f"--sheet {sheet}: give a name that ends in {', '.join(IMAGE_FORMATS)}")
        require_writable([sheet], force)
    earlier = [] if out is None or not out.exists() else read_rows(out)
    place = choose_device(device)
    with progress_bar() as progress:
        draws = len(chosen) * (1 + len(mixed_batches(len(drawn), batch)))
        task = progress.add_task("loading", total=draws)
        train_missing_probe(probe, data or [], prompts, metrics, place)
        judges = Judges.load(metrics, probe, place)
        pipeline = load(model, weights=weights, tokenizer=tokenizer, text_encoder=text_encoder, device=device, dtype=as_torch_dtype(dtype))

        def on_draw(name: str) -> None:
            progress.update(task, advance=1, description=escape(name))

        found = evaluate(pipeline, chosen, drawn, judges, size=schedule, seed=seed, batch=batch, on_draw=on_draw)
    if out is not None:
        write_rows([*earlier, *found.rows], out)
    if sheet is not None:
        write_image(contact_sheet(found), sheet)
    show_rows(found.rows)


@app.command()
def frontier(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A .jsonl file that `nextscale quality --out` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="An .svg file.")] = Path("frontier.svg"),
    model: Annotated[str | None, typer.Option(metavar="MODEL", show_default="that of the last row")] = None,
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


def newest_run(rows: Sequence[dict[str, Any]], model: str | None, size: int | None) -> list[dict[str, Any]]:
    """The last row of every method, for one model and size."""
    judged = [row for row in rows if row.get("benchmark") == BENCHMARK]
    fitting = [row for row in judged if model in (None, row["model"]) and size in (None, row["size"][0])]
    if not fitting:
        known = sorted({f"{row['model']} at {row['size'][0]}" for row in judged})
        raise SettingError(f"no row of `nextscale quality` fits; there are {', '.join(known) or 'none'}")
    last = fitting[-1]
    return list({row["method"]: row for row in fitting if (row["model"], row["size"]) == (last["model"], last["size"])}.values())


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


def progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def read_rows(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NextscaleError(f"{file} cannot be read as results, one JSON object per line ({error}): give another file") from error


def write_rows(rows: Sequence[dict[str, Any]], file: Path) -> None:
    write_text("".join(json.dumps(row) + "\n" for row in rows), file)


def contact_sheet(found: Evaluation) -> Image.Image:
    """A line of images per method."""
    columns = max(len(images) for images in found.samples.values())
    canvas = Image.new("RGB", (columns * THUMBNAIL, len(found.samples) * (THUMBNAIL + MARGIN)), "white")
    pen = ImageDraw.Draw(canvas)
    for line, (name, images) in enumerate(found.samples.items()):
        top = line * (THUMBNAIL + MARGIN)
        pen.text((4, top + 3), name, fill="black")
        for column, image in enumerate(images):
            canvas.paste(thumbnail(image), (column * THUMBNAIL, top + MARGIN))
    return canvas


def thumbnail(image: Tensor) -> Image.Image:
    """Of [3, H, W] in 8 bits."""
    whole = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    whole.thumbnail((THUMBNAIL, THUMBNAIL))
    return whole


COLUMNS = {
    "ms/image": lambda row: f"{row['ms_per_image']['median']:.2f}",
    "times faster": lambda row: f"{row['speedup']['median']:.2f}",
    "multiply-adds": lambda row: f"{row['cost_share']:.0%}",
    "kept": lambda row: "" if row["kept"] is None else f"{row['kept']:.0%}",
    "PSNR": lambda row: with_bounds(row.get("psnr"), 1),
    "SSIM": lambda row: with_bounds(row.get("ssim"), 3),
    "LPIPS": lambda row: with_bounds(row.get("lpips"), 3),
    "Fréchet to real": lambda row: with_bounds(row.get("frechet_real"), 1),
    "to dense": lambda row: with_bounds(row.get("frechet_dense"), 1),
    "style": lambda row: with_bounds(row.get("style"), 3),
    "label": lambda row: with_bounds(row.get("label"), 3),
    "top 5": lambda row: with_bounds(row.get("label_top5"), 3),
}


def with_bounds(interval: dict[str, float] | None, digits: int) -> str:
    if interval is None:
        return ""
    return f"{interval['value']:.{digits}f} ({interval['low']:.{digits}f}–{interval['high']:.{digits}f})"


def show_rows(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row["error"]] if "error" in row else [column(row) for column in COLUMNS.values()]
        table.add_row(escape(row["method"]), *(escape(cell) for cell in cells))
    console = result_console()
    console.print(table)
    if "style" in rows[0]:
        real = ", ".join(f"{name} {rows[0][name]['real']}" for name in ("style", "label", "label_top5") if name in rows[0])
        console.print(
            f"Agreement is that of probes on EfficientNet-lite0 features, which are right about held-out real images so often: {real}"
        )
