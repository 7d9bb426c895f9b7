"""Names and shapes of parameters in published files, and comparison of a file with a module."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import nn

from ..serialization import listed

Shape = tuple[int, ...]
Template = str | Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Rule:
    """Published names of our parameters whose whole name matches `pattern`."""

    pattern: str
    names: tuple[Template, ...]  # `re.Match.expand` templates or functions of the match; several: equal parts along dim 0, in order
    shape: Callable[[Shape], Shape] | None = None  # converts the shape of one part to the published shape, with the same elements


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a module's parameters in published files. Patterns match whole names, except in `aliases`."""

    rules: tuple[Rule, ...] = ()  # the first match wins; without a match, the published name equals ours
    prefix: str = ""  # of every published name
    wrappers: tuple[tuple[str, ...], ...] = ()  # key paths of the state dict in a torch file, tried in order before the top level
    ignored: tuple[str, ...] = ()  # published keys of statistics or recomputable tables, which are optional and may have any shape
    zero_if_absent: tuple[str, ...] = ()  # published keys that default to zeros if they are missing
    aliases: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) for `re.sub` on stored keys, applied first
    cut_rows: tuple[str, ...] = ()  # published keys that may have extra rows, which are dropped
    preferred_file: str | None = None  # file to read if a folder has several checkpoints, for example averaged weights


@dataclass(frozen=True)
class PublishedTensor:
    """Destination of one published tensor: rows of one of our parameters. `shape` is the published shape."""

    parameter: str
    rows: slice
    shape: Shape


@dataclass(frozen=True)
class Mismatch:
    """Differences between a checkpoint and a module; false if there are none. `misshaped`: key to (shape found, shape expected)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: dict[str, tuple[Shape, Shape]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def lines(self) -> list[str]:
        """Returns one line of text per kind of problem."""
        shapes = [f"{key} (file {list(found)}, expected {list(expected)})" for key, (found, expected) in self.misshaped.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "mis-shaped": shapes}
        return [f"{kind} ({len(names)}): {listed(names)}" for kind, names in kinds.items() if names]


def published_tensors(module: nn.Module, layout: Layout) -> dict[str, PublishedTensor]:
    """Returns the published tensors of `module`, which may be on the meta device, by key."""
    return published_places({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}, layout)


def published_places(shapes: Mapping[str, Shape], layout: Layout) -> dict[str, PublishedTensor]:
    """Returns the published tensors by key, from the names and shapes of our parameters."""
    found: dict[str, PublishedTensor] = {}
    for parameter, shape in shapes.items():
        for key, place in _published(parameter, shape, layout):
            if key in found:
                raise ValueError(f"published keys must be unique; got {key!r} for both {found[key].parameter} and {parameter}.")
            found[key] = place
    return found


def _published(parameter: str, shape: Shape, layout: Layout) -> Iterator[tuple[str, PublishedTensor]]:
    names, published_shape = [parameter], None
    for rule in layout.rules:
        if match := re.fullmatch(rule.pattern, parameter):
            names, published_shape = [match.expand(name) if isinstance(name, str) else name(match) for name in rule.names], rule.shape
            break
    rows, *rest = shape or (1,)
    if rows % len(names) or (not shape and len(names) > 1):
        raise ValueError(f"rows of {parameter} must be a multiple of {len(names)}, its number of published parts; got {list(shape)}.")
    part_rows = rows // len(names)
    part_shape = (part_rows, *rest) if shape else ()
    own_shape = published_shape(part_shape) if published_shape else part_shape
    if prod(own_shape) != prod(part_shape):
        raise ValueError(f"published shape of {parameter} must have the elements of {list(part_shape)}; got {list(own_shape)}.")
    for part, name in enumerate(names):
        yield layout.prefix + name, PublishedTensor(parameter, slice(part * part_rows, (part + 1) * part_rows), own_shape)


def check(wanted: Mapping[str, PublishedTensor], shapes: Mapping[str, Shape], layout: Layout) -> Mismatch:
    """Compares the published tensors of a module with the shapes in a file."""

    def is_misshaped(key: str, found: Shape, expected: Shape) -> bool:
        if found and expected and matches_any(key, layout.cut_rows):
            return found[1:] != expected[1:] or found[0] < expected[0]
        return found != expected

    both = {key: (shapes[key], place.shape) for key, place in wanted.items() if key in shapes}
    return Mismatch(
        missing=tuple(key for key in wanted if key not in shapes and not matches_any(key, layout.zero_if_absent)),
        unexpected=tuple(key for key in shapes if key not in wanted and not matches_any(key, layout.ignored)),
        misshaped={key: pair for key, pair in both.items() if is_misshaped(key, *pair)},
    )


def published_key(stored_key: str, layout: Layout) -> str:
    for pattern, replacement in layout.aliases:
        stored_key = re.sub(pattern, replacement, stored_key)
    return stored_key


def matches_any(key: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in patterns)
