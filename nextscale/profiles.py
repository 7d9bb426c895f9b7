"""Profiles: the measured speed and quality of methods on one model, size and machine, in a small JSON file."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from .engine.executor import Engine
from .errors import NextscaleError, ProfileError, SettingError, SizeError
from .io import expanded, write_text
from .methods.method import Method
from .methods.registry import resolve_method
from .models.base import NextScaleModel
from .serialization import from_plain, read_json
from .stage import Schedule
from .validation import is_finite, is_int, require

log = logging.getLogger(__name__)

FORMAT = "nextscale profile 1"
SUFFIX = ".profile.json"
MAX_SIDE = 2**64  # pixels or cells: areas of larger sides are too large for floats
MAX_TEXT = 1000
SIGNS = 64  # values of each parameter whose signs are part of the fingerprint
SLACK = 1e-6  # a bound may miss its value by rounding


def check_fields(holder: object, expected: str, holds: Callable[[Any], bool], *names: str) -> None:
    for name in names:
        require(holds(value := getattr(holder, name)), name, expected, value, ProfileError)


def is_line(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and len(value) <= MAX_TEXT and value.isprintable()


@dataclass(frozen=True)
class Interval:
    """A value and its interval."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        check_fields(self, "a finite number", is_finite, "value", "low", "high")
        slack = SLACK * abs(self.value)
        inside = self.low - slack <= self.value <= self.high + slack
        require(inside, "value", f"in its interval, {self.low:g} to {self.high:g}", self.value, ProfileError)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Point:
    """A method with its settings, its speedup and its distance from dense generation."""

    method: str  # as `resolve_method` and the command line read it
    speedup: Interval  # median over batches of the ratio to dense generation in the same run, 20th to 80th percentile
    lpips: Interval  # mean distance to the dense image of the same seed, 95 % bootstrap interval
    psnr: float  # to the dense image, in decibels
    ms: float  # per image, decoding included
    macs: float  # relative to dense generation

    def __post_init__(self) -> None:
        check_fields(self, "a line of text", is_line, "method")
        check_fields(self, "a finite number", is_finite, "psnr")
        check_fields(self, "a number above 0", lambda value: is_finite(value) and value > 0, "ms")
        check_fields(self, "a number of at least 0", lambda value: is_finite(value) and value >= 0, "macs")
        check_fields(self, "above 0", lambda value: value.low > 0, "speedup")
        check_fields(self, "at least 0", lambda value: value.low >= 0, "lpips")
        self.as_method()

    def as_method(self) -> Method:
        return measured_method(self.method)

    @property
    def label(self) -> str:
        return f"{self.speedup.value:.2f}x at LPIPS {self.lpips.value:.3f}"


