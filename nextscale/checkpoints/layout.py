"""How published files name and pack the parameters of our modules, and whether a file fits a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import nn

Shape = tuple[int, ...]
Template = str | Callable[[re.Match[str]], str]

NAMES_SHOWN = 8


@dataclass(frozen=True)
class Rule:
    """Published names of every parameter of ours whose whole name matches `pattern`."""

    pattern: str
    names: tuple[Template, ...]  # `re.Match.expand` templates or functions of the match; several: equal parts along dim 0, in order
    shape: Callable[[Shape], Shape] | None = None  # shape of one part of ours -> published shape: same elements, same order


@dataclass(frozen=True)
class Layout:
    """How the published files name and pack the parameters of one of our modules. Patterns match whole names, except in `aliases`."""

    rules: tuple[Rule, ...] = ()  # the first that matches our parameter name wins; none: the published name equals ours
    prefix: str = ""  # before every published name of ours
    wrappers: tuple[tuple[str, ...], ...] = ()  # key paths of the state dict in a torch file, tried in order; none there: a flat file
    ignored: tuple[str, ...] = ()  # published keys with statistics or recomputable tables: may be absent, may have any shape
    zero_if_absent: tuple[str, ...] = ()  # published keys that are constant zeros: absent means zeros, present means used
    aliases: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) for `re.sub` on incoming keys, before anything else
    cut_rows: tuple[str, ...] = ()  # published keys that may have more rows than ours: the surplus is dropped
    preferred_file: str | None = None  # the file to read where a folder holds several whole checkpoints, e.g. averaged weights


@dataclass(frozen=True)
class Slot:
    """Where one published tensor goes: these rows of this parameter of ours. `shape` is the published shape."""

    parameter: str
    rows: slice
    shape: Shape


@dataclass(frozen=True)
class Mismatch:
    """What keeps a checkpoint from fitting a module; false when it fits. `misshaped` maps a key to (shape in the file, shape expected)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: dict[str, tuple[Shape, Shape]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def lines(self) -> list[str]:
        """One line of text for each kind of problem."""
        shapes = [f"{key} (file {list(found)}, expected {list(expected)})" for key, (found, expected) in self.misshaped.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "mis-shaped": shapes}
        return [f"{kind} ({len(names)}): {listed(names)}" for kind, names in kinds.items() if names]


def published_slots(module: nn.Module, layout: Layout) -> dict[str, Slot]:
    """Published key -> slot, for every parameter of `module` (which may be on the meta device)."""
    slots: dict[str, Slot] = {}
    for parameter, tensor in module.state_dict().items():
        for key, slot in _parameter_slots(parameter, tuple(tensor.shape), layout):
            if key in slots:
                raise ValueError(f"The layout names both {slots[key].parameter} and {parameter} {key!r}; published keys must be unique.")
            slots[key] = slot
    return slots


def _parameter_slots(parameter: str, shape: Shape, layout: Layout) -> Iterator[tuple[str, Slot]]:
    names, published_shape = _publication(parameter, layout)
    rows, *rest = shape or (1,)
    if rows % len(names) or (not shape and len(names) > 1):
        raise ValueError(f"The layout cuts {parameter} {list(shape)} into {len(names)} parts; its rows must be a multiple of that.")
    part_rows = rows // len(names)
    part_shape = (part_rows, *rest) if shape else ()
    slot_shape = published_shape(part_shape) if published_shape else part_shape
    if prod(slot_shape) != prod(part_shape):
        raise ValueError(f"The layout reshapes {parameter} {list(part_shape)} to {list(slot_shape)}; both must have as many elements.")
    for part, name in enumerate(names):
        yield name, Slot(parameter, slice(part * part_rows, (part + 1) * part_rows), slot_shape)


def _publication(parameter: str, layout: Layout) -> tuple[list[str], Callable[[Shape], Shape] | None]:
    for rule in layout.rules:
        if match := re.fullmatch(rule.pattern, parameter):
            names = [match.expand(name) if isinstance(name, str) else name(match) for name in rule.names]
            return [layout.prefix + name for name in names], rule.shape
    return [layout.prefix + parameter], None


def check(slots: Mapping[str, Slot], shapes: Mapping[str, Shape], layout: Layout) -> Mismatch:
    """Compares what a module takes with what a file has."""
    return Mismatch(
        missing=tuple(key for key in slots if key not in shapes and not matches_any(key, layout.zero_if_absent)),
        unexpected=tuple(key for key in shapes if key not in slots and not matches_any(key, layout.ignored)),
        misshaped={
            key: (shapes[key], slot.shape)
            for key, slot in slots.items()
            if key in shapes and not _shape_fits(shapes[key], slot.shape, can_cut=matches_any(key, layout.cut_rows))
        },
    )


def fits(slots: Mapping[str, Slot], shapes: Mapping[str, Shape], layout: Layout) -> bool:
    """Whether a file with these shapes fills the module exactly."""
    return not check(slots, shapes, layout)


def _shape_fits(found: Shape, expected: Shape, can_cut: bool) -> bool:
    if can_cut and found and expected:
        return found[1:] == expected[1:] and found[0] >= expected[0]
    return found == expected


def published_key(stored_key: str, layout: Layout) -> str:
    for pattern, replacement in layout.aliases:
        stored_key = re.sub(pattern, replacement, stored_key)
    return stored_key


def matches_any(key: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in patterns)


def listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{shown} and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else shown
