"""`nextscale generate`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from ..errors import SettingError
from ..guidance import resolve_guidance
from ..io import grid as side_by_side
from ..io import write_image, write_text
from ..lab.evals.methods import parse_methods
from ..loading.load import choose_device, load
from ..loading.presets import model_spec
from ..pipeline import Pipeline, Preview
from ..report import Report
from ..text import with_positive_prompt
from .files import Picture, plan_pictures, planned_files, require_writable
from .options import (
    MACHINE,
    OUTPUT,
    Aspect,
    Device,
    DtypeName,
    OffloadText,
    Sides,
    Size,
    TextEncoderSource,
    TokenizerFile,
    Weights,
    all_prompts,
    as_torch_dtype,
    choose_schedule,
    chosen_sampling,
    parse_guidance,
    parse_prompt,
    require_fitting,
    require_text_model,
    split_model,
)
from .program import app, version

UNLIMITED_WIDTH = 10_000
DARKEST = 0.25  # of what no stage has run
DRAWING = "How to draw"


@app.command()
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT",
            show_default=False,
            help="A name from `nextscale models`, by default nano, which comes with the package; then texts, or class numbers for class"
            " models. -1 means no class and needs -- before it: generate var-d16 --seed 1 -- 207 -1",
        ),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="More prompts, one per line; blank lines and lines that start with # are skipped."),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images per prompt.")] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, show_default="random", help="Seed of the first image; every further image takes the next one.")
    ] = None,
    size: Size = None,
    aspect: Aspect = None,
    sides: Sides = None,
    negative: Annotated[
        str | None, typer.Option(metavar="PROMPT", rich_help_panel=DRAWING, help="A text or class to steer away from.")
    ] = None,
    positive_prompt: Annotated[
        bool,
        typer.Option(
            "--positive-prompt", rich_help_panel=DRAWING, help="Infinity: add words for good faces to texts that seem to mention a person."
        ),
    ] = False,
    guidance: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE",
            rich_help_panel=DRAWING,
            help="A number keeps the model's published form; 3,3,1 is one scale per stage; constant:4 and ramp:2.5 choose the form.",
        ),
    ] = None,
    temperature: Annotated[
        str | None, typer.Option(metavar="NUMBER", rich_help_panel=DRAWING, help="Below 1 is less random; 1,1,0.5 is one per stage.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(rich_help_panel=DRAWING, help="Draw among this many of the most likely codes; 0 means all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(rich_help_panel=DRAWING, help="Draw among the codes that make up this probability; 0 means all.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", rich_help_panel=DRAWING, help="Always take the most likely code.")] = False,
    smooth: Annotated[
        bool | None,
        typer.Option(
            "--smooth/--no-smooth", rich_help_panel=DRAWING, show_default="as published", help="VAR, HART, STAR: mix codes, or draw one."
        ),
    ] = None,
    no_refine: Annotated[
        bool, typer.Option("--no-refine", rich_help_panel=DRAWING, help="STAR's sampler: draw late stages at once instead of in rounds.")
    ] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            rich_help_panel=DRAWING,
            show_default="dense",
            help="An acceleration method with its settings, such as skip:last=2; given again, several at once. See `nextscale plan`.",
        ),
    ] = None,
    as_released: Annotated[
        bool,
        typer.Option(
            "--as-released",
            rich_help_panel=DRAWING,
            help="STAR: all images of a batch read the first prompt, as the released program does.",
        ),
    ] = False,
    weights: Weights = None,
    tokenizer: TokenizerFile = None,
    text_encoder: TextEncoderSource = None,
    offload_text: OffloadText = False,
    device: Device = None,
    dtype: DtypeName = None,
    batch: Annotated[
        int, typer.Option(min=1, rich_help_panel=MACHINE, help="Images drawn at a time; fewer need less memory and come out the same.")
    ] = 4,
    out: Annotated[
        Path, typer.Option(metavar="PATH", rich_help_panel=OUTPUT, help="A folder, or for a single image a .png, .jpg or .webp file.")
    ] = Path("out"),
    grid: Annotated[Path | None, typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="All images side by side.")] = None,
    previews: Annotated[
        bool, typer.Option("--previews", rich_help_panel=OUTPUT, help="The image after each stage, as NAME-stage03.png.")
    ] = False,
    masks: Annotated[
        bool, typer.Option("--masks", rich_help_panel=OUTPUT, help="The image, darker where the method ran less of it, as NAME-kept.png.")
    ] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Settings, times and memory as JSON.")] = None,
    force: Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Overwrite files.")] = False,
) -> None:
    """Draw images from prompts."""
    model, given = split_model(prompts or [])
    spec = model_spec(model)
    schedule = choose_schedule(spec.settings.schedules, size, aspect, sides)
    scales = None if guidance is None else parse_guidance(guidance, spec.settings.guidance)
    if no_refine and spec.settings.sampling.refine is None:
        raise SettingError(f"--no-refine is for models that draw late stages in rounds; {model} draws each at once: leave it out")
    sampling = chosen_sampling(temperature, top_k, top_p, greedy, smooth, no_refine)
    acceleration = parse_methods(*method or ())
    # Generation checks these three as well, but only after the weights are loaded.
    spec.settings.sampling.changed(**sampling).check(schedule)
    resolve_guidance(scales, spec.settings.guidance).scales(schedule)
    require_fitting(acceleration, spec, schedule)
    texts = all_prompts(given, prompts_file)
    if positive_prompt:
        require_text_model(spec)
        texts = [with_positive_prompt(text) for text in texts]
    pictures = plan_pictures([parse_prompt(text, spec) for text in texts], images, secrets.randbits(32) if seed is None else seed, out)
    against = None if negative is None else parse_prompt(negative, spec)
    require_writable(planned_files(pictures, schedule if previews else (), masks, grid, report), force)
    choose_device(device)

    open_pipeline = partial(
        load,
        model,
        weights=weights,
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        offload_text=offload_text,
        device=device,
        dtype=as_torch_dtype(dtype),
        as_released=as_released,
    )
    settings = {"size": schedule, "guidance": scales, "negative": against, "method": acceleration, "masks": masks, **sampling}
    calls = draw(open_pipeline, pictures, batch, schedule.tokens, settings, previews)
    if grid:
        write_image(side_by_side([Image.open(picture.file) for picture in pictures]), grid)
    if report:
        write_text(report_json(context.params | {"model": model, "prompts": given}, calls), report)
    show_results(calls)


@dataclass(frozen=True)
class Call:
    """Pictures that were drawn together."""

    pictures: Sequence[Picture]
    report: Report


def draw(
    open_pipeline: Callable[[], Pipeline],
    pictures: Sequence[Picture],
    batch: int,
    tokens: int,
    settings: Mapping[str, Any],
    previews: bool,
) -> list[Call]:
    """Draws and writes all pictures, `batch` at a time, under a bar that counts `tokens` for each."""
    calls = []
    with progress_bar() as progress:
        task = progress.add_task("loading", total=tokens * len(pictures))
        pipeline = open_pipeline()
        if len(pictures) > batch:  # what the encoder refuses is told before anything is drawn and written
            for prompt in dict.fromkeys(picture.prompt for picture in pictures):
                pipeline.reader.read(prompt)
        progress.update(task, description="drawing")
        for first in range(0, len(pictures), batch):
            together = pictures[first : first + batch]
            output = pipeline(
                [picture.prompt for picture in together],
                seed=[picture.seed for picture in together],
                on_stage=stage_watcher(together, previews, progress, task),
                **settings,
            )
            drawn = output.images
            for picture, image in zip(together, drawn, strict=True):
                write_image(image, picture.file)
            if output.compute_mask is not None:
                for picture, image in zip(together, darkened(drawn, output.compute_mask), strict=True):
                    write_image(image, picture.kept_file)
            calls.append(Call(together, output.report))
    return calls


def progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def stage_watcher(call: Sequence[Picture], previews: bool, progress: Progress, task: TaskID) -> Callable[[Preview], None]:
    def stage_done(preview: Preview) -> None:
        stage = preview.done.stage
        if previews:
            for picture, image in zip(call, preview.images(), strict=True):
                write_image(image, picture.preview_file(stage))
        if not progress.disable and preview.canvas.latent.is_cuda:
            torch.cuda.synchronize()  # the host runs ahead of a GPU, and the bar would run with it
        progress.advance(task, stage.cells * len(call))

    return stage_done


def darkened(images: Sequence[Image.Image], kept: Sequence[Tensor]) -> list[Image.Image]:
    """The images with every place as dark as little of the network was run there; `kept`: shares per stage, [B, h, w].

    A place's share is that of all stages, each with the weight of its cells, so that the late ones count most.
    """
    size = (images[0].height, images[0].width)
    cells = sum(share[0].numel() for share in kept)
    resized = [share[0].numel() / cells * F.interpolate(share.cpu()[:, None], size, mode="nearest-exact")[:, 0] for share in kept]
    light = DARKEST + (1 - DARKEST) * torch.stack(resized).sum(dim=0)  # [B, height, width]
    shaded = [np.rint(np.asarray(image) * place[..., None].numpy()) for image, place in zip(images, light, strict=True)]
    return [Image.fromarray(pixels.astype(np.uint8)) for pixels in shaded]


def report_json(settings: Mapping[str, Any], calls: Sequence[Call]) -> str:
    described = [
        {
            "files": [picture.file for picture in call.pictures],
            "prompts": [picture.prompt for picture in call.pictures],
            **call.report.to_dict(),
        }
        for call in calls
    ]
    content = {"nextscale": version(), "torch": torch.__version__, "settings": settings, "calls": described}
    return json.dumps(content, indent=2, default=str, ensure_ascii=False) + "\n"


def show_results(calls: Sequence[Call]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    for heading in ("seed", "size", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("method", overflow="fold")
    table.add_column("MACs", justify="right")
    padded = any(call.report.padding for call in calls)
    if padded:
        table.add_column("padding", justify="right")
    for call in calls:
        for picture in call.pictures:
            height, width = call.report.size
            seconds = f"{call.report.seconds / len(call.pictures):.2f}"
            work = [f"{100 * share:.1f}%" for share in (call.report.cost_share, *([call.report.padding] if padded else []))]
            table.add_row(escape(str(picture.file)), str(picture.seed), f"{height}x{width}", seconds, escape(call.report.method), *work)
    console = result_console()
    console.print(table)
    reports = [call.report for call in calls]
    prompts, decoding = sum(report.condition_seconds for report in reports), sum(report.decode_seconds for report in reports)
    total = sum(report.seconds for report in reports)
    console.print(
        f"{total:.2f} s: prompts {prompts:.2f}, stages {total - prompts - decoding:.2f}, decoding {decoding:.2f};"
        f" peak memory {max(report.peak_memory for report in reports) / 2**30:.2f} GiB"
    )


def result_console() -> Console:
    """Standard output; file names stay on one line where a program reads them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNLIMITED_WIDTH)
