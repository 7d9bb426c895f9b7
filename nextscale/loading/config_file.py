"""The config.json beside a checkpoint: what it says and what the weights show, which have to agree."""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import Checkpoint, Shape
from ..checkpoints.files import read_object
from ..errors import CheckpointError

CONFIG_NAME = "config.json"
# No model comes near these; they keep a hostile file from asking for a network that takes forever to build.
MOST_CHANNELS = 2**16
MOST_LAYERS = 2**10

SHOWN = reprlib.Repr()
SHOWN.maxlist = SHOWN.maxtuple = 20
SHOWN.maxstring = 60


@dataclass(frozen=True)
class Setting:
    """One entry of config.json that gives a field of our configuration."""

    key: str
    field: str
    read: Callable[[object], Any]  # raises ValueError, whose text says what was expected
    write: Callable[[Any], Any] = lambda value: value  # back to what stands in config.json


@dataclass(frozen=True)
class Format:
    """What the config.json of one part of a release says, and what its weights may have."""

    part: str
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]  # entries with the only value that is implemented
    unreleased: Mapping[str, str]  # patterns of keys in the weights that belong to a variant which is not implemented, and its name

    def dump(self, config: object) -> str:
        """The content of a config.json that says what `config` says."""
        own = {setting.key: setting.write(getattr(config, setting.field)) for setting in self.settings}
        return json.dumps(own | dict(self.fixed), indent=2)


class Findings:
    """What config.json says and what the weights show, by the names of our fields; and everything that is wrong with them."""

    def __init__(self, checkpoint: Checkpoint, format: Format) -> None:
        self._path = checkpoint.path
        self._format = format
        self._config_file = config_file(checkpoint)
        self._content = read_object(self._config_file) if self._config_file else {}
        self.shapes = checkpoint.shapes
        self.said: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.problems: list[str] = []
        self._read_fixed()
        self._read_settings()

    @property
    def settled(self) -> dict[str, Any]:
        return self.said | self.seen

    def _read_fixed(self) -> None:
        for key, only in self._format.fixed.items():
            if key in self._content and not same(self._content[key], only):
                self.problems.append(f"{self._entry(key)}, only {SHOWN.repr(only)} is implemented: no other checkpoint was released")

    def _read_settings(self) -> None:
        for setting in self._format.settings:
            if setting.key in self._content:
                try:
                    self.said[setting.field] = setting.read(self._content[setting.key])
                except ValueError as error:
                    self.problems.append(f"{self._entry(setting.key)}, expected {error}")

    def _entry(self, key: str) -> str:
        assert self._config_file is not None
        return f"{self._config_file.name} says {key} {SHOWN.repr(self._content[key])}"

    def origin(self, field: str) -> str:
        """The source of a field's value, for messages."""
        if field in self.seen:
            return "the weights"
        return self._config_file.name if field in self.said and self._config_file else "the preset"

    def size(self, key: str, axis: int) -> int | None:
        """Length of an axis of a tensor; None where it is absent or of no possible size: then loading says what does not fit."""
        shape = self.shapes.get(key, ())
        return shape[axis] if axis < len(shape) and 1 <= shape[axis] <= MOST_CHANNELS else None

    def shown(self, key: str) -> str:
        return f"{key} {list(self.shapes[key])}"

    def see(self, field: str, value: object, evidence: str) -> None:
        self.seen[field] = value
        if field in self.said and self.said[field] != value:
            key = next(setting.key for setting in self._format.settings if setting.field == field)
            self.problems.append(f"{self._entry(key)}, the weights have {evidence}")

    def see_size(self, field: str, key: str, axis: int) -> None:
        size = self.size(key, axis)
        if size is not None:
            self.see(field, size, self.shown(key))

    def see_count(self, field: str, pattern: str, what: str) -> None:
        found = count(self.shapes, pattern)
        if 1 <= found <= MOST_LAYERS:
            self.see(field, found, f"{found} {what}")

    def see_presence(self, field: str, key: str) -> None:
        there = key in self.shapes
        self.see(field, there, key if there else f"no {key}")

    def refuse_unreleased(self) -> None:
        for pattern, variant in self._format.unreleased.items():
            if found := [key for key in self.shapes if re.fullmatch(pattern, key)]:
                self.problems.append(f"the weights have {found[0]} ({variant}), which is not implemented: no such checkpoint was released")

    def raise_problems(self) -> None:
        if self.problems:
            raise CheckpointError(
                "\n  ".join([f"{self._path} is not a {self._format.part} that can be loaded:", *self.problems])
                + f"\nPass the weights together with the {CONFIG_NAME} that was published beside them."
            )


def count(shapes: Mapping[str, Shape], pattern: str) -> int:
    """How many different numbers the keys have at the group of `pattern`, which they start with."""
    return len({match[1] for key in shapes if (match := re.match(pattern, key))})


def same(value: object, expected: object) -> bool:
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-6)  # may have been stored in float32
    return type(value) is type(expected) and value == expected


def config_file(checkpoint: Checkpoint) -> Path | None:
    """The configuration that conversion has written for this file; otherwise the config.json of the folder."""
    path = checkpoint.path
    files = {entry.shard for entry in checkpoint.entries.values()}
    own = [own_config_file(file) for file in files] if len(files) == 1 else []
    candidates = [*own, (path if path.is_dir() else path.parent) / CONFIG_NAME]
    return next((file for file in candidates if os.path.lexists(file)), None)


def own_config_file(weights: Path) -> Path:
    """The configuration of a converted file, named after it, so that both parts of a release can be in one folder."""
    return weights.parent / f"{weights.stem}.{CONFIG_NAME}"


# --- readers of single entries


def whole(most: int, least: int = 1) -> Callable[[object], int]:
    def read(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return read


def positive(most: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            raise ValueError(f"a positive number up to {most:g}")
        return float(value)

    return read


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def negated(value: object) -> bool:
    return not flag(value)


def whole_numbers(value: object) -> tuple[int, ...]:
    """A list of whole numbers as a tuple; empty for anything else."""
    if isinstance(value, list) and all(type(number) is int and 1 <= number <= MOST_LAYERS for number in value):
        return tuple(value)
    return ()
