"""Converts words of the command line to values of the library; wrong ones are refused before any weights are loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PromptError, SettingError, SizeError

if TYPE_CHECKING:
    import torch

    from ..batching.ray_cluster import RaySettings
    from ..guidance import Guidance, GuidanceLike
    from ..loading import ModelSpec
    from ..methods import Method
    from ..profiles import Profile
    from ..schedules import Schedules
    from ..stage import Schedule

LOCAL, AUTO = "local", "auto"  # --ray alone; --shard under a launcher
SWITCHES = ("greedy", "smooth", "refine", "as_released", "positive_prompt")  # of --sampling


def parse_prompt(text: str, spec: ModelSpec) -> str | int:
    """Returns the text as it is, or a class number."""
    import torch

    from ..loading.load import prompt_reader
    from ..offline.prompts import is_unicode

    if spec.text_encoder is None:
        number = int(text) if re.fullmatch(r"\s*-?\d{1,18}\s*", text) else text
        prompt_reader(spec, None, torch.device("cpu")).read(number)
        return number
    if not text.strip():
        raise PromptError("a prompt is empty. Write at least one visible character, or leave it out.")
    if not is_unicode(text):
        raise PromptError(f"prompt {text!r:.80} must be valid Unicode; it holds half of a character (\\ud800 to \\udfff).")
    return text


def parse_methods(words: Sequence[str] | None) -> Method:
    """Returns one method of several specs, each such as "fastvar" or "fastvar + skip:last=1"; none is dense generation."""
    from ..methods.registry import resolve_method

    return resolve_method(words)


def method_name(text: str) -> str:
    """Returns combined methods as tables name them: "fastvar + skip:last=1"."""
    return " + ".join(part.strip() for part in text.split("+"))


def torch_dtype(name: str | None) -> Any:
    import torch

    return name and getattr(torch, name)


def resolved_method(
    method: Method, spec: ModelSpec, schedule: Schedule, batch: int, device: torch.device, weights: Path | None = None
) -> tuple[Method, str]:
    """Returns the method that a request runs, as far as it is known without weights, and WIDTHxHEIGHT of its images.

    Raises SettingError if its settings do not fit.
    """
    from ..loading.load import without_weights
    from ..methods.method import SelectionContext, forecast_of

    model, tokenizer = without_weights(spec, torch_dtype("float32"), weights=weights)
    profiles = list(named_profiles(spec, weights).values()) if "alone" in method.exclusive else []
    context = SelectionContext(spec.name, model, device, tokenizer.pixels_per_token, profiles, schedule, batch, weights)
    resolved, _ = method.resolve(context)
    forecast_of(resolved, model, schedule)
    return resolved, context.size


def named_profiles(spec: ModelSpec, weights: Path | None = None) -> dict[Path, Profile]:
    """Returns the profiles of a model beside its weights, by its name. Loading compares the weights themselves."""
    from ..loading import artifacts
    from ..profiles import find_profiles

    place = weights or artifacts.local_weights(spec)
    folders = [] if place is None else artifacts.profile_folders(spec, place.expanduser())
    return {path: profile for path, profile in find_profiles(folders).items() if profile.model == spec.name}


def choose_schedule(schedules: Schedules, size: str | None, aspect: str | None = None) -> Schedule:
    """Returns the schedule of a size as text: 512x256, 256, 0.25M, or token maps such as 1,2,6x4."""
    from ..stage import Schedule

    if size is None or "," not in size:
        return schedules.choose(None if size is None else parse_size(size), aspect)
    maps = list(map(parse_size, size.split(",")))
    if any(isinstance(one, str) for one in maps):
        raise SizeError(f"size must list token maps as sides or WIDTHxHEIGHT, such as 1,2,3,6x4; got {size!r}.")
    return schedules.choose(Schedule(maps), aspect)  # type: ignore[arg-type]


def parse_size(text: str) -> tuple[int, int] | int | str:
    """Returns (height, width) of WIDTHxHEIGHT, or a side. Other text names a pixel budget and is left to the model."""
    found = re.fullmatch(r"(\d{1,18})(?:x(\d{1,18}))?", text)
    if found is None:
        return text
    return int(text) if found[2] is None else (int(found[2]), int(found[1]))


def parse_lora(text: str) -> tuple[str, float]:
    """Returns path and scale of PATH or PATH:SCALE."""
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0  # the colon is part of the path


def size_text(size: Sequence[int]) -> str:
    """Returns (height, width) as WIDTHxHEIGHT."""
    return f"{size[1]}x{size[0]}"


def parse_guidance(text: str | None, published: Guidance) -> GuidanceLike:
    from ..guidance import ConstantGuidance, RampGuidance

    if text is None:
        return None
    form, colon, values = text.rpartition(":")
    found = parse_per_stage("--guidance", values)
    if found is None or not colon:
        return found
    if form not in ("constant", "ramp") or isinstance(found, list):
        raise SettingError(f"--guidance must be a number, one per stage, or a form such as constant:4 or ramp:2.5; got {text!r}.")
    ramp = published if isinstance(published, RampGuidance) else RampGuidance()
    return ConstantGuidance(strength=found) if form == "constant" else ramp.with_strength(found)


def parse_per_stage(option: str, text: str | None) -> float | list[float] | None:
    if text is None:
        return None
    numbers = parse_numbers(text)
    if not numbers:
        raise SettingError(f"{option} must be a number, or one per stage such as 3,3,1; got {text!r}.")
    return numbers if len(numbers) > 1 else numbers[0]


def parse_numbers(text: str) -> list[float]:
    """Returns the numbers between commas; none if any of them is not one."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return numbers if all(math.isfinite(number) for number in numbers) else []


def parse_pairs(option: str, words: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Reads the values NAME=NUMBER of an option."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        numbers = parse_numbers(value)
        if name not in names or len(numbers) != 1:
            raise SettingError(f"{option} must be NAME=NUMBER with one of {', '.join(names)}; got {word!r}.")
        found[name] = numbers[0]
    return found


def parse_switches(words: Sequence[str]) -> dict[str, bool]:
    """Reads the values of --sampling: "greedy", "smooth=false" or several between commas."""
    found = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        name, _, value = word.partition("=")
        if name not in SWITCHES or value not in ("", "true", "false"):
            raise SettingError(f"--sampling must be one of {', '.join(SWITCHES)}, with =true or =false; got {word!r}.")
        found[name] = value != "false"
    return found


def parse_ray(text: str | None) -> RaySettings | None:
    """Reads ADDRESS,workers=N,gpus=X, in which every part may be missing."""
    if text is None:
        return None
    from ..batching.ray_cluster import RaySettings

    words = text.split(",")
    address = next((word for word in words if "=" not in word), LOCAL)
    numbers: dict[str, Any] = parse_pairs("--ray", [word for word in words if "=" in word], ("workers", "gpus"))
    if (workers := numbers.get("workers")) is not None:
        if workers < 1 or workers % 1:
            raise SettingError(f"--ray workers must be an int from 1; got {workers:g}.")
        numbers["workers"] = int(workers)
    return RaySettings(address, **numbers)
