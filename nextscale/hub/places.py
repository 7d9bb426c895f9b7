"""Where downloaded files are kept: the hub's own cache, or any folder."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..io import write_text
from .remote import RemoteFile, explained, hub_package

RECORD = "downloads.json"
BRANCH = "main"


class Place(Protocol):
    """`name` is the path that a file is to have below the folder of all weights."""

    @property
    def root(self) -> Path: ...

    def find(self, file: RemoteFile, name: str) -> Path | None:
        """The whole file, if it is there."""
        ...

    def partial(self, file: RemoteFile) -> Path:
        """Where the file grows while it is fetched; what is there from an earlier attempt counts."""
        ...

    def keep(self, file: RemoteFile, name: str) -> Path:
        """Gives the finished partial file its name, and records the revision."""
        ...


class HubCache:
    """The cache that all programs of the hub share (HF_HOME, HF_HUB_CACHE): blobs by content, links by revision and name."""

    def __init__(self) -> None:
        from huggingface_hub import constants

        self.root = Path(constants.HF_HUB_CACHE).expanduser()

    def _repository(self, name: str) -> Path:
        return self.root / f"models--{name.replace('/', '--')}"

    def snapshot(self, repository: str) -> Path | None:
        """The folder of the newest revision that was fetched."""
        folder = self._repository(repository)
        try:
            found = folder / "snapshots" / (folder / "refs" / BRANCH).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        return found if found.is_dir() else None

    def find(self, file: RemoteFile, name: str) -> Path | None:
        path = self._repository(file.repository) / "snapshots" / file.revision / file.path
        return path if path.is_file() else None

    def partial(self, file: RemoteFile) -> Path:
        blob = self._repository(file.repository) / "blobs" / file.etag
        return blob if blob.is_file() else blob.with_name(f"{file.etag}.incomplete")  # a whole one may lack its link only

    def keep(self, file: RemoteFile, name: str) -> Path:
        partial = self.partial(file)
        os.replace(partial, partial.with_name(file.etag))
        with explained(str(file), file.repository):  # finds the blob, so that only the link is left to make
            return Path(hub_package().hf_hub_download(file.repository, file.path, revision=BRANCH))


class Folder:
    """A folder with the files under the names that `load` looks for, and a record of where they come from."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, file: RemoteFile, name: str) -> Path | None:
        path = self.root / name
        return path if path.is_file() and path.stat().st_size == file.size else None

    def partial(self, file: RemoteFile) -> Path:
        return self.root / ".partial" / file.etag

    def keep(self, file: RemoteFile, name: str) -> Path:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial(file), target)
        with suppress(OSError):  # others are still growing there
            self.partial(file).parent.rmdir()
        self._record(file, name)
        return target

    def _record(self, file: RemoteFile, name: str) -> None:
        record = self.root / RECORD
        try:
            known = json.loads(record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        entry = {"repository": file.repository, "path": file.path, "revision": file.revision, "size": file.size, "hash": file.etag}
        known = (known if isinstance(known, dict) else {}) | {name: entry}
        write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n", record)


def cached_snapshot(repository: str) -> Path | None:
    """What the hub's cache has of a repository; None without it, or without the hub's package."""
    try:
        return HubCache().snapshot(repository)
    except ImportError:
        return None
