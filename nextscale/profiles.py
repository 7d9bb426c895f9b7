"""Profiles: what methods were measured to save and to cost on one model, size and machine, in a small JSON file."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch

from .engine.executor import Engine
from .errors import NextscaleError, ProfileError, SettingError, SizeError
from .io import write_text
from .methods.code import CoDe
from .methods.method import Method
from .methods.registry import resolve_method
from .models.base import NextScaleModel
from .serialization import MOST, as_list, known_fields, read_json, require_numbers, require_texts, shortened, written
from .stage import Schedule
from .validation import is_int

log = logging.getLogger(__name__)

FORMAT = "nextscale profile 1"
SUFFIX = ".profile.json"
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cuda", "cpu")
SIGNS = 64  # values of each parameter whose signs are part of the fingerprint
SLACK = 1e-6  # a bound that was computed apart from its value may miss it by rounding


@dataclass(frozen=True)
class Interval:
    """A value and the interval in which it lies."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        require_numbers(self, "value", "low", "high")
        slack = SLACK * abs(self.value)
        if not self.low - slack <= self.value <= self.high + slack:
            raise ProfileError(f"the value {self.value:g} lies outside its interval, {self.low:g} to {self.high:g}")

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Point:
    """A method with its settings, what it saves and what it costs."""

    method: str  # as `resolve_method` and the command line read it
    speedup: Interval  # median over batches against dense generation in the same run, 20th to 80th percentile
    lpips: Interval  # mean distance to the dense image of the same seed, 95 % bootstrap interval
    psnr: float  # to the dense image, in decibels
    ms: float  # per image, decoding included
    macs: float  # share of those of dense generation

    def __post_init__(self) -> None:
        require_texts(self, "method")
        require_numbers(self, "psnr", "ms", "macs")
        for name, value in (("ms", self.ms), ("speedup", self.speedup.low)):
            if value <= 0:
                raise ProfileError(f"{name} is {value:g}; expected a number above 0")
        for name, value in (("lpips", self.lpips.low), ("macs", self.macs)):
            if value < 0:
                raise ProfileError(f"{name} is {value:g}; expected 0 or more")
        self.as_method()

    def as_method(self) -> Method:
        return measured_method(self.method)

    @property
    def label(self) -> str:
        return f"{self.speedup.value:.2f}x at LPIPS {self.lpips.value:.3f}"


