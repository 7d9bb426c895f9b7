"""The command line: `nextscale generate`, `nextscale models`, `nextscale convert`."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from .checkpoints import convert as convert_checkpoint
from .errors import NextscaleError, PromptError, SettingError, SizeError
from .guidance import ConstantGuidance, Guidance, GuidanceLike, RampGuidance, resolve_guidance
from .images import grid as side_by_side
from .loading import home, load, load_module
from .pipeline import Preview
from .presets import MODELS, ModelSpec, Source, build_model, build_tokenizer, model_spec
from .prompts import ClassReader
from .report import Report
from .schedules import BUDGETS, INFINITY_SIZES, InfinityBook, ScheduleBook, SizeLike
from .stage import Schedule, Stage
from .text import with_positive_prompt

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
LOSSY_QUALITY = 95
LONGEST_SLUG = 40
FILES_NAMED = 3  # in one error message
UNLIMITED_WIDTH = 10_000
USAGE_ERRORS = typer.BadParameter.__bases__  # the parent of all usage errors has no public name that every version of typer knows


class Program(TyperGroup):
    """Shows what the user can do something about as one `error:` message; any other exception keeps its traceback."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        try:
            status = super().main(*args, **kwargs | {"standalone_mode": False})
        except NextscaleError as error:
            typer.echo(f"error: {error}", err=True)
            status = 2
        except USAGE_ERRORS as error:
            see = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            typer.echo(f"error: {error.format_message().rstrip('.')}{see}", err=True)
            status = 2
        sys.exit(status)


app = typer.Typer(cls=Program, add_completion=False, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Part(StrEnum):
    model = "model"
    tokenizer = "tokenizer"


def version() -> str:
    try:
        return metadata.version("nextscale")
    except metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nextscale {version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    asked: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Draw images with next-scale generators: VAR, FlexVAR and Infinity."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# --- generate ---------------------------------------------------------------------------------------------------------------------

DRAWING, MACHINE, OUTPUT = "How to draw", "Model and machine", "What to write"


@app.command()
def generate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name from `nextscale models`.", show_default=False)],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="Texts; for class models class numbers. -1 means no class and needs -- before it: generate var-d16 --seed 1 -- 207 -1",
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
    size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="HEIGHTxWIDTH in pixels, the side of a square, or a pixel budget such as 0.25M.")
    ] = None,
    aspect: Annotated[str | None, typer.Option(metavar="W:H", help="Aspect ratio such as 16:9.")] = None,
    sides: Annotated[
        str | None, typer.Option(metavar="LIST", help="FlexVAR: the token maps to draw, such as 1,2,3,5,8 or 1,2,4x6; in place of a size.")
    ] = None,
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
    smooth: Annotated[bool, typer.Option("--smooth", rich_help_panel=DRAWING, help="VAR: mix codes instead of drawing one.")] = False,
    weights: Annotated[Path | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="File or folder of the model.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="File of the tokenizer.")] = None,
    text_encoder: Annotated[
        str | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="Folder or hub name of the text encoder.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", rich_help_panel=MACHINE, show_default="cuda if there is a GPU", help="cpu, cuda or cuda:N."),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(rich_help_panel=MACHINE, show_default="bfloat16, on the CPU float32", help="Type of the weights.")
    ] = None,
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
    report: Annotated[Path | None, typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Settings, times and memory as JSON.")] = None,
    force: Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Overwrite files.")] = False,
) -> None:
    """Draw images from prompts."""
    spec = model_spec(model)
    schedule = choose_schedule(spec.settings.schedules, size, aspect, sides)
    scales = None if guidance is None else parse_guidance(guidance, spec.settings.guidance)
    sampling = chosen_sampling(temperature, top_k, top_p, greedy, smooth)
    # Generation checks these two as well, but only after the weights are loaded.
    spec.settings.sampling.changed(**sampling).check(schedule)
    resolve_guidance(scales, spec.settings.guidance).scales(schedule)
    texts = all_prompts(prompts or [], prompts_file)
    if positive_prompt:
        require_text_model(spec)
        texts = [with_positive_prompt(text) for text in texts]
    pictures = plan_pictures([parse_prompt(text, spec) for text in texts], images, secrets.randbits(32) if seed is None else seed, out)
    against = None if negative is None else parse_prompt(negative, spec)
    require_writable(planned_files(pictures, schedule if previews else (), grid, report), force)
    require_device(device)

    calls = [pictures[first : first + batch] for first in range(0, len(pictures), batch)]
    reports: list[Report] = []
    drawn: list[Image.Image] = []
    with progress_bar() as progress:
        task = progress.add_task(f"loading {model}", total=schedule.tokens * len(pictures))
        pipeline = load(
            model, weights=weights, tokenizer=tokenizer, text_encoder=text_encoder, device=device, dtype=as_torch_dtype(dtype)
        )
        progress.update(task, description="drawing")
        for call in calls:
            output = pipeline(
                [picture.prompt for picture in call],
                seed=[picture.seed for picture in call],
                size=schedule,
                guidance=scales,
                negative=against,
                on_stage=stage_watcher(call, previews, progress, task),
                **sampling,
            )
            finished = output.images
            for picture, image in zip(call, finished, strict=True):
                write_image(image, picture.file)
            reports.append(output.report)
            drawn.extend(finished if grid else ())
    if grid:
        write_image(side_by_side(drawn), grid)
    if report:
        write_text(report_json(context.params, calls, reports), report)
    show_results(calls, reports)


