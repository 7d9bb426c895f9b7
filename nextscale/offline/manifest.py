"""What a folder of images says about itself: one JSON line per image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import NextscaleError

PATTERN = "manifest*.jsonl"


@dataclass(frozen=True)
class Entry:
    """One image: what was asked for, with which settings, and what came of it."""

    file: str
    id: str
    prompt: str | int
    seed: int
    size: tuple[int, int]  # height and width in pixels
    settings: Mapping[str, Any]  # what the image depends on, besides the above
    sha256: str  # of the file
    versions: Mapping[str, Any]  # of programs and machine; other ones give the same image but for rounding

    @property
    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    @staticmethod
    def of(line: str) -> Entry:
        """Raises ValueError for other things than a line of a manifest."""
        found = json.loads(line)
        if not isinstance(found, dict) or found.keys() != {field.name for field in fields(Entry)}:
            raise ValueError(f"expected an object with {', '.join(field.name for field in fields(Entry))}")
        if not isinstance(found["file"], str) or Path(found["file"]).name != found["file"]:
            raise ValueError(f"file is {found['file']!r:.80}; expected a name without folders")
        if other := [name for name in ("settings", "versions") if not isinstance(found[name], dict)]:
            raise ValueError(f"{other[0]} is {found[other[0]]!r:.80}; expected an object")
        entry = Entry(**found | {"size": tuple(found["size"])})
        entry.line.encode()  # which halves of characters do not allow
        return entry

    def matches(self, folder: Path) -> bool:
        """Whether the file is there, with the content that it was written with."""
        try:
            file = folder / self.file
            return file.is_file() and sha256_of(file) == self.sha256
        except OSError:
            return False


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def manifest_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN))


def read_manifest(file: Path) -> list[Entry]:
    """Its entries. A last line that a killed process left unfinished does not count; anything else that is no entry is an error."""
    return [*_entries(file)]


def read_folder(folder: Path) -> dict[str, Entry]:
    """The entries of all manifests of a folder by file name; of two for one image the one that its file matches."""
    if not (files := manifest_files(folder)):
        raise NextscaleError(f"{folder} holds no {PATTERN}: give a folder that `nextscale sample` wrote")
    found: dict[str, Entry] = {}
    for entry in (entry for file in files for entry in _entries(file)):
        known = found.get(entry.file)
        if known is None or (known.sha256 != entry.sha256 and entry.matches(folder)):
            found[entry.file] = entry
    return found


def as_text(entries: Iterable[Entry]) -> str:
    return "".join(entry.line for entry in entries)


def _entries(file: Path) -> Iterator[Entry]:
    if not file.is_file():  # a pipe may never end
        raise NextscaleError(f"the manifest {file} is not a regular file: move it away, or choose another folder")
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise NextscaleError(f"the manifest {file} cannot be read ({error}): check its permissions") from error
    for number, line in enumerate(lines[:-1], start=1):  # what comes after the last end of a line was not finished
        try:
            yield Entry.of(line.decode())
        except (ValueError, TypeError, RecursionError) as error:
            raise NextscaleError(
                f"{file}, line {number} is no line of a manifest ({error}): move it away, or choose another folder"
            ) from error
