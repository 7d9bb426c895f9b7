"""Files from the Hugging Face hub, verified and stored in the hub's cache or in a folder. Start at `download`."""

import errno
import fnmatch
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PureWindowsPath
from types import ModuleType
from typing import Any

from ..errors import DownloadError, MissingExtra, NextscaleError
from ..io import write_text
from ..serialization import from_plain, listed, read_json

log = logging.getLogger(__name__)

COMMIT = re.compile("[0-9a-f]{40}")
HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
RECORD = "downloads.json"
WORK = ".nextscale"  # subfolder for unfinished files


@dataclass(frozen=True)
class RemoteFile:
    repository: str
    revision: str  # the commit
    path: str
    size: int
    hash: str  # SHA-256 of a large file, git SHA-1 of a small one

    def matches(self, path: Path) -> bool:
        """Returns True if a file has the announced size and content; reads the whole file."""
        if not os.path.isfile(path) or path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if len(self.hash) == 64 else hashlib.sha1(b"blob %d\0" % self.size)
        with path.open("rb") as content:
            return hashlib.file_digest(content, lambda: digest).hexdigest() == self.hash

    def __str__(self) -> str:
        return f"{self.repository}/{self.path}"


class HubCache:
    """The hub's shared cache (HF_HOME, HF_HUB_CACHE): blobs by content, and links by revision and name."""

    def __init__(self) -> None:
        hub_package()
        from huggingface_hub import constants

        self.root = Path(constants.HF_HUB_CACHE).expanduser()

    def folder(self, repository: str) -> Path:
        return self.root / f"models--{repository.replace('/', '--')}"

    def find(self, file: RemoteFile, name: str) -> Path | None:
        """Returns the path of a complete file, or None."""
        path, blob = self._places(file)
        if not path.is_file() and file.matches(blob):
            self._link(blob, path)
        return path if path.is_file() else None

    def keep(self, arrived: Path, file: RemoteFile, name: str) -> Path:
        """Moves a verified file into the cache. The hub's library would name the blob after an HTTP header, which is not trusted."""
        path, blob = self._places(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        os.replace(arrived, blob)
        self._link(blob, path)
        write_text(file.revision, self.folder(file.repository) / "refs" / "main")
        return path

    def _places(self, file: RemoteFile) -> tuple[Path, Path]:
        folder = self.folder(file.repository)
        return folder / "snapshots" / file.revision / file.path, folder / "blobs" / file.hash

    def _link(self, blob: Path, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # possibly a link to a deleted blob
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # the file system has no symbolic links
            os.replace(blob, path)


class Folder:
    """A folder with the files under the names that `load` expects, and a record of their origin."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, repository: str) -> Path:
        return self.root

    def find(self, file: RemoteFile, name: str) -> Path | None:
        if not file.matches(self.root / name):
            return None
        with suppress(NextscaleError):  # a read-only disk
            self._record(file, name)
        return self.root / name

    def keep(self, arrived: Path, file: RemoteFile, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(arrived, path)
        self._record(file, name)
        return path

    def has_changed(self, name: str) -> bool:
        """Returns True if a recorded file no longer has its downloaded content."""
        try:
            file = from_plain(RemoteFile, self._records()[name], name)
        except (KeyError, ValueError):
            return False
        return not file.matches(self.root / name)

    def _records(self) -> dict[str, Any]:
        with suppress(ValueError):
            found = read_json(self.root / RECORD)
            return found if isinstance(found, dict) else {}
        return {}

    def _record(self, file: RemoteFile, name: str) -> None:
        records = self._records()
        if records.get(name) != asdict(file):
            write_text(json.dumps(dict(sorted((records | {name: asdict(file)}).items())), indent=2) + "\n", self.root / RECORD)


def hub_package() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra("downloads need the package 'huggingface_hub': pip install 'nextscale[hub]'.") from error
    return huggingface_hub


def cached_snapshot(repository: str) -> Path | None:
    """Returns the folder of the last downloaded revision in the hub's cache, or None."""
    try:
        folder = HubCache().folder(repository)
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (MissingExtra, OSError, UnicodeDecodeError):
        return None
    found = folder / "snapshots" / revision
    return found if COMMIT.fullmatch(revision) and found.is_dir() else None


def list_files(repository: str, patterns: Sequence[str] = ("*",)) -> list[RemoteFile]:
    """Returns the files of a repository's latest revision that match any pattern. HF_ENDPOINT sets the hub."""
    with explained(repository, repository):
        info = hub_package().HfApi().model_info(repository, files_metadata=True)
        if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
            raise DownloadError(f"revision of {repository} must be a commit hash; got {info.sha!r:.80}. Check HF_ENDPOINT.")
        files = [_remote_file(repository, info.sha, sibling) for sibling in info.siblings or ()]
        return [file for file in files if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)]


def _remote_file(repository: str, revision: str, sibling: Any) -> RemoteFile:
    """Returns a file after checking its name, hash and size, because they become local paths."""
    path, large = sibling.rfilename, sibling.lfs
    pure = PureWindowsPath(path)  # Windows rules also cover POSIX names
    if pure.anchor or ".." in pure.parts or not pure.parts or not path.isprintable():
        raise DownloadError(f"{repository} lists a file with an unsafe name: {path!r}. Check HF_ENDPOINT.")
    size, digest = (large.size, large.sha256) if large else (sibling.size, sibling.blob_id)
    if type(size) is not int or not 0 <= size < 2**63 or not isinstance(digest, str) or not HASH.fullmatch(digest):
        raise DownloadError(f"{repository} lists {path!r} without a size and a hash. Check HF_ENDPOINT.")
    return RemoteFile(repository, revision, path, size, digest)


def download(wanted: Mapping[RemoteFile, str], place: HubCache | Folder, extra_room: int = 0) -> list[Path]:
    """Downloads the files that `place` does not have yet, small ones first. Returns the path of each.

    Args:
        wanted: files, and their names relative to the folder of all weights.
        extra_room: bytes that must remain free afterwards.
    """
    found = {file: place.find(file, name) for file, name in wanted.items()}
    missing = sorted((file for file, path in found.items() if path is None), key=lambda file: file.size)
    if missing:
        size = sum(file.size for file in missing)
        require_room(place.root, size + extra_room)
        named = listed([f"{file} ({size_text(file.size)})" for file in missing])
        log.warning("downloading %s to %s: %s", size_text(size), place.root, named)
    return [path or _obtain(file, wanted[file], place) for file, path in sorted(found.items(), key=lambda item: item[0].size)]


def snapshot(repository: str, patterns: Sequence[str]) -> Path:
    """Returns a repository's folder in the hub's cache after downloading all files that match and are missing."""
    files = list_files(repository, patterns)
    if not files:
        raise DownloadError(f"{repository} has no files matching {', '.join(patterns)}. See https://huggingface.co/{repository}.")
    cache = HubCache()
    download({file: file.path for file in files}, cache)
    return cache.folder(repository) / "snapshots" / files[0].revision


def size_text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"


def require_room(folder: Path, needed: int) -> None:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DownloadError(
            f"disk of {folder} must have {size_text(needed)} free; got {size_text(free)}. "
            "Free some space, or choose another disk with nextscale download -m MODEL --to FOLDER, or HF_HOME."
        )


def _obtain(file: RemoteFile, name: str, place: HubCache | Folder) -> Path:
    """Downloads a file into a work folder, verifies its content, and moves it to its place."""
    from filelock import FileLock

    work = place.folder(file.repository) / WORK
    with explained(str(file), file.repository):
        work.mkdir(parents=True, exist_ok=True)
        with FileLock(work / "lock"):  # only one process downloads a file
            if (path := place.find(file, name)) is not None:
                return path
            local = work / "files"
            arrived = Path(hub_package().hf_hub_download(file.repository, file.path, revision=file.revision, local_dir=local))
            if not file.matches(arrived):
                arrived.unlink()
                raise DownloadError(
                    f"{file} must have the size and hash that the hub announced; the downloaded content differs. "
                    "Download it again, and check proxies and mirrors (HF_ENDPOINT)."
                )
            path = place.keep(arrived, file, name)
            shutil.rmtree(local, ignore_errors=True)
            return path


@contextmanager
def explained(what: str, repository: str) -> Iterator[None]:
    """Converts errors of the hub's client to DownloadError with a remedy."""
    try:
        yield
    except NextscaleError:
        raise
    except Exception as error:  # the client also raises errors of its HTTP package
        raise DownloadError(f"{what} could not be downloaded: {_meaning(error, f'https://huggingface.co/{repository}')}") from error


def _meaning(error: BaseException, page: str) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    causes = [error, *filter(None, (error.__cause__, error.__context__))]
    status = next((code for cause in causes if (code := getattr(getattr(cause, "response", None), "status_code", None))), None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set. Unset it, or place the files manually."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full. Free some space and try again."
    if status in (401, 403):
        return f"HTTP {status}. Accept the terms at {page} if there are any, and set HF_TOKEN to a token with read access."
    if status == 404:
        return f"HTTP 404. See the published files at {page}, download them manually and pass their path."
    if status is not None:
        return f"HTTP {status}. Try again later."
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(error)).split())
    return f"{type(error).__name__}: {text}. Check the connection and HF_ENDPOINT, then try again."
