"""Lets the reference list settings: paragraphs of `name: text` in docstrings become Google's section Args."""

import re
from typing import Any

import griffe

SETTING = re.compile(r"[a-z_]+(, [a-z_]+)*: ")


class Settings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(listed, obj.docstring.value.split("\n\n")))


def listed(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if not SETTING.match(lines[0]) or any(not line.startswith("    ") and not SETTING.match(line) for line in lines):
        return paragraph
    return "\n".join(["Args:", *(f"    {line}" for line in lines)])
