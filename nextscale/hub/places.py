"""Where downloaded files are kept: the hub's own cache, or any folder."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..errors import NextscaleError
from ..io import regular, write_text
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
            revision = regular(folder / "refs" / BRANCH).read_text(encoding="utf-8").strip()
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
    """A folder with the files under the names that `load` looks for, and a record of where they come from and when they last changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, file: RemoteFile, name: str) -> Path | None:
        """Returns the file if its content is as announced. Reads it once; the record then says that it did not change since."""
        path = self.root / name
        if not path.is_file():
            return None
        if self._records().get(name) != _entry(file, path):
            if not file.matches(path):
                return None
            with suppress(NextscaleError):  # a read-only disk
                self._record(file, name)
        return path

    def is_as_fetched(self, name: str) -> bool | None:
        """Returns True if a file has the content that was fetched, None if the record does not have it."""
        try:
            entry = self._records()[name]
            file = RemoteFile(entry["repository"], entry["revision"], entry["path"], entry["size"], str(entry["hash"]))
        except (KeyError, TypeError):
            return None
        return self.find(file, name) is not None

    def partial(self, file: RemoteFile) -> Path:
        return self.root / f".{file.etag}.partial"

    def keep(self, file: RemoteFile, name: str) -> Path:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial(file), target)
        self._record(file, name)
        return target

    def _records(self) -> dict[str, Any]:
        try:
            known = json.loads(regular(self.root / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _record(self, file: RemoteFile, name: str) -> None:
        known = self._records() | {name: _entry(file, self.root / name)}
        write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n", self.root / RECORD)


def _entry(file: RemoteFile, path: Path) -> dict[str, Any]:
    now = path.stat()
    origin = {"repository": file.repository, "path": file.path, "revision": file.revision, "hash": file.etag}
    return origin | {"size": now.st_size, "modified": now.st_mtime_ns}


def cached_snapshot(repository: str) -> Path | None:
    """What the hub's cache has of a repository; None without it, or without the hub's package."""
    try:
        return HubCache().snapshot(repository)
    except ImportError:
        return None
