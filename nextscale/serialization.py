"""Strict JSON for dataclasses: files are read within limits, and values only come back as declared fields of declared types."""

import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import NextscaleError, SettingError
from .validation import is_finite

T = TypeVar("T")

MAX_BYTES = 2**20
MAX_DEPTH = 64
SHOWN = 8  # names in a message
TYPE = "type"  # key of a class name


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file. Raises ValueError for files that are not regular or too large, and as `parse_json`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe or a device may never end
            raise ValueError("it must be a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror or error})") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"it must have at most {MAX_BYTES} bytes")
    return parse_json(content)


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError for NaN, infinity, repeated keys and deep nesting."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode(), parse_constant=_refuse, object_pairs_hook=_unique)
        _check_depth(value, MAX_DEPTH)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise ValueError(f"it is not valid JSON ({error})") from error
    return value


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"repeated keys among {listed([name for name, _ in pairs])}")
    return content


def _check_depth(value: Any, levels: int) -> None:
    if not levels:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_depth(one, levels - 1)


def from_plain(kind: type[T], value: Any, where: str, choices: Mapping[Any, tuple[type, ...]] | None = None) -> T:
    """Returns a parsed JSON value as an instance of `kind`: a dataclass, number, text, Literal, or a tuple, set, dict or union of these.

    Args:
        where: name of the value in messages.
        choices: the classes of a protocol or a base class. The key "type" names one of several dataclasses.

    Raises:
        ValueError: names the field that does not fit.
    """
    return _read(kind, value, where, choices or {})


def _read(kind: Any, value: Any, where: str, choices: Mapping[Any, tuple[type, ...]]) -> Any:
    if kind is Any or (kind in (int, str, bool, NoneType) and type(value) is kind):
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if kind in choices or origin in (Union, UnionType):
        options = choices.get(kind, inner)
        if isinstance(value, dict) and (classes := [one for one in options if isinstance(one, type) and is_dataclass(one)]):
            options = tuple(one for one in classes if value.get(TYPE, len(classes) == 1 and one.__name__) == one.__name__)
        for option in options:
            if len(options) == 1:
                return _read(option, value, where, choices)
            try:
                return _read(option, value, where, choices)
            except ValueError:
                continue
    elif isinstance(kind, type) and is_dataclass(kind):
        if isinstance(value, dict):
            return _build(kind, value, where, choices)
    elif origin is Literal:
        if any(type(value) is type(one) and value == one for one in inner):
            return value
    elif origin in (tuple, frozenset) and isinstance(value, list):
        kinds = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(value)
        if len(kinds) == len(value):
            return origin(_read(one, item, f"{where}[{i}]", choices) for i, (one, item) in enumerate(zip(kinds, value, strict=True)))
    elif origin is dict and isinstance(value, dict):
        return {name: _read(inner[1], one, f"{where}.{name}", choices) for name, one in value.items()}
    elif kind is float and is_finite(value):
        return float(value)
    known = (
        f"one of {', '.join(map(str, inner))}"
        if origin is Literal
        else " or ".join(getattr(one, "__name__", str(one)) for one in choices.get(kind, (kind,)))
    )
    raise ValueError(f"{where} must be {known}; got {value!r:.80}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _build(kind: type, content: dict[str, Any], where: str, choices: Mapping[Any, tuple[type, ...]]) -> Any:
    hints = _hints(kind)
    given = {name: one for name, one in content.items() if name != TYPE}
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    if content.get(TYPE, kind.__name__) != kind.__name__:
        raise ValueError(f"{where} must be {kind.__name__}; got {content[TYPE]!r:.80}")
    if missing := sorted(needed - given.keys()):
        raise ValueError(f"{where} lacks {listed(missing)}")
    if unknown := sorted(given.keys() - hints.keys()):
        raise ValueError(f"{where} has unknown fields {listed(unknown)}")
    read = {name: _read(hints[name], one, f"{where}.{name}", choices) for name, one in given.items()}
    try:
        return kind(**read)
    except (NextscaleError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{where}: {error}") from error


def to_plain(value: Any) -> Any:
    """Returns dataclasses, sets and tuples as values for JSON that `from_plain` reads back."""
    if is_dataclass(value):
        return {TYPE: type(value).__name__} | {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset | tuple | list):
        return [to_plain(one) for one in (sorted(value) if isinstance(value, frozenset) else value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SettingError(f"settings must be numbers, texts and known classes; got {value!r:.80}, which cannot be saved.")


def listed(names: Sequence[object]) -> str:
    """Returns the first names of a file for a message, with escapes for characters that cannot be printed."""
    shown = ", ".join(name if name.isprintable() else repr(name)[1:-1] for name in (str(name)[:200] for name in names[:SHOWN]))
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
