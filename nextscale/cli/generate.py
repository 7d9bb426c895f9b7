"""`nextscale generate`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..errors import SettingError
from .files import Picture, default_out, plan_pictures, require_image_name, require_writable, slug
from .options import (
    DEFAULT_MODEL,
    MACHINE,
    OUTPUT,
    SEED,
    Batch,
    Force,
    Methods,
    ModelOptions,
    NumImages,
    PromptOptions,
    SamplingOptions,
    SizeOptions,
    option,
    out_option,
)
from .parse import parse_methods, size_text
from .show import computed_maps, engines, percent, plain_table, result_console, show_next, stopping, token_bar

if TYPE_CHECKING:
    from ..pipeline import Pipeline, Preview
    from ..report import Report
    from ..stage import Schedule

Call = tuple[Sequence[Picture], "Report"]  # pictures that were generated together


@dataclass(frozen=True)
class RandomSeedOptions(SizeOptions):
    """Size, seed and number of images."""

    seed: Annotated[int | None, option("--seed", "N", SEED, None, "random", min=0)] = None
    num_images: NumImages = 1


@dataclass(frozen=True)
class OutputOptions:
    """The files to write."""

    out: Annotated[
        Path | None, out_option("PATH", "Folder (taken names get a number), or a .png, .jpg or .webp file for a single image.", "out")
    ] = None
    grid: Annotated[Path | None, option("--grid", "FILE", "Also write all images as one picture.", OUTPUT)] = None
    previews: Annotated[bool, option("--previews", None, "Write the image after each stage, as NAME-stage03.png.", OUTPUT)] = False
    compute_mask: Annotated[
        bool, option("--compute-mask", None, "Write a map of the computed cells (yellow) over the faded image, as NAME-mask.png.", OUTPUT)
    ] = False
    report: Annotated[Path | None, option("--report", "FILE", "Write settings, times and memory as JSON.", OUTPUT)] = None
    force: Force = False

    def require_writable(self, pictures: Sequence[Picture], schedule: Schedule) -> None:
        if self.grid is not None:
            require_image_name("--grid", self.grid)
        previews = [picture.preview_file(stage) for picture in pictures for stage in schedule] if self.previews else []
        masks = [picture.mask_file for picture in pictures] if self.compute_mask else []
        extra = [file for file in (self.grid, self.report) if file is not None]
        require_writable([*(picture.file for picture in pictures), *previews, *masks, *extra], self.force)


def generate(
    context: typer.Context,
    *,
    prompts: PromptOptions,
    model: ModelOptions,
    method: Methods = None,
    image: RandomSeedOptions,
    sampling: SamplingOptions,
    batch: Batch = 4,
    warmup: Annotated[bool, option("--warmup", None, "GPU: capture CUDA graphs before the first batch.", MACHINE)] = False,
    output: OutputOptions,
) -> None:
    """Generate images from prompts."""
    words, spec, acceleration, out = prompts.read(), model.spec, parse_methods(method), output.out or default_out("out")
    schedule = image.schedule(spec)
    settings = sampling.call_arguments(spec, schedule)
    texts = [sampling.prompt(text, spec) for text in words]
    _, pixels = model.resolved(acceleration, schedule, min(batch, len(texts) * image.num_images))
    seed = secrets.randbits(32) if image.seed is None else image.seed
    pictures = plan_pictures(texts, image.num_images, seed, out, (pixels, slug(" ".join(method or ()))), output.force)
    output.require_writable(pictures, schedule)
    if warmup and model.torch_device.type != "cuda":
        raise SettingError(f"--warmup needs a GPU; the device is {model.torch_device}. Leave it out.")
    settings |= {"size": schedule, "method": acceleration, "compute_mask": output.compute_mask} | ({"warmup": True} if warmup else {})
    calls = generate_pictures(partial(model.load, as_released=sampling.as_released), pictures, batch, settings, output.previews)
    if output.grid:
        write_grid(pictures, output.grid)
    if output.report:
        write_report(context.params | {"out": out}, calls, output.report)
    show_results(calls)
    chosen = "" if model.model == DEFAULT_MODEL else f" -m {model.model}"
    if method:
        show_next(f"nextscale plan{chosen} --method {quote(' + '.join(method))}  # MACs and memory per stage")
    else:
        show_next(f"nextscale compare{chosen}  # speed and images of acceleration methods")


def generate_pictures(
    load: Callable[[], Pipeline], pictures: Sequence[Picture], batch: int, settings: Mapping[str, Any], previews: bool
) -> list[Call]:
    """Generates and writes all pictures, `batch` at a time; `settings`: arguments of the pipeline call."""
    from ..io import write_image

    calls: list[Call] = []
    done: list[Path] = []
    with (
        stopping(lambda: f"{len(done)} of {len(pictures)} images are in {done[0].parent}." if done else ""),
        token_bar() as progress,
    ):
        task = progress.add_task("loading", total=settings["size"].tokens * len(pictures))
        pipeline = load()
        if len(pictures) > batch:  # prompts that the encoder refuses are refused before anything is written
            for prompt in dict.fromkeys(picture.prompt for picture in pictures):
                pipeline.reader.read(prompt)
        progress.update(task, description="generating")

        def on_stage(together: Sequence[Picture], preview: Preview) -> None:
            for picture, image in zip(together, preview.images(), strict=True) if previews else ():
                write_image(image, picture.preview_file(preview.done.stage))
            if not progress.disable and preview.canvas.latent.is_cuda:
                import torch

                torch.cuda.synchronize()  # or the bar would run ahead with the host
            progress.advance(task, preview.done.stage.cells * len(together))

        for first in range(0, len(pictures), batch):
            together = pictures[first : first + batch]
            prompts, seeds = [picture.prompt for picture in together], [picture.seed for picture in together]
            output = pipeline(prompts, seed=seeds, on_stage=partial(on_stage, together), **settings)
            images = output.images
            for picture, image in zip(together, images, strict=True):
                write_image(image, picture.file)
                done.append(picture.file)
                progress.note(f"{len(done)} of {len(pictures)}: {escape(str(picture.file))}")
            for picture, image in zip(together, computed_maps(images, output.compute_mask), strict=True) if output.compute_mask else ():
                write_image(image, picture.mask_file)
            calls.append((together, output.report))
    return calls


def write_grid(pictures: Sequence[Picture], file: Path) -> None:
    from PIL import Image

    from ..io import grid, write_image

    images = []
    for picture in pictures:
        with Image.open(picture.file) as image:
            images.append(image.copy())
    write_image(grid(images), file)


def write_report(settings: Mapping[str, Any], calls: Sequence[Call], file: Path) -> None:
    import torch

    from ..eval.results import version
    from ..io import write_text

    described = [
        {"files": [one.file for one in pictures], "prompts": [one.prompt for one in pictures], **report.to_dict()}
        for pictures, report in calls
    ]
    content = {"nextscale": version(), "torch": torch.__version__, "settings": settings, "calls": described}
    text = json.dumps(content, indent=2, default=str, ensure_ascii=False) + "\n"
    write_text(text.encode(errors="backslashreplace").decode(), file)  # names of files may hold bytes that are not UTF-8


def show_results(calls: Sequence[Call]) -> None:
    console, reports = result_console(), [report for _, report in calls]
    shares = {"MACs": "cost_share"} | ({"padding": "padding"} if any(report.padding for report in reports) else {})
    table = plain_table("file", "seed", "size", "seconds", "method", *shares, folded=("file", "method"))
    for pictures, report in calls:
        seconds = f"{report.seconds / len(pictures):.2f}"
        cells = [size_text(report.size), seconds, escape(report.method), *(percent(getattr(report, name)) for name in shares.values())]
        for picture in pictures:
            table.add_row(escape(str(picture.file)), str(picture.seed), *cells)
    console.print(table)
    for reason in dict.fromkeys(report.selection_reason for report in reports if report.selection_reason is not None):
        console.print(escape(reason), soft_wrap=True)
    names = ("seconds", "condition_seconds", "decode_seconds")
    total, prompts, decoding = (sum(getattr(report, name) for report in reports) for name in names)
    console.print(
        f"{total:.2f} s ({engines(reports)}): prompts {prompts:.2f}, stages {total - prompts - decoding:.2f}, decoding {decoding:.2f};"
        f" peak memory {max(report.peak_memory for report in reports) / 2**30:.2f} GiB"
    )
