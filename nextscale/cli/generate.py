"""`nextscale generate`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from rich.progress import Progress, TaskID

from ..errors import SettingError
from ..guidance import GuidanceLike, resolve_guidance
from ..io import grid as side_by_side
from ..io import write_image, write_text
from ..loading.presets import ModelSpec
from ..methods.registry import resolve_method
from ..pipeline import Output, Pipeline, Preview
from ..stage import Schedule
from ..text import with_positive_prompt
from .console import token_bar
from .files import Picture, plan_pictures, require_image_name, require_writable
from .groups import grouped
from .options import (
    MACHINE,
    OUTPUT,
    SAMPLING,
    Batch,
    CombinedMethods,
    Force,
    ModelOptions,
    PromptOptions,
    SeedOrRandom,
    SizeOptions,
    out_option,
)
from .parse import parse_guidance, parse_prompt, parse_temperature
from .program import app
from .results import Call, darkened, report_json, show_results


@dataclass(frozen=True)
class PictureOptions(PromptOptions):
    """Which images to generate."""

    seed: SeedOrRandom = None
    positive_prompt: Annotated[
        bool, typer.Option("--positive-prompt", help="Infinity: add words for good faces to prompts that seem to mention a person.")
    ] = False

    def pictures(self, spec: ModelSpec, out: Path) -> list[Picture]:
        if self.positive_prompt and spec.text_encoder is None:
            raise SettingError(f"--positive-prompt adds words to prompts; {spec.name} takes class numbers: leave it out")
        texts = [with_positive_prompt(text) if self.positive_prompt else text for text in self.read()]
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return plan_pictures([parse_prompt(text, spec) for text in texts], self.images, seed, out)


@dataclass(frozen=True)
class SamplingOptions:
    """How codes are sampled from the model's logits."""

    guidance: Annotated[
        str | None,
        typer.Option(
            "--guidance",
            metavar="SCALE",
            rich_help_panel=SAMPLING,
            show_default="as published",
            help="A number keeps the model's published form; 3,3,1 is one scale per stage; constant:4 and ramp:2.5 choose the form.",
        ),
    ] = None
    negative: Annotated[
        str | None, typer.Option("--negative", metavar="PROMPT", rich_help_panel=SAMPLING, help="A text or class to steer away from.")
    ] = None
    temperature: Annotated[
        str | None,
        typer.Option("--temperature", metavar="NUMBER", rich_help_panel=SAMPLING, help="Below 1 is less random; 1,1,0.5 is one per stage."),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", metavar="K", rich_help_panel=SAMPLING, help="Sample from this number of the most likely codes; 0 means all."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p", metavar="P", rich_help_panel=SAMPLING, help="Sample from the codes that make up this probability; 0 means all."
        ),
    ] = None
    greedy: Annotated[bool, typer.Option("--greedy", rich_help_panel=SAMPLING, help="Always take the most likely code.")] = False
    smooth: Annotated[
        bool | None,
        typer.Option(
            "--smooth/--no-smooth", rich_help_panel=SAMPLING, show_default="as published", help="VAR, HART, STAR: mix codes, or sample one."
        ),
    ] = None
    no_refine: Annotated[
        bool, typer.Option("--no-refine", rich_help_panel=SAMPLING, help="STAR's sampler: sample late stages at once, not in rounds.")
    ] = False

    as_released: Annotated[
        bool,
        typer.Option(
            "--as-released",
            rich_help_panel=SAMPLING,
            help="STAR: all images of a batch read the first prompt, as in the reference implementation.",
        ),
    ] = False

    def call_arguments(self, spec: ModelSpec, schedule: Schedule) -> dict[str, Any]:
        """What the pipeline's call takes; wrong values are refused now, not after the weights are loaded."""
        guidance: GuidanceLike = None if self.guidance is None else parse_guidance(self.guidance, spec.settings.guidance)
        resolve_guidance(guidance, spec.settings.guidance).scales(schedule)
        if self.no_refine and spec.settings.sampling.refine is None:
            raise SettingError(f"--no-refine is for models that sample late stages in rounds; {spec.name} does not: leave it out")
        sampling = self._changes()
        spec.settings.sampling.changed(**sampling).check(schedule)
        negative = None if self.negative is None else parse_prompt(self.negative, spec)
        return {"guidance": guidance, "negative": negative, **sampling}

    def _changes(self) -> dict[str, Any]:
        """The sampling settings that were asked for; the rest keeps the published values."""
        asked = {
            "temperature": None if self.temperature is None else parse_temperature(self.temperature),
            "top_k": self.top_k,
            "top_p": self.top_p,
            "greedy": self.greedy or None,
            "smooth": self.smooth,
        }
        changes = {name: value for name, value in asked.items() if value is not None}
        return changes | {"refine": None} if self.no_refine else changes


