"""Captions of training shards, with metadata of their images."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nextscale.errors import PromptError
from nextscale.offline.prompts import Line, caption_of, read_shard

KINDS: dict[str, tuple[type, str]] = {"keywords": (list, "a list"), "unseen": (bool, "true or false")}  # other fields are strings


@dataclass(frozen=True)
class Record:
    """One captioned image."""

    file: str
    caption: str
    style: str = ""
    label: str = ""
    group: str = ""
    subject: str = ""  # part of the caption that names the subject
    alt: str = ""  # another name of the subject
    keywords: tuple[str, ...] = ()
    caption_color: str = ""  # the caption with a color
    unseen: bool = False  # held-out images: the training shards hold nothing of this subject

    @classmethod
    def of(cls, line: Line) -> Record:
        """Returns the record of a line of captions.jsonl; ignores unknown fields."""
        source, given = line
        known: dict[str, Any] = {field.name: given[field.name] for field in fields(cls) if given.get(field.name) is not None}
        for name, value in known.items():
            kind, expected = KINDS.get(name, (str, "a string"))
            if not isinstance(value, kind):
                raise PromptError(f"{source}: {name} must be {expected}; got {value!r:.80}")
        return cls(**{"file": "", **known, "caption": caption_of(line), "keywords": tuple(map(str, known.get("keywords", ())))})

    @property
    def mirrored_alike(self) -> bool:
        """True if the caption also fits the mirrored image: not for signs, flags, clocks and directions."""
        sided = ("left", "right", "clock", "hand", "keycap", "thirty", "twelve", "button")
        return self.group not in ("Symbols", "Flags") and not any(word in self.label.lower() for word in sided)


def read_records(shard: Path) -> tuple[list[Record], list[bytes]]:
    """Reads the records of a shard and the bytes of their images."""
    lines, images = read_shard(shard)
    return [Record.of(line) for line in lines], images
