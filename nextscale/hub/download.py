"""Fetches files: says what and how much, checks for room, goes on where an earlier attempt stopped, and checks what arrived."""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DownloadError
from .places import HubCache, Place
from .remote import RemoteFile, explained, listing, matching

log = logging.getLogger(__name__)
FILES_NAMED = 6


@dataclass(frozen=True)
class Wanted:
    file: RemoteFile
    name: str  # below the folder of all weights


def download(wanted: Sequence[Wanted], place: Place, extra_room: int = 0) -> list[Path]:
    """Fetches what `place` does not have yet, small files first; one path for each. `extra_room`: bytes that must be left after it."""
    paths = {one: path for one in wanted if (path := place.find(one.file, one.name)) is not None}
    missing = [one for one in dict.fromkeys(wanted) if one not in paths]
    if missing:
        left = sum(one.file.size - _arrived(place.partial(one.file)) for one in missing)
        require_room(place.root, left + extra_room)
        log.warning(announcement([one.file for one in missing], left, place.root))
    paths |= {one: _obtain(one, place) for one in sorted(missing, key=lambda one: one.file.size)}
    return [paths[one] for one in wanted]


def snapshot(repository: str, patterns: Sequence[str]) -> Path:
    """The folder of a repository in the hub's cache, with all files that match, fetched where they are not there."""
    files = matching(listing(repository), patterns)
    if not files:
        raise DownloadError(f"{repository} has none of the files {', '.join(patterns)}. See https://huggingface.co/{repository}")
    paths = download([Wanted(file, file.path) for file in files], HubCache())
    return paths[0].parents[len(Path(files[0].path).parts) - 1]


def announcement(files: Sequence[RemoteFile], left: int, root: Path) -> str:
    shown = ", ".join(f"{file} ({size_text(file.size)})" for file in files[:FILES_NAMED])
    more = f" and {len(files) - FILES_NAMED} more" if len(files) > FILES_NAMED else ""
    return f"fetching {size_text(left)} into {root}: {shown}{more}"


def size_text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"


def require_room(folder: Path, needed: int) -> None:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DownloadError(
            f"{size_text(needed)} are needed in {folder}, {size_text(free)} are free. Make room, or choose another disk: "
            "nextscale download -m MODEL --to FOLDER, or HF_HOME"
        )


def _arrived(partial: Path) -> int:
    return partial.stat().st_size if partial.is_file() else 0


def _obtain(one: Wanted, place: Place) -> Path:
    from filelock import FileLock

    file = one.file
    with explained(str(file), file.repository):
        partial = place.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        lock = partial.with_suffix(".lock")
        with FileLock(lock):  # of two programs that want the same file one fetches it
            path = place.find(file, one.name)
            if path is None:
                _grow(partial, file)
                path = place.keep(file, one.name)
            partial.unlink(missing_ok=True)
            with suppress(OSError):  # Windows keeps open files
                lock.unlink()
        return path


class _Growing(io.BufferedWriter):
    """A file that is continued, up to the announced size."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        super().__init__(io.FileIO(path, "a"))
        self._file = file

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > self._file.size:
            raise _other_content(self._file, "more")
        return super().write(content)


def _grow(partial: Path, file: RemoteFile) -> None:
    """Fetches the rest of a file. What a broken connection left is kept; content that is not what the hub announced is not."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    if _arrived(partial) > file.size:
        partial.unlink()
    partial.touch()  # a file without content is not fetched
    url = hf_hub_url(file.repository, file.path, revision=file.revision)
    while (before := _arrived(partial)) < file.size:
        try:
            with _Growing(partial, file) as growing:
                http_get(url, growing, resume_size=before, headers=build_hf_headers(), displayed_filename=file.path)
            break
        except DownloadError:
            partial.unlink()
            raise
        except Exception:  # not every version of the client takes up a broken connection by itself
            if _arrived(partial) <= before:
                raise
    if not file.matches(partial):
        arrived = _arrived(partial)
        partial.unlink()
        raise _other_content(file, str(arrived))


def _other_content(file: RemoteFile, arrived: str) -> DownloadError:
    return DownloadError(
        f"{file} arrived with {arrived} bytes that are not the {file.size} that the hub announces. Fetch it again; "
        "if that changes nothing, a proxy or mirror (HF_ENDPOINT) serves something else"
    )