@lru_cache(maxsize=1024)  # called at every request
def measured_method(text: str) -> Method:
    """Returns the method of a point. The writer of a profile must not choose files that are read here."""
    if "/" in text or "\\" in text or ".json" in text:
        raise ProfileError(f"method must not name a file; got {text!r}")
    try:
        method = resolve_method(text)
    except (NextscaleError, TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ProfileError(f"method must be one of this version; got {text!r} ({error})") from error
    if "alone" in method.exclusive:
        raise ProfileError(f"method must not be chosen by a profile or run two models; got {text!r}")
    return method


@dataclass(frozen=True)
class Profile:
    """The frontier of one model at one size and batch on one machine: available speedups, and their distance from dense generation."""

    model: str  # its name
    family: str
    fingerprint: str  # hash of its weights
    size: tuple[int, int]  # height, width in pixels
    grids: tuple[tuple[int, int], ...]  # of all stages
    batch: int
    dtype: Literal["float32", "bfloat16", "float16"]
    engine: Engine
    device: str
    hardware: str
    torch: str
    version: str  # of nextscale
    prompts: str  # description of their source
    searched: int  # prompts of the search
    tested: int  # held-out prompts, from which the numbers here are
    seed: int
    dense_ms: float
    points: tuple[Point, ...]  # slowest first: each is faster and further from dense generation than the one before
    skipping: tuple[Point, ...] = ()  # leaving out the last stages, for comparison

    def __post_init__(self) -> None:
        check_fields(self, "a line of text", is_line, "model", "family", "hardware", "torch", "version", "prompts")
        check_fields(self, "an int of at least 0", is_int, "searched", "seed")
        check_fields(self, "an int of at least 1", lambda value: is_int(value, 1), "batch", "tested")
        check_fields(self, "one of cuda, cpu", ("cuda", "cpu").__contains__, "device")
        check_fields(self, "64 hexadecimal digits", lambda value: bool(re.fullmatch("[0-9a-f]{64}", str(value))), "fingerprint")
        check_fields(
            self, "(height, width) in pixels", lambda size: len(size) == 2 and all(is_int(n, 1) and n <= MAX_SIDE for n in size), "size"
        )
        check_fields(self, "a number above 0", lambda value: is_finite(value) and value > 0, "dense_ms")
        try:
            Schedule(self.grids)
        except SizeError as error:
            raise ProfileError(f"grids: {error}") from error
        check_fields(self, f"at most {MAX_SIDE} cells wide", lambda grids: max(map(max, grids)) <= MAX_SIDE, "grids")
        check_fields(self, "a list of at least one point", bool, "points")
        for before, after in pairwise(self.points):
            if after.speedup.value <= before.speedup.value or after.lpips.value <= before.lpips.value:
                raise ProfileError(
                    f"points must be a frontier, each faster and further from dense generation than the one before; got {after.label} "
                    f"after {before.label}"
                )

    def __repr__(self) -> str:
        speeds = " to ".join(f"{point.speedup.value:.2f}x" for point in dict.fromkeys((self.points[0], self.points[-1])))
        return f"Profile({self.described}: {len(self.points)} {'point' if len(self.points) == 1 else 'points'}, {speeds})"

    # --- points by target

    def fastest(self, lpips: float) -> Point:
        """Returns the fastest point whose mean distance to dense images is at most this."""
        return self._first(self.points[::-1], f"an LPIPS of at most {lpips:g}", lambda point: point.lpips.value <= lpips)

    def nearest(self, speedup: float) -> Point:
        """Returns the point nearest to dense generation that is at least this number of times faster."""
        return self._first(self.points, f"a speedup of at least {speedup:g}", lambda point: point.speedup.value >= speedup)

    def within(self, ms: float) -> Point:
        """Returns the point nearest to dense generation that takes at most this number of milliseconds per image."""
        return self._first(self.points, f"at most {ms:g} ms per image", lambda point: point.ms <= ms)

    def _first(self, points: Iterable[Point], wanted: str, meets: Callable[[Point], bool]) -> Point:
        for point in points:
            if meets(point):
                return point
        offers = " up to ".join(f"{point.label} ({point.ms:.1f} ms)" for point in dict.fromkeys((self.points[0], self.points[-1])))
        raise SettingError(f"the profile of {self.described} has no point with {wanted}: it offers {offers}, dense {self.dense_ms:.1f} ms")

    @property
    def described(self) -> str:
        """The measured model, size, batch and machine."""
        return f"{self.model} at {self.size[1]}x{self.size[0]}, batch {self.batch}, on {self.hardware}"

    # --- files

    def save(self, path: str | Path) -> None:
        write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1, allow_nan=False, ensure_ascii=False) + "\n", Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        try:
            content = read_json(expanded(path))
            if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
                raise ValueError(f"its format must be {FORMAT!r}")
            return from_plain(cls, content, "profile")
        except ValueError as error:
            raise ProfileError(f"{path} is not a profile of this version: {error}. `nextscale tune` makes a new one") from error


def fingerprint(model: NextScaleModel) -> str:
    """Returns a hash of the weights by which a profile knows its model: the same on every device and in every float type.

    It covers the names and shapes of all parameters and the signs of their first values, which no rounding changes. A quantized model keeps
    the fingerprint of its original weights, so its profiles still apply.
    """
    if model.fingerprint is not None:
        return model.fingerprint
    parameters = sorted(model.named_parameters())
    if any(parameter.is_meta for _, parameter in parameters):
        raise ProfileError("the model must have weights to have a fingerprint: load them first")
    signs = torch.cat([torch.signbit(parameter.detach().reshape(-1)[:SIGNS]) for _, parameter in parameters]).cpu()
    names = "".join(f"{name} {tuple(parameter.shape)}\n" for name, parameter in parameters)
    return hashlib.sha256(names.encode() + signs.numpy().tobytes()).hexdigest()


def require_own(profile: Profile, model: NextScaleModel) -> None:
    """Raises ProfileError for a profile of another model."""
    if profile.fingerprint != (own := fingerprint(model)):
        raise ProfileError(
            f"the profile of {profile.described} was measured on other weights ({profile.family}, fingerprint {profile.fingerprint[:12]})"
            f" than these ({model.family}, fingerprint {own[:12]}): `nextscale tune` makes one for them"
        )


def find_profiles(folders: Iterable[Path]) -> dict[Path, Profile]:
    """Returns all profiles in these folders; one that cannot be read is logged and left out."""
    found = {}
    for path in dict.fromkeys(path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))):
        try:
            found[path] = Profile.load(path)
        except ProfileError as error:
            log.warning("%s", error)
    return found


def own_profiles(folders: Iterable[Path], model: NextScaleModel) -> tuple[Profile, ...]:
    """Returns the profiles in these folders that were measured on this model."""
    found = find_profiles(folders).values()
    own = fingerprint(model) if found else ""
    return tuple(profile for profile in found if profile.fingerprint == own)


def profile_name(model: str, size: tuple[int, int], device: str, batch: int) -> str:
    """Returns the usual name of a profile's file."""
    side = str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"
    return f"{model}-{side}-{device}-batch{batch}{SUFFIX}"


def profile_folder(weights: Path) -> Path:
    """Returns the folder of the profiles of these weights, a file or a folder."""
    return weights if weights.is_dir() else weights.parent
