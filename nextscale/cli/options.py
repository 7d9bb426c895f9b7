"""From the texts of the command line to what the library takes; wrong ones are refused before any weights are loaded."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..accel.method import Method
from ..errors import PromptError, SettingError, SizeError, UnknownModel
from ..guidance import ConstantGuidance, Guidance, GuidanceLike, RampGuidance
from ..loading.load import prompt_reader
from ..loading.presets import MODELS, NANO, ModelSpec, build_model, model_spec
from ..schedules import ScheduleBook
from ..stage import Schedule

# Options that several commands take.
DEFAULT_MODEL = NANO.name  # for commands that can do without a name
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A name from `nextscale models`.", show_default=False)]
# Options whose metavar is their own name say the name too: typer 0.27 takes the metavar for it otherwise, and wants --SIZE.
Size = Annotated[
    str | None,
    typer.Option("--size", metavar="SIZE", help="HEIGHTxWIDTH in pixels, the side of a square, or a pixel budget such as 0.25M."),
]
Aspect = Annotated[str | None, typer.Option(metavar="W:H", help="Aspect ratio such as 16:9.")]
Sides = Annotated[
    str | None, typer.Option(metavar="LIST", help="FlexVAR: the token maps to draw, such as 1,2,3,5,8 or 1,2,4x6; in place of a size.")
]

MACHINE, OUTPUT = "Model and machine", "What to write"  # panels of the help


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Weights = Annotated[Path | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="File or folder of the model.")]
TokenizerFile = Annotated[Path | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="File of the tokenizer.")]
TextEncoderSource = Annotated[
    str | None, typer.Option(metavar="PATH", rich_help_panel=MACHINE, help="Folder, file or hub name of the text encoder.")
]
OffloadText = Annotated[
    bool,
    typer.Option(
        "--offload-text", rich_help_panel=MACHINE, help="The text encoder is on the GPU only while it encodes: less memory, slower prompts."
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", rich_help_panel=MACHINE, show_default="cuda if there is a GPU", help="cpu, cuda or cuda:N."),
]
DtypeName = Annotated[
    Dtype | None, typer.Option(rich_help_panel=MACHINE, show_default="bfloat16, on the CPU float32", help="Type of the weights.")
]


def as_torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype.value)


def split_model(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The model's name and the prompts; the first argument may name a model, and the default one is taken where it does not.

    What looks like the name of a model and is none, such as "infinty-2b", is refused rather than drawn: a single word with a digit,
    hyphen or underscore that resembles a known name, or before prompts what several names begin with.
    """
    first = arguments[0] if arguments else ""
    if first in MODELS:
        return first, list(arguments[1:])
    relatives = [name for name in MODELS if name.startswith(f"{first}-")]
    if relatives and len(arguments) > 1:
        raise UnknownModel(
            f"{first!r} stands for several models: {', '.join(relatives)}. If it is a prompt, name the model before it: "
            f"{DEFAULT_MODEL} {first}"
        )
    if re.fullmatch(r"\S*[\d_-]\S*", first) and difflib.get_close_matches(first, MODELS, cutoff=0.6):
        try:
            model_spec(first)
        except UnknownModel as error:
            raise UnknownModel(f"{error}. If it is a prompt, name the model before it: {DEFAULT_MODEL} {first}") from error
    return DEFAULT_MODEL, list(arguments)


def all_prompts(given: Sequence[str], file: Path | None) -> list[str]:
    prompts = [*given, *(read_prompts(file) if file else ())]
    if not prompts:
        raise PromptError("no prompt: write prompts, after the model's name if there is one, or pass --prompts FILE")
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


def require_fitting(method: Method, spec: ModelSpec, schedule: Schedule) -> None:
    """SettingError if the method has settings that do not go with this model or size."""
    with torch.device("meta"):
        model = build_model(spec.model)
    method.forecast(model, schedule)


def parse_prompt(text: str, spec: ModelSpec) -> str | int:
    """Text as it is, or a class number; refused here rather than after the weights are loaded."""
    if spec.text_encoder is None:
        number = int(text) if re.fullmatch(r"\s*-?\d+\s*", text) else text
        prompt_reader(spec, None, torch.device("cpu")).read(number)
        return number
    if not text.strip():
        raise PromptError("a prompt is empty: write at least one visible character, or leave it out")
    return text


def choose_schedule(book: ScheduleBook, size: str | None, aspect: str | None, sides: str | None) -> Schedule:
    if sides is None:
        return book.choose(None if size is None else parse_size(size), aspect)
    if size is not None or aspect is not None:
        raise SizeError("--sides already fixes the size: leave out --size and --aspect")
    parts = [parse_size(side) for side in sides.split(",")]
    maps = [part for part in parts if not isinstance(part, str)]
    if len(maps) < len(parts):
        raise SizeError(f"--sides {sides!r}: give whole numbers, or HEIGHTxWIDTH, separated by commas, such as 1,2,3,5,8")
    return book.choose(Schedule(maps), None)


def parse_size(text: str) -> tuple[int, int] | int | str:
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


def chosen_sampling(
    temperature: str | None, top_k: int | None, top_p: float | None, greedy: bool, smooth: bool | None, no_refine: bool
) -> dict[str, Any]:
    """Only what was asked for, so that the rest keeps the published values."""
    numbers = None if temperature is None else parse_numbers(temperature)
    if numbers == []:
        raise SettingError(f"--temperature {temperature!r}: give a number, or one per stage such as 1,1,0.5")
    single_or_list = numbers[0] if numbers and len(numbers) == 1 else numbers
    asked = {"temperature": single_or_list, "top_k": top_k, "top_p": top_p, "greedy": greedy or None, "smooth": smooth}
    changes = {name: value for name, value in asked.items() if value is not None}
    return changes | {"refine": None} if no_refine else changes
