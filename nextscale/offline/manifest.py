"""The manifest of a folder of images: one JSON line per image."""

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
    """One image: its request, its settings and its file."""

    file: str
    id: str
    prompt: str | int
    seed: int
    size: tuple[int, int]  # height and width in pixels
    settings: dict[str, Any]  # that the image depends on, besides the above
    sha256: str  # of the file
    versions: dict[str, Any]  # of programs and machine; others change an image by rounding only
    original: str | None = None  # of which the prompt was rewritten

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
    """Reads the entries. Ignores a last line that a killed process left unfinished; any other line that is no entry is an error."""
    try:
        lines = regular(file).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise NextscaleError(f"the manifest {file} cannot be read ({error}): check its permissions, or choose another folder") from error
    entries = []
    for line in lines:
        try:
            entries.append(from_plain(Entry, parse_json(line), "entry"))
        except ValueError as error:
            number = len(entries) + 1
            raise NextscaleError(
                f"{file}, line {number} is no line of a manifest ({error}): move it away, or choose another folder"
            ) from error
    return entries


def read_folder(folder: Path) -> dict[str, Entry]:
    """Reads all manifests of a folder: entries by file name; of two for one image the one that its file matches."""
    if not (files := manifest_files(folder)):
        raise NextscaleError(f"{folder} holds no {PATTERN}: give a folder that `nextscale sample` wrote")
    found: dict[str, Entry] = {}
    for entry in (entry for file in files for entry in read_manifest(file)):
        known = found.get(entry.file)
        if known is None or (known.sha256 != entry.sha256 and entry.matches(folder)):
            found[entry.file] = entry
    return found