@dataclass(frozen=True)
class Picture:
    """One image to draw."""

    prompt: str | int
    seed: int
    file: Path

    def preview_file(self, stage: Stage) -> Path:
        return self.file.with_stem(f"{self.file.stem}-stage{stage.index:02d}")


def all_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    prompts = [*given, *(read_prompts(file) if file else ())]
    if not prompts:
        raise PromptError("no prompt: write prompts after the model's name, or pass --prompts FILE")
    return prompts


def read_prompts(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"--prompts {file} cannot be read as text: {error}") from error
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise PromptError(f"--prompts {file} holds no prompt: write one per line; lines that start with # do not count")
    return prompts


def require_text_model(spec: ModelSpec) -> None:
    if spec.text_encoder is None:
        raise SettingError(f"--positive-prompt adds words to texts; {spec.name} takes class numbers")


def parse_prompt(text: str, spec: ModelSpec) -> str | int:
    """Text as it is, or a class number; refused here rather than after the weights are loaded."""
    if spec.text_encoder is None:
        number = int(text) if re.fullmatch(r"\s*-?\d+\s*", text) else text
        ClassReader(spec.model.classes).read(number)
        return number
    if not text.strip():
        raise PromptError("a prompt is empty: write at least one visible character, or leave it out")
    return text


def choose_schedule(book: ScheduleBook, size: str | None, aspect: str | None, sides: str | None) -> Schedule:
    if sides is None:
        return book.choose(None if size is None else parse_size(size), aspect)
    if size is not None or aspect is not None:
        raise SizeError("--sides already fixes the size: leave out --size and --aspect")
    maps = [parse_size(side) for side in sides.split(",")]
    if any(isinstance(side, str) for side in maps):
        raise SizeError(f"--sides {sides!r}: give whole numbers, or HEIGHTxWIDTH, separated by commas, such as 1,2,3,5,8")
    return book.choose(Schedule(maps), None)


def parse_size(text: str) -> SizeLike:
    """HEIGHTxWIDTH or a side in numbers; any other text is left to the model as the name of a pixel budget."""
    numbers = [int(part) for part in text.split("x") if part.isdecimal()]
    if len(numbers) != text.count("x") + 1 or len(numbers) > 2:
        return text
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def parse_guidance(text: str, published: Guidance) -> GuidanceLike:
    form, colon, values = text.rpartition(":")
    numbers = parse_numbers(values)
    if not colon and len(numbers) > 1:
        return numbers
    if len(numbers) == 1:
        match form if colon else None:
            case None:
                return numbers[0]
            case "constant":
                return ConstantGuidance(strength=numbers[0])
            case "ramp":
                ramp = published if isinstance(published, RampGuidance) else RampGuidance()
                return ramp.with_strength(numbers[0])
    raise SettingError(f"--guidance {text!r}: give a number, one per stage such as 3,3,1, or a form such as constant:4 or ramp:2.5")


