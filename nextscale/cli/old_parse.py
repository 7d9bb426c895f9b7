"""From words of the command line to what the library takes; wrong ones are refused before any weights are loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import PromptError, SettingError, SizeError
from ..guidance import ConstantGuidance, Guidance, GuidanceLike, RampGuidance
from ..loading.artifacts import local_weights, profile_folders, rank_table_of
from ..loading.load import choose_device, prompt_reader
from ..loading.presets import MODELS, ModelSpec, build_model, build_tokenizer
from ..methods.method import Method
from ..methods.selection import SelectionContext
from ..offline.prompts import is_unicode
from ..profiles import Profile, find_profiles
from ..schedules import Schedules
from ..stage import Schedule


def require_no_model_names(words: Sequence[str]) -> None:
    """Refuses prompts that are the name of a model and nothing else: whoever writes one most likely wants to choose that model."""
    for word in words:
        if word in MODELS:
            raise PromptError(
                f"prompt {word!r} is the name of a model: choose the model with -m {word}; "
                f"if you want images of that word, say so in a sentence, such as 'the word {word}'"
            )


def parse_prompt(text: str, spec: ModelSpec) -> str | int:
    """A prompt of the command line: the text as it is, or a class number."""
    if spec.text_encoder is None:
        number = int(text) if re.fullmatch(r"\s*-?\d{1,18}\s*", text) else text
        prompt_reader(spec, None, torch.device("cpu")).read(number)
        return number
    if not text.strip():
        raise PromptError("a prompt is empty: write at least one visible character, or leave it out")
    if not is_unicode(text):
        raise PromptError(f"the prompt {text!r:.80} holds half of a character (\\ud800 to \\udfff), which no file can hold: write it whole")
    return text


def method_name(text: str) -> str:
    """Combined methods as tables name them: "fastvar + skip:last=1"."""
    return " + ".join(part.strip() for part in text.split("+"))


def situation_of(
    spec: ModelSpec, device: torch.device, profiles: Sequence[Profile], schedule: Schedule | None, batch: int, weights: Path | None = None
) -> SelectionContext:
    """A request as it is known without weights, but with the ranks that lie beside them."""
    with torch.device("meta"):
        model, tokenizer = build_model(spec.model), build_tokenizer(spec.tokenizer)
    place = weights or local_weights(spec)
    model.rank_table = None if place is None else rank_table_of(model, place)
    return SelectionContext(spec.name, model, device, tokenizer.pixels_per_token, profiles, schedule, batch, weights)


def settled_method(
    method: Method, spec: ModelSpec, schedule: Schedule, batch: int = 1, device: torch.device | None = None, weights: Path | None = None
) -> Method:
    """The method that such a request runs, as far as that is known without weights; SettingError if its settings do not go with it."""
    profiles = list(named_profiles(spec, weights).values()) if "alone" in method.exclusive else []
    situation = situation_of(spec, device or choose_device(None), profiles, schedule, batch, weights)
    settled, _ = method.resolve(situation)
    settled.forecast(situation.model, schedule)
    return settled


def named_profiles(spec: ModelSpec, weights: Path | None = None) -> dict[Path, Profile]:
    """The profiles where a model's weights lie, or will lie, that give its name. Loading compares the weights themselves."""
    place = weights or local_weights(spec)
    folders = [] if place is None else profile_folders(spec, place.expanduser())
    return {path: profile for path, profile in find_profiles(folders).items() if profile.model == spec.name}


def choose_schedule(book: Schedules, size: str | None, aspect: str | None = None, sides: str | None = None) -> Schedule:
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
    numbers = [int(part) for part in text.split("x") if re.fullmatch(r"\d{1,18}", part)]
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


def parse_temperature(text: str) -> float | list[float]:
    numbers = parse_numbers(text)
    if not numbers:
        raise SettingError(f"--temperature {text!r}: give a number, or one per stage such as 1,1,0.5")
    return numbers[0] if len(numbers) == 1 else numbers


def parse_numbers(text: str) -> list[float]:
    """The numbers between commas; none if any of them is not one."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return numbers if all(math.isfinite(number) for number in numbers) else []