@dataclass(frozen=True)
class OutputOptions:
    """Which files to write."""

    out: Annotated[Path, out_option("PATH", "A folder, or for a single image a .png, .jpg or .webp file.")] = Path("out")
    grid: Annotated[Path | None, typer.Option("--grid", metavar="FILE", rich_help_panel=OUTPUT, help="Write all images side by side.")] = (
        None
    )
    previews: Annotated[
        bool, typer.Option("--previews", rich_help_panel=OUTPUT, help="Write the image after each stage, as NAME-stage03.png.")
    ] = False
    compute_mask: Annotated[
        bool,
        typer.Option(
            "--compute-mask",
            rich_help_panel=OUTPUT,
            help="Write the image darkened where the method computed less, as NAME-mask.png.",
        ),
    ] = False
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", rich_help_panel=OUTPUT, help="Write settings, times and memory as JSON.")
    ] = None
    force: Force = False

    def require_writable(self, pictures: Sequence[Picture], schedule: Schedule) -> None:
        if self.grid is not None:
            require_image_name("--grid", self.grid)
        previews = [picture.preview_file(stage) for picture in pictures for stage in schedule] if self.previews else []
        masks = [picture.mask_file for picture in pictures] if self.compute_mask else []
        extra = [file for file in (self.grid, self.report) if file is not None]
        require_writable([*(picture.file for picture in pictures), *previews, *masks, *extra], self.force)


@app.command()
@grouped
def generate(
    context: typer.Context,
    *,
    model: ModelOptions,
    prompts: PictureOptions,
    size: SizeOptions,
    method: CombinedMethods = None,
    sampling: SamplingOptions,
    batch: Batch = 4,
    warmup: Annotated[
        bool,
        typer.Option("--warmup", rich_help_panel=MACHINE, help="GPU: capture CUDA graphs before the first batch, not on the second."),
    ] = False,
    output: OutputOptions,
) -> None:
    """Generate images from prompts."""
    spec = model.spec
    schedule = size.schedule(spec)
    settings = sampling.call_arguments(spec, schedule)
    acceleration = resolve_method(method)
    pictures = prompts.pictures(spec, output.out)
    model.settled(acceleration, schedule, min(batch, len(pictures)))
    output.require_writable(pictures, schedule)
    if model.torch_device.type != "cuda" and warmup:
        raise SettingError(f"--warmup captures CUDA graphs, and this runs on {model.torch_device}: leave it out, or choose a GPU")

    settings |= {"size": schedule, "method": acceleration, "compute_mask": output.compute_mask}
    settings |= {"warmup": True} if warmup else {}
    calls = generate_pictures(partial(model.load, as_released=sampling.as_released), pictures, batch, settings, output.previews)
    if output.grid:
        write_image(side_by_side([read_picture(picture) for picture in pictures]), output.grid)
    if output.report:
        write_text(report_json(context.params, calls), output.report)
    show_results(calls)


def generate_pictures(
    load: Callable[[], Pipeline], pictures: Sequence[Picture], batch: int, settings: Mapping[str, Any], previews: bool
) -> list[Call]:
    """Generates and writes all pictures, `batch` at a time; `settings` are what the pipeline's call takes."""
    calls = []
    with token_bar() as progress:
        task = progress.add_task("loading", total=settings["size"].tokens * len(pictures))
        pipeline = load()
        if len(pictures) > batch:  # what the encoder refuses is refused before anything is written
            for prompt in dict.fromkeys(picture.prompt for picture in pictures):
                pipeline.reader.read(prompt)
        progress.update(task, description="generating")
        for first in range(0, len(pictures), batch):
            together = pictures[first : first + batch]
            output = pipeline(
                [picture.prompt for picture in together],
                seed=[picture.seed for picture in together],
                on_stage=stage_watcher(together, previews, progress, task),
                **settings,
            )
            write_pictures(together, output)
            calls.append(Call(together, output.report))
    return calls


def read_picture(picture: Picture) -> Image.Image:
    with Image.open(picture.file) as image:
        return image.copy()


def write_pictures(pictures: Sequence[Picture], output: Output) -> None:
    images = output.images
    for picture, image in zip(pictures, images, strict=True):
        write_image(image, picture.file)
    if output.compute_mask is not None:
        for picture, image in zip(pictures, darkened(images, output.compute_mask), strict=True):
            write_image(image, picture.mask_file)


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
