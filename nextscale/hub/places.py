"""Where downloaded files are kept: the hub's own cache, or any folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol

from ..io import write_text
from .remote import COMMIT, RemoteFile

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
            revision = (folder / "refs" / BRANCH).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        found = folder / "snapshots" / revision
        return found if COMMIT.fullmatch(revision) and found.is_dir() else None

    def find(self, file: RemoteFile, name: str) -> Path | None:
        path = self._pointer(file)
        if os.path.isfile(path):
            return path
        return self._link(file) if file.matches(self._blob(file)) else None

    def partial(self, file: RemoteFile) -> Path:
        return self._blob(file).with_name(f"{file.etag}.incomplete")

    def keep(self, file: RemoteFile, name: str) -> Path:
        os.replace(self.partial(file), self._blob(file))
        return self._link(file)

    def _blob(self, file: RemoteFile) -> Path:
        return self._repository(file.repository) / "blobs" / file.etag

    def _pointer(self, file: RemoteFile) -> Path:
        return self._repository(file.repository) / "snapshots" / file.revision / file.path

    def _link(self, file: RemoteFile) -> Path:
        """Links the name in the snapshot to the blob. `hf_hub_download` would do so too, but it names the blob after a header of the hub's
        answer, which may be the path of any file."""
        blob, pointer = self._blob(file), self._pointer(file)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.unlink(missing_ok=True)  # a link to a blob that was deleted
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except OSError:  # no symbolic links on this file system
            os.replace(blob, pointer)
        write_text(file.revision, self._repository(file.repository) / "refs" / BRANCH)
        return pointer


class Folder:
    """A folder with the files under the names that `load` looks for, and a record of where they come from."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, file: RemoteFile, name: str) -> Path | None:
        path = self.root / name
        return path if path.is_file() and path.stat().st_size == file.size else None

    def partial(self, file: RemoteFile) -> Path:
        return self.root / f".{file.etag}.partial"

    def keep(self, file: RemoteFile, name: str) -> Path:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial(file), target)
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
