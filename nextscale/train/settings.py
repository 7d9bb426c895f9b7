"""Changes to a training's settings from texts such as "learning_rate=1e-3" or "model.depth=12"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from ..errors import SettingError

S = TypeVar("S")


def changed(settings: S, changes: Sequence[str]) -> S:
    """A copy with each `name=value` applied; a dot leads into the settings of a part, values are JSON."""
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise SettingError(f"setting {change!r}: expected name=value, such as learning_rate=1e-3")
        settings = _replaced(settings, name.strip().split("."), _value(text.strip()), change)
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _replaced(settings: Any, path: Sequence[str], value: Any, change: str) -> Any:
    known = {field.name for field in fields(settings)} if is_dataclass(settings) else set()
    if path[0] not in known:
        raise SettingError(f"setting {change!r}: there is no {path[0]!r} here; known: {', '.join(sorted(known)) or 'nothing'}")
    if len(path) > 1:
        value = _replaced(getattr(settings, path[0]), path[1:], value, change)
    elif isinstance(value, list):
        value = _tuples(value)
    try:
        return replace(settings, **{path[0]: value})
    except TypeError as error:
        raise SettingError(f"setting {change!r}: {error}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
