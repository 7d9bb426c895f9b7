"""Manifest of a folder of images, with one JSON line per image."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import NextscaleError
from ..io import regular
from ..serialization import from_plain, parse_json

PATTERN = "manifest*.jsonl"


@dataclass(frozen=True)
class Entry:
    """Manifest line of one image: its request, settings and file."""

    file: str
    id: str
    prompt: str | int
    seed: int
    size: tuple[int, int]  # height and width in pixels
    settings: dict[str, Any]  # all others that the image depends on
    sha256: str  # of the file
    versions: dict[str, Any]  # of programs and machine, which change an image by rounding only
    original: str | None = None  # the prompt before it was rewritten

    @property
    def line(self) -> str:
        return json.dumps({name: value for name, value in vars(self).items() if value is not None}, ensure_ascii=False) + "\n"

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file:
            raise ValueError(f"file must be a name without folders; got {self.file!r:.80}")
        self.line.encode()  # fails for surrogates

    def matches(self, folder: Path) -> bool:
        """Returns True if the file has the content that was written."""
        with suppress(OSError):
            return (folder / self.file).is_file() and sha256_of(folder / self.file) == self.sha256
        return False


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def manifest_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(PATTERN))


def read_manifest(file: Path) -> list[Entry]:
    """Reads the entries. Ignores an unfinished last line of a killed process; any other invalid line is an error."""
    try:
        lines = regular(file).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise NextscaleError(f"the manifest {file} cannot be read ({error}). Check its permissions, or choose another folder.") from error
    entries = []
    for line in lines:
        try:
            entries.append(from_plain(Entry, parse_json(line), "entry"))
        except ValueError as error:
            number = len(entries) + 1
            raise NextscaleError(
                f"{file}, line {number} is not a line of a manifest ({error}). Move the file away, or choose another folder."
            ) from error
    return entries


def read_folder(folder: Path) -> dict[str, Entry]:
    """Reads all manifests of a folder into entries by file name. Of two entries for one file, the one that matches its content is used."""
    if not (files := manifest_files(folder)):
        raise NextscaleError(f"{folder} has no {PATTERN}. Give a folder that `nextscale sample` wrote.")
    found: dict[str, Entry] = {}
    for entry in (entry for file in files for entry in read_manifest(file)):
        known = found.get(entry.file)
        if known is None or (known.sha256 != entry.sha256 and entry.matches(folder)):
            found[entry.file] = entry
    return found
