"""Changes to settings, such as "learning_rate=1e-3" or "model.depth=12", and the settings that a resumed run must keep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, TypeVar

from nextscale.errors import SettingError

S = TypeVar("S")
KINDS = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a list", dict: "an object", str: "a string"}


def changed(settings: S, changes: Sequence[str]) -> S:
    """Returns a copy with all `name=value` changes applied together. Dots name settings of a part; values are JSON."""
    tree: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise SettingError(f"setting {change!r}: expected name=value, such as learning_rate=1e-3")
        path = name.strip().split(".")
        value = _checked(settings, path, _value(text.strip()), change)
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = value
    return _applied(settings, tree)


def lasting(settings: Any) -> dict[str, Any]:
    """Returns the settings that a resumed run must keep: all except those that only change its speed."""
    return {name: value for name, value in asdict(settings).items() if name != "compile"}


def _value(text: str) -> Any:
    try:
        return _tuples(json.loads(text))
    except ValueError:
        return text


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _checked(settings: Any, path: Sequence[str], value: Any, change: str) -> Any:
    """Returns the value. Raises SettingError unless a setting of this name and type exists."""
    known = [field.name for field in fields(settings)] if is_dataclass(settings) else []
    if path[0] not in known:
        raise SettingError(f"setting {change!r}: there is no {path[0]!r} here; known: {', '.join(sorted(known)) or 'nothing'}")
    present = getattr(settings, path[0])
    if len(path) > 1:
        return _checked(present, path[1:], value, change)
    if is_dataclass(present):
        raise SettingError(f"setting {change!r}: {path[0]} has settings of its own, such as {path[0]}.{fields(present)[0].name}=...")
    if type(value) is int and isinstance(present, float):
        return float(value)
    if type(value) is not type(present):
        raise SettingError(f"setting {change!r}: expected {KINDS[type(present)]}; without it {json.dumps(present, default=str)}")
    return value


def _applied(settings: Any, tree: dict[str, Any]) -> Any:
    parts = {name: getattr(settings, name) for name in tree}
    return replace(settings, **{name: _applied(parts[name], value) if is_dataclass(parts[name]) else value for name, value in tree.items()})