@lru_cache(maxsize=1024)  # asked for at every request
def measured_method(text: str) -> Method:
    """Whoever wrote a profile does not choose files that are read here: methods whose settings lie in one are refused."""
    if "/" in text or "\\" in text or ".json" in text:
        raise ProfileError(f"the method {text!r} names a file, which a profile may not")
    try:
        method = resolve_method(text)
    except (NextscaleError, TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ProfileError(f"the method {text!r} is none of this version ({error})") from error
    if method.chooses:
        raise ProfileError(f"the method {text!r} is chosen by a profile and cannot be a point of one")
    if isinstance(method, CoDe):
        raise ProfileError(f"the method {text!r} runs two models, and a profile is of one")
    return method


@dataclass(frozen=True)
class Profile:
    """The frontier of one model at one size and batch on one machine: what can be had, and at which distance from dense generation."""

    model: str  # its name
    family: str
    fingerprint: str  # of its weights
    size: tuple[int, int]  # height, width in pixels
    grids: tuple[tuple[int, int], ...]  # of all stages
    batch: int
    dtype: str
    engine: str
    device: str  # "cuda" or "cpu"
    hardware: str
    torch: str
    version: str  # of nextscale
    prompts: str  # where they came from, in words
    searched: int  # prompts of the search
    tested: int  # other prompts, from which the numbers here are
    seed: int
    dense_ms: float
    points: tuple[Point, ...]  # slowest first: each is faster and further from dense generation than the one before
    skipping: tuple[Point, ...] = ()  # leaving out the last stages, for comparison

    def __post_init__(self) -> None:
        require_texts(self, "model", "family", "hardware", "torch", "version", "prompts")
        for name, least in (("batch", 1), ("searched", 0), ("tested", 1), ("seed", 0)):
            if not is_int(getattr(self, name), least):
                raise ProfileError(f"{name} is {shortened(getattr(self, name))}; expected a whole number, {least} or more")
        for name, known in (("dtype", DTYPES), ("engine", get_args(Engine)), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise ProfileError(f"{name} is {shortened(getattr(self, name))}; expected one of {', '.join(known)}")
        if not isinstance(self.fingerprint, str) or not re.fullmatch("[0-9a-f]{64}", self.fingerprint):
            raise ProfileError(f"fingerprint is {shortened(self.fingerprint)}; expected 64 hexadecimal digits")
        if len(self.size) != 2 or not all(is_int(side, 1) and side <= MOST for side in self.size):
            raise ProfileError(f"size is {shortened(self.size)}; expected (height, width) in pixels")
        require_numbers(self, "dense_ms")
        if self.dense_ms <= 0:
            raise ProfileError(f"dense_ms is {self.dense_ms:g}; expected a number above 0")
        try:
            Schedule(self.grids)
        except SizeError as error:
            raise ProfileError(f"grids: {error}") from error
        if (largest := max(map(max, self.grids))) > MOST:
            raise ProfileError(f"grids: a side of {shortened(largest)} cells")
        require_frontier(self.points)

    # --- points by what is asked for

    def fastest(self, lpips: float) -> Point:
        """The fastest point whose mean distance to dense images is at most this."""
        return self._last(f"an LPIPS of at most {lpips:g}", lambda point: point.lpips.value <= lpips)

    def nearest(self, speedup: float) -> Point:
        """The point nearest to dense generation that is at least this number of times faster."""
        return self._first(f"a speedup of at least {speedup:g}", lambda point: point.speedup.value >= speedup)

    def within(self, ms: float) -> Point:
        """The point nearest to dense generation that takes at most this number of milliseconds per image."""
        return self._first(f"at most {ms:g} ms per image", lambda point: point.ms <= ms)

    def _first(self, wanted: str, meets: Callable[[Point], bool]) -> Point:
        return self._one([point for point in self.points if meets(point)][:1], wanted)

    def _last(self, wanted: str, meets: Callable[[Point], bool]) -> Point:
        return self._one([point for point in self.points if meets(point)][-1:], wanted)

    def _one(self, found: list[Point], wanted: str) -> Point:
        if not found:
            slow, fast = self.points[0], self.points[-1]
            offers = f"{slow.label} ({slow.ms:.1f} ms)" + (f" up to {fast.label} ({fast.ms:.1f} ms)" if fast is not slow else "")
            raise SettingError(
                f"the profile of {self.described} has no point with {wanted}: it offers {offers}, dense {self.dense_ms:.1f} ms"
            )
        return found[0]

    @property
    def described(self) -> str:
        """The model, size, batch and machine that were measured, in words."""
        return f"{self.model} at {self.size[1]}x{self.size[0]}, batch {self.batch}, on {self.hardware}"

    @property
    def file_name(self) -> str:
        return profile_name(self.model, self.size, self.device, self.batch)

    # --- files

    def save(self, path: str | Path) -> None:
        write_text(written({"format": FORMAT} | asdict(self)), Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        path = Path(path)
        try:
            return read_profile(read_json(path))
        except ProfileError as error:
            raise ProfileError(f"{path} is no profile that can be used: {error}. `nextscale tune` makes a new one") from error


def fingerprint(model: NextScaleModel) -> str:
    """A number of the weights by which a profile knows its model: the same on every device and in every float type.

    It is made of the names and shapes of all parameters and of the signs of their first values, which no rounding changes. A quantised
    model keeps the one that it had before: what was measured of its weights in another format still belongs to it.
    """
    if model.fingerprint is not None:
        return model.fingerprint
    parameters = sorted(model.named_parameters())
    if any(parameter.is_meta for _, parameter in parameters):
        raise ProfileError("a model without weights has no fingerprint: load them first")
    signs = torch.cat([torch.signbit(parameter.detach().reshape(-1)[:SIGNS]) for _, parameter in parameters]).cpu()
    names = "".join(f"{name} {tuple(parameter.shape)}\n" for name, parameter in parameters)
    return hashlib.sha256(names.encode() + signs.numpy().tobytes()).hexdigest()


def require_own(profile: Profile, model: NextScaleModel) -> None:
    """ProfileError for a profile of another model."""
    if profile.fingerprint != (own := fingerprint(model)):
        raise ProfileError(
            f"the profile of {profile.described} was measured on other weights ({profile.family}, fingerprint {profile.fingerprint[:12]})"
            f" than these ({model.family}, fingerprint {own[:12]}): `nextscale tune` makes one for them"
        )


def find_profiles(folders: Iterable[Path]) -> dict[Path, Profile]:
    """All profiles in these folders, in their order, whatever their models; one that cannot be read is named in the log and left out."""
    found = {}
    for path in dict.fromkeys(path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))):
        try:
            found[path] = Profile.load(path)
        except ProfileError as error:
            log.warning("%s", error)
    return found


def own_profiles(folders: Iterable[Path], model: NextScaleModel) -> tuple[Profile, ...]:
    """Those in these folders that were measured on this model."""
    found = find_profiles(folders).values()
    own = fingerprint(model) if found else ""
    return tuple(profile for profile in found if profile.fingerprint == own)


def profile_name(model: str, size: tuple[int, int], device: str, batch: int) -> str:
    """The usual name of a profile's file."""
    side = str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"
    return f"{model}-{side}-{device}-batch{batch}{SUFFIX}"


def profile_folder(weights: Path) -> Path:
    """The folder in which the profiles of these weights, a file or a folder, lie."""
    return weights if weights.is_dir() else weights.parent


# --- reading and checking


def read_profile(content: Any) -> Profile:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = shortened(content.get("format") if isinstance(content, dict) else content)
        raise ProfileError(f"its format is {found}; this version reads {FORMAT!r}")
    named = known_fields(Profile, {name: value for name, value in content.items() if name != "format"}, "the profile")
    named["size"] = tuple(as_list(named["size"], "size"))
    named["grids"] = tuple(tuple(as_list(grid, "a grid")) for grid in as_list(named["grids"], "grids"))
    for name in ("points", "skipping"):
        named[name] = tuple(read_point(point, f"{name}[{number}]") for number, point in enumerate(as_list(named[name], name)))
    return Profile(**named)


def read_point(content: Any, where: str) -> Point:
    named = known_fields(Point, content, where)
    try:
        for name in ("speedup", "lpips"):
            named[name] = Interval(**known_fields(Interval, named[name], name))
        return Point(**named)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from error


def require_frontier(points: tuple[Point, ...]) -> None:
    if not points:
        raise ProfileError("it has no points")
    for before, after in pairwise(points):
        if after.speedup.value <= before.speedup.value or after.lpips.value <= before.lpips.value:
            raise ProfileError(
                f"its points are no frontier: after {before.label} comes {after.label}; each has to be faster than the one before and"
                " further from dense generation"
            )
