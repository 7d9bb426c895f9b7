"""Tar shards of captioned images: captions.jsonl, one JSON object per line, and the images that it names."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import NextscaleError
from ..io import regular

CAPTIONS = "captions.jsonl"
LARGEST_MEMBER = 2**26  # bytes
TEXT_FIELDS = ("prompt", "caption", "text")  # the first that a line has is its caption
KINDS: dict[str, tuple[type, str]] = {"keywords": (list, "a list"), "unseen": (bool, "true or false")}  # other fields are strings


class DataError(NextscaleError):
    """A shard that cannot be read, or not in the expected form."""


@dataclass(frozen=True)
class Record:
    """What is known of one image. Only the caption is required, and in a shard the file."""

    file: str
    caption: str
    style: str = ""
    label: str = ""
    group: str = ""
    subject: str = ""  # the part of the caption that names what is shown
    alt: str = ""  # another name of it
    keywords: tuple[str, ...] = ()
    caption_color: str = ""  # the caption with a colour
    unseen: bool = False  # held-out images: nothing of this subject is in the training shards

    @classmethod
    def of(cls, line: Any) -> Record:
        """A record from a line of captions.jsonl; unknown fields are ignored. Raises ValueError for other things."""
        caption = next((line[name] for name in TEXT_FIELDS if line.get(name) is not None), None) if isinstance(line, dict) else None
        if not isinstance(caption, str) or not caption.strip():
            raise ValueError(f"expected an object with a caption (or prompt, text), a string that is not empty; got {str(line)[:80]!r}")
        known = {field.name: line[field.name] for field in fields(cls) if line.get(field.name) is not None} | {"caption": caption}
        for name, value in known.items():
            kind, expected = KINDS.get(name, (str, "a string"))
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r:.80}; expected {expected}, or nothing")
        return cls(**{"file": "", **known, "keywords": tuple(map(str, known.get("keywords", ())))})

    @property
    def mirrored_alike(self) -> bool:
        """Whether the mirrored image still shows what the caption says: not signs, flags, clocks and directions."""
        sided = ("left", "right", "clock", "hand", "keycap", "thirty", "twelve", "button")
        return self.group not in ("Symbols", "Flags") and not any(word in self.label.lower() for word in sided)


def read_records(text: str, source: str) -> list[Record]:
    """The records of the lines of a text; empty ones are skipped. `source` is named in errors."""
    records = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold what `splitlines` takes for the end of a line
        if not line.strip():
            continue
        try:
            records.append(Record.of(json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{source}, line {number} is no JSON: {error}") from error
        except ValueError as error:
            raise DataError(f"{source}, line {number}: {error}") from error
    return records


def read_shard(shard: Path) -> tuple[list[Record], list[bytes]]:
    """The records of a shard and the bytes of their images."""
    try:
        with tarfile.open(regular(shard), "r:") as tar:
            members = {member.name.removeprefix("./"): member for member in tar if member.isfile()}
            if CAPTIONS not in members:
                raise DataError(f"{shard} holds no {CAPTIONS}: expected a tar file with that and the images it names")
            records = read_records(_content(tar, members[CAPTIONS]).decode(), f"{CAPTIONS} of {shard}")
            if absent := [record.file for record in records if record.file not in members]:
                raise DataError(f"{shard} lacks {len(absent)} images that its {CAPTIONS} names, such as {absent[0]!r}")
            images = {name: _content(tar, members[name]) for name in {record.file for record in records}}
            return records, [images[record.file] for record in records]
    except UnicodeDecodeError as error:
        raise DataError(f"{CAPTIONS} of {shard} is not UTF-8: {error}") from error
    except (OSError, ValueError, tarfile.TarError) as error:
        raise DataError(f"{shard} cannot be read as a tar file without compression: {error}") from error


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.issparse() or member.size > LARGEST_MEMBER:  # a sparse member may be any number of times as large as its shard
        raise DataError(
            f"{member.name!r} of {tar.name!r} must be a file of at most {LARGEST_MEMBER} bytes, not sparse; got {member.size} bytes. "
            "Write the shard again"
        )
    file = tar.extractfile(member)
    assert file is not None  # only regular files are asked for
    return file.read()