def parse_numbers(text: str) -> list[float]:
    """Numbers between commas; empty if any of them is not one."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return numbers if all(math.isfinite(number) for number in numbers) else []


def chosen_sampling(temperature: str | None, top_k: int | None, top_p: float | None, greedy: bool, smooth: bool) -> dict[str, Any]:
    """Only what was asked for, so that the rest keeps the published values."""
    numbers = None if temperature is None else parse_numbers(temperature)
    if numbers == []:
        raise SettingError(f"--temperature {temperature!r}: give a number, or one per stage such as 1,1,0.5")
    single_or_list = numbers[0] if numbers and len(numbers) == 1 else numbers
    asked = {"temperature": single_or_list, "top_k": top_k, "top_p": top_p, "greedy": greedy or None, "smooth": smooth or None}
    return {name: value for name, value in asked.items() if value is not None}


def require_device(name: str | None) -> None:
    if name is None:
        return
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise SettingError(f"--device {name!r}: choose cpu, cuda or cuda:N")
    device, gpus = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise SettingError(f"--device {name}: torch {torch.__version__} finds {gpus or 'no'} GPU{'s'[: gpus != 1]} here; cpu always works")


def as_torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype.value)


def plan_pictures(prompts: Sequence[str | int], images: int, seed: int, out: Path) -> list[Picture]:
    repeated = [prompt for prompt in prompts for _ in range(images)]
    if out.suffix.lower() not in IMAGE_FORMATS:
        return [Picture(prompt, seed + i, out / picture_name(i, seed + i, prompt)) for i, prompt in enumerate(repeated)]
    if len(repeated) > 1:
        raise SettingError(f"--out {out} is a single file for {len(repeated)} images: give a folder, and --grid FILE for one sheet")
    return [Picture(prompts[0], seed, out)]


def picture_name(index: int, seed: int, prompt: str | int) -> str:
    words = [slug(prompt)] if isinstance(prompt, str) else []
    return "-".join(filter(None, [f"{index:04d}", f"seed{seed}", *words])) + ".png"


def slug(text: str) -> str:
    """The first words as letters and digits that are safe in file names; empty if the text has none."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = "-".join(re.findall(r"[a-z0-9]+", plain))
    return words if len(words) <= LONGEST_SLUG else words[: LONGEST_SLUG + 1].rpartition("-")[0] or words[:LONGEST_SLUG]


def planned_files(pictures: Sequence[Picture], previewed: Iterable[Stage], grid: Path | None, report: Path | None) -> list[Path]:
    if grid is not None and grid.suffix.lower() not in IMAGE_FORMATS:
        raise SettingError(f"--grid {grid}: give a name that ends in {', '.join(IMAGE_FORMATS)}")
    stages = list(previewed)
    previews = [picture.preview_file(stage) for picture in pictures for stage in stages]
    return [*(picture.file for picture in pictures), *previews, *(file for file in (grid, report) if file is not None)]


def require_writable(files: Sequence[Path], force: bool) -> None:
    if twice := [file for file, times in Counter(files).items() if times > 1]:
        raise SettingError(f"{named(twice)} would be written twice: give --out, --grid and --report different names")
    if folders := [file for file in files if file.is_dir()]:
        raise SettingError(f"cannot write {named(folders)}: there is a folder of that name")
    if blocked := [folder for folder in {file.parent for file in files} if folder.exists() and not folder.is_dir()]:
        raise SettingError(f"cannot write into {named(blocked)}: it is a file; give a folder")
    if not force and (taken := [file for file in files if file.exists()]):
        raise SettingError(f"not overwriting {named(taken)}: choose another name, or pass --force")


