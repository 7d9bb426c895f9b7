"""Fetches files: says what and how much, checks for room, goes on where an earlier attempt stopped, and checks what arrived."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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
    missing = [one for one in wanted if place.find(one.file, one.name) is None]
    if missing:
        left = sum(one.file.size - _arrived(place.partial(one.file)) for one in missing)
        require_room(place.root, left + extra_room)
        log.warning(announcement([one.file for one in missing], left, place.root))
    found = {one: _obtain(one, place) for one in sorted(wanted, key=lambda one: one.file.size)}
    return [found[one] for one in wanted]


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
            "nextscale download MODEL --to DIR, or HF_HOME"
        )


def _arrived(partial: Path) -> int:
    return partial.stat().st_size if partial.is_file() else 0


def _obtain(one: Wanted, place: Place) -> Path:
    file = one.file
    if (found := place.find(file, one.name)) is not None:
        return found
    with explained(str(file), file.repository):
        partial = place.partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as growing:
            fcntl.flock(growing, fcntl.LOCK_EX)  # of two programs that want the same file one fetches it
            if (found := place.find(file, one.name)) is not None:  # the other one did
                partial.unlink(missing_ok=True)
                return found
            _grow(growing, partial, file)
            return place.keep(file, one.name)


def _grow(growing: BinaryIO, partial: Path, file: RemoteFile) -> None:
    """Fetches the rest of a file. What a broken connection left is kept; content that is not what the hub announced is not."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    if _arrived(partial) > file.size:
        growing.truncate(0)
    url = hf_hub_url(file.repository, file.path, revision=file.revision)
    while (before := _arrived(partial)) < file.size:
        try:
            http_get(url, growing, resume_size=before, headers=build_hf_headers(), displayed_filename=file.path)
            growing.flush()
            break
        except Exception:  # not every version of the client takes up a broken connection by itself
            growing.flush()
            if _arrived(partial) <= before:
                raise
    if (arrived := _arrived(partial)) != file.size or _content_hash(partial, file) != file.etag:
        growing.truncate(0)
        raise DownloadError(
            f"{file} arrived with {arrived} bytes that are not the {file.size} that the hub announces. Fetch it again; "
            "if that changes nothing, a proxy or mirror (HF_ENDPOINT) serves something else"
        )


def _content_hash(path: Path, file: RemoteFile) -> str:
    with path.open("rb") as content:
        if file.is_large:
            return hashlib.file_digest(content, "sha256").hexdigest()
        return hashlib.sha1(b"blob %d\0" % file.size + content.read()).hexdigest()
