"""Names and shapes of our modules' parameters in published files, and the comparison of a file with a module."""

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
    """Published names of every parameter of ours whose whole name matches `pattern`."""

    pattern: str
    names: tuple[Template, ...]  # `re.Match.expand` templates or functions of the match; several: equal parts along dim 0, in order
    shape: Callable[[Shape], Shape] | None = None  # shape of one part of ours -> published shape: same elements, same order


@dataclass(frozen=True)
class Layout:
    """Names and shapes of one module's parameters in published files. Patterns match whole names, except in `aliases`."""

    rules: tuple[Rule, ...] = ()  # the first that matches our parameter name wins; none: the published name equals ours
    prefix: str = ""  # before every published name of ours
    wrappers: tuple[tuple[str, ...], ...] = ()  # key paths of the state dict in a torch file, tried in order; none there: a flat file
    ignored: tuple[str, ...] = ()  # published keys with statistics or recomputable tables: may be absent, may have any shape
    zero_if_absent: tuple[str, ...] = ()  # published keys that are constant zeros: absent means zeros, present means used
    aliases: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) for `re.sub` on incoming keys, before anything else
    cut_rows: tuple[str, ...] = ()  # published keys that may have more rows than ours: the surplus is dropped
    preferred_file: str | None = None  # the file to read where a folder holds several whole checkpoints, e.g. averaged weights


@dataclass(frozen=True)
class PublishedTensor:
    """The place of one published tensor: these rows of this parameter of ours. `shape` is the published shape."""

    parameter: str
    rows: slice
    shape: Shape


@dataclass(frozen=True)
class Mismatch:
    """The differences between a checkpoint and a module; false if there are none. `misshaped`: key to (shape found, shape expected)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: dict[str, tuple[Shape, Shape]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def lines(self) -> list[str]:
        """Returns one line of text for each kind of problem."""
        shapes = [f"{key} (file {list(found)}, expected {list(expected)})" for key, (found, expected) in self.misshaped.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "mis-shaped": shapes}
        return [f"{kind} ({len(names)}): {listed(names)}" for kind, names in kinds.items() if names]


def published_tensors(module: nn.Module, layout: Layout) -> dict[str, PublishedTensor]:
    """Returns the place of every published tensor of `module` (which may be on the meta device) by its key."""
    return published_places({name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}, layout)


def published_places(shapes: Mapping[str, Shape], layout: Layout) -> dict[str, PublishedTensor]:
    """Returns the place of every published tensor by its key, from the names and shapes of our parameters."""
    found: dict[str, PublishedTensor] = {}
    for parameter, shape in shapes.items():
        for key, place in _published(parameter, shape, layout):
            if key in found:
                raise ValueError(f"The layout names both {found[key].parameter} and {parameter} {key!r}; published keys must be unique.")
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
        raise ValueError(f"The layout cuts {parameter} {list(shape)} into {len(names)} parts; its rows must be a multiple of that.")
    part_rows = rows // len(names)
    part_shape = (part_rows, *rest) if shape else ()
    own_shape = published_shape(part_shape) if published_shape else part_shape
    if prod(own_shape) != prod(part_shape):
        raise ValueError(f"The layout reshapes {parameter} {list(part_shape)} to {list(own_shape)}; both must have as many elements.")
    for part, name in enumerate(names):
        yield layout.prefix + name, PublishedTensor(parameter, slice(part * part_rows, (part + 1) * part_rows), own_shape)


def check(wanted: Mapping[str, PublishedTensor], shapes: Mapping[str, Shape], layout: Layout) -> Mismatch:
    """Compares the tensors of a module with the shapes in a file."""

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
