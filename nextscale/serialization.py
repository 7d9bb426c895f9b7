"""The JSON of a profile: written with a line for each entry, read with suspicion."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from .errors import ProfileError
from .validation import is_number

LARGEST = 2**20  # bytes of a file, which has a few thousand
LONGEST = 1000  # letters of a text in it
MOST = 2**64  # pixels or cells of a side in it: areas of larger ones are too large for floats


def written(content: dict[str, Any]) -> str:
    """JSON with a line for each entry and each point."""

    def line(value: object) -> str:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)

    def entry(name: str, value: Any) -> str:
        points = name in ("points", "skipping") and value
        return f" {line(name)}: " + ("[\n" + ",\n".join(f"  {line(point)}" for point in value) + "\n ]" if points else line(value))

    return "{\n" + ",\n".join(entry(name, value) for name, value in content.items()) + "\n}\n"


def read_json(path: Path) -> Any:
    """Without numbers that are none, and without names that come twice."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe or a device may never end
            raise ProfileError("it is no file")
        if found.st_size > LARGEST:
            raise ProfileError(f"it has {found.st_size} bytes, a profile at most {LARGEST}")
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant, object_pairs_hook=unique)
    except OSError as error:
        raise ProfileError(f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise ProfileError(f"it is not JSON ({error})") from error


def refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no number")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"a name comes twice among {named(name for name, _ in pairs[:30])}")
    return content


def known_fields(kind: type, content: Any, where: str) -> dict[str, Any]:
    """All fields of a dataclass, and no others."""
    if not isinstance(content, dict):
        raise ProfileError(f"{where} is {shortened(content)}; expected a JSON object")
    names = {field.name for field in fields(kind)}
    if missing := sorted(names - set(content)):
        raise ProfileError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(set(content) - names):
        raise ProfileError(f"{where} has {named(unknown[:8])}, which this version does not know")
    return dict(content)


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{where} is {shortened(value)}; expected a list")
    return value


def require_texts(holder: object, *names: str) -> None:
    for name in names:
        value = getattr(holder, name)
        if not isinstance(value, str) or not value.strip() or len(value) > LONGEST or not value.isprintable():
            raise ProfileError(f"{name} is {shortened(value)}; expected a line of text of at most {LONGEST} letters")


def require_numbers(holder: object, *names: str) -> None:
    """Refuses what is no finite number; whole ones become floats."""
    for name in names:
        value = getattr(holder, name)
        if not is_number(value) or abs(value) > 1e300 or not math.isfinite(value):
            raise ProfileError(f"{name} is {shortened(value)}; expected a finite number")
        object.__setattr__(holder, name, float(value))


def named(names: Iterable[str]) -> str:
    """Names of a file in a message, which shows what cannot be printed as its escape."""
    return ", ".join(name if name.isprintable() else repr(name)[1:-1] for name in (name[:40] for name in names))


def shortened(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 80 else f"{text[:80]}..."
