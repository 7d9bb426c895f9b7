"""Strict JSON: what is read comes back as declared, and everything else is refused by its place."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from nextscale.errors import SettingError
from nextscale.serialization import MAX_DEPTH, from_plain, parse_json, read_json, to_plain


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Square:
    side: int = 1

    def __post_init__(self) -> None:
        if self.side < 1:
            raise SettingError(f"side must be at least 1; got {self.side}")


class Shape(Protocol): ...


@dataclass(frozen=True)
class Drawing:
    name: str
    kind: Literal["plain", "filled"]
    sizes: tuple[int, int]
    steps: tuple[int, ...]
    marks: frozenset[int]
    about: dict[str, Any]
    first: Circle | Square
    shape: Shape
    note: str | None = None
    inner: Square | None = None


CHOICES: dict[Any, tuple[type, ...]] = {Shape: (Circle, Square)}
DRAWING = Drawing("a", "plain", (1, 2), (), frozenset({3, 1}), {"x": [1, None]}, Circle(2.5), Square(3), None, Square())


def changed(**changes: Any) -> dict[str, Any]:
    plain = {**to_plain(Drawing(**{**vars(DRAWING), "about": None})), "about": DRAWING.about}  # type: ignore[arg-type]
    return json.loads(json.dumps(plain | changes))


def test_values_come_back() -> None:
    assert from_plain(Drawing, changed(), "drawing", CHOICES) == DRAWING
    assert from_plain(Drawing, changed(inner={"side": 2}), "drawing", CHOICES).inner == Square(2), "one class needs no tag"
    assert type(from_plain(Circle, {"radius": 2}, "circle").radius) is float


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 1}, "drawing.name must be str; got 1"),
        ({"kind": "striped"}, "drawing.kind must be"),
        ({"kind": True}, "drawing.kind must be"),
        ({"sizes": [1]}, "drawing.sizes must be"),
        ({"sizes": [1, 2.0]}, r"drawing.sizes\[1\] must be int; got 2.0"),
        ({"sizes": [1, True]}, r"drawing.sizes\[1\] must be int; got True"),
        ({"steps": "12"}, "drawing.steps must be"),
        ({"marks": {"1": 2}}, "drawing.marks must be"),
        ({"about": [1]}, "drawing.about must be"),
        ({"first": {"radius": 1.0}}, "drawing.first must be"),
        ({"first": {"type": "Drawing"}}, "drawing.first must be"),
        ({"first": {"type": "Circle", "radius": 10**400}}, "drawing.first.radius must be float"),
        ({"shape": {"type": "Square", "side": 0}}, "drawing.shape: side must be at least 1"),
        ({"shape": {"type": "os.system"}}, "drawing.shape must be Circle or Square"),
        ({"inner": {"type": "Circle", "radius": 1.0}}, "drawing.inner must be"),
        ({"color": 1}, "drawing has unknown fields color"),
    ],
)
def test_other_values_are_refused_by_their_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_plain(Drawing, changed(**changes), "drawing", CHOICES)
    with pytest.raises(ValueError, match="drawing lacks about, first, kind"):
        from_plain(Drawing, {}, "drawing", CHOICES)


NESTED = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)


@pytest.mark.parametrize("text", ["", "{", "NaN", "[-Infinity]", '{"a": 1, "a": 2}', NESTED, b"\xff", "9" * 5000])
def test_texts_that_are_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="it is not valid JSON"):
        parse_json(text)


def test_files_that_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "large").write_text(" " * (2**20 + 1))
    for name, message in {
        ".": "regular file",
        "pipe": "regular file",
        "zeros": "regular file",
        "absent": "No such",
        "large": "at most 1048576",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_json(tmp_path / name)


def test_unknown_values_are_not_written() -> None:
    with pytest.raises(SettingError, match="cannot be saved"):
        to_plain(Drawing("a", "plain", (1, 2), (), frozenset(), {"x": object()}, Circle(1), Square()))