def named(files: Sequence[Path]) -> str:
    shown = ", ".join(str(file) for file in files[:FILES_NAMED])
    return f"{shown} and {len(files) - FILES_NAMED} more" if len(files) > FILES_NAMED else shown


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


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place at the end; if anything fails, Ctrl-C included, nothing is left."""
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise NextscaleError(f"{target} cannot be written ({error}). Check the free space and the permissions there") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_image(image: Image.Image, target: Path) -> None:
    with replacing(target) as temporary:
        image.save(temporary, IMAGE_FORMATS[target.suffix.lower()], quality=LOSSY_QUALITY)  # PNG has no quality and ignores it


def write_text(text: str, target: Path) -> None:
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def report_json(settings: Mapping[str, Any], calls: Sequence[Sequence[Picture]], reports: Sequence[Report]) -> str:
    described = [
        {"files": [picture.file for picture in call], "prompts": [picture.prompt for picture in call], **report.to_dict()}
        for call, report in zip(calls, reports, strict=True)
    ]
    content = {"nextscale": version(), "torch": torch.__version__, "settings": settings, "calls": described}
    return json.dumps(content, indent=2, default=str, ensure_ascii=False) + "\n"


def show_results(calls: Sequence[Sequence[Picture]], reports: Sequence[Report]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    for heading in ("seed", "size", "seconds"):
        table.add_column(heading, justify="right")
    for call, report in zip(calls, reports, strict=True):
        for picture in call:
            size = f"{report.size[0]}x{report.size[1]}"
            table.add_row(escape(str(picture.file)), str(picture.seed), size, f"{report.seconds / len(call):.2f}")
    console = result_console()
    console.print(table)
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


# --- models -----------------------------------------------------------------------------------------------------------------------


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models and the files that each of them needs."""
    if as_json:
        content = {"home": str(home()), "models": [model_facts(spec) for spec in MODELS.values()]}
        typer.echo(json.dumps(content, indent=2))
        return
    console = Console(highlight=False)
    for family, specs in groupby(MODELS.values(), key=lambda spec: spec.name.partition("-")[0]):
        show_family(console, family, list(specs))
    console.print(f"Infinity's --size also takes {', '.join(BUDGETS)}. --json lists all sizes, and the address of every file.")
    console.print(f"Files are looked for in {escape(str(home()))} (NEXTSCALE_HOME).", soft_wrap=True)


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "prompts": "class" if spec.text_encoder is None else "text",
        "parameters": parameter_count(spec),
        "sizes": [f"{height}x{width}" for height, width in spec.settings.schedules.offers()],
        "weights": None if spec.weights is None else source_facts(spec.weights),
        "tokenizer": source_facts(spec.tokenizer_weights),
        "text_encoder": spec.text_encoder,
    }


def source_facts(source: Source) -> dict[str, str]:
    return {"file": source.file, "url": source.url}


def parameter_count(spec: ModelSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(spec.model).parameters())


def show_family(console: Console, family: str, specs: Sequence[ModelSpec]) -> None:
    encoder = specs[0].text_encoder
    table = Table("model", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("params", justify="right")
    table.add_column("sizes")
    table.add_column("weights and tokenizer", overflow="fold")
    for spec in specs:
        files = [file_link(spec.weights) if spec.weights else "no released weights", file_link(spec.tokenizer_weights)]
        table.add_row(spec.name, short_count(parameter_count(spec)), short_sizes(spec.settings.schedules), "\n".join(files))
    console.print(f"[bold]{family}[/bold]: prompts are", "class numbers" if encoder is None else f"texts, read by {encoder}")
    console.print(table)
    console.print("published at", *pages(specs), end="\n\n")


def pages(specs: Sequence[ModelSpec]) -> list[str]:
    sources = [source for spec in specs for source in (spec.weights, spec.tokenizer_weights) if source is not None]
    return list(dict.fromkeys(f"https://huggingface.co/{source.repository}" for source in sources))


def file_link(source: Source) -> str:
    return f"[link={source.url}]{source.file}[/link]"


def short_count(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters < 1e9 else f"{parameters / 1e9:.1f}B"


def short_sizes(book: ScheduleBook) -> str:
    if isinstance(book, InfinityBook):
        return f"{len(INFINITY_SIZES)} aspect ratios\nof {book.budget} pixels"
    return "\n".join(f"{height}x{width}" for height, width in book.offers())


# --- convert ----------------------------------------------------------------------------------------------------------------------


@app.command()
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name from `nextscale models`.", show_default=False)],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="An official file, or a folder of shards.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The .safetensors file to write.", show_default=False)],
    part: Annotated[Part, typer.Option(help="What SOURCE holds.")] = Part.model,
    dtype: Annotated[Dtype | None, typer.Option(show_default="as in SOURCE", help="Type of the written weights.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite TARGET.")] = False,
) -> None:
    """Write an official checkpoint as one safetensors file, under the published names."""
    spec = model_spec(model)
    require_writable([target], force)
    with torch.device("meta"):
        module = build_model(spec.model) if part is Part.model else build_tokenizer(spec.tokenizer)
    what = f"the model {model}" if part is Part.model else f"the tokenizer of {model}"
    # On the meta device loading is only its check, whose error names the model that the file belongs to.
    load_module(module, source, what, torch.device("meta"), torch.float32)
    tensors = convert_checkpoint(source, target, module, module.layout, as_torch_dtype(dtype))
    typer.echo(f"{target}: {tensors} tensors, {target.stat().st_size / 2**20:.1f} MiB")
