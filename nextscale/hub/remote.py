"""What a repository of the hub holds, and what its refusals mean."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from types import ModuleType
from typing import Any

from ..errors import DownloadError, MissingExtra

COMMIT = re.compile("[0-9a-f]{40}")
HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
SHA256_DIGITS = 64
LARGEST = 2**63  # bytes
READ_AT_ONCE = 2**20  # bytes


@dataclass(frozen=True)
class RemoteFile:
    repository: str
    revision: str  # the commit
    path: str
    size: int
    etag: str  # names the content: SHA-256 of a large file, git's SHA-1 of a small one

    @property
    def is_large(self) -> bool:
        """Whether the hub stores it outside git."""
        return len(self.etag) == SHA256_DIGITS

    def matches(self, path: Path) -> bool:
        """Returns True if a file on this machine has the announced size and content. Reads it whole."""
        if not os.path.isfile(path) or path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.is_large else hashlib.sha1(b"blob %d\0" % self.size)
        with path.open("rb") as content:
            while some := content.read(READ_AT_ONCE):
                digest.update(some)
        return digest.hexdigest() == self.etag

    def __str__(self) -> str:
        return f"{self.repository}/{self.path}"


def hub_package() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra(
            "downloading needs the package 'huggingface_hub', which is not installed: pip install 'nextscale[hub]'"
        ) from error
    return huggingface_hub


def listing(repository: str) -> list[RemoteFile]:
    """Every file of a repository at its newest revision. Asks the hub that HF_ENDPOINT names."""
    hub = hub_package()
    with explained(repository, repository):
        info = hub.HfApi().model_info(repository, files_metadata=True)
        if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
            raise DownloadError(
                f"the revision of {repository} must be a commit hash; got {info.sha!r:.80}. Check that HF_ENDPOINT is a Hugging Face hub"
            )
        return [_remote_file(repository, info.sha, sibling) for sibling in info.siblings or ()]


def _remote_file(repository: str, revision: str, sibling: Any) -> RemoteFile:
    """Returns a file of the list. Refuses names, hashes and sizes of another form: they become paths on this machine."""
    path, large = sibling.rfilename, sibling.lfs
    pure = PureWindowsPath(path)  # Windows rules also cover POSIX names
    if pure.anchor or ".." in pure.parts or not pure.parts or not path.isprintable():
        raise DownloadError(f"{repository} lists a file {path!r}, outside its folder or not printable. Refused: check HF_ENDPOINT")
    size, etag = (large.size, large.sha256) if large else (sibling.size, sibling.blob_id)
    if type(size) is not int or not 0 <= size < LARGEST or not isinstance(etag, str) or not HASH.fullmatch(etag):
        raise DownloadError(f"{repository} lists {path!r} without a size and a hash. Check that HF_ENDPOINT is a Hugging Face hub")
    return RemoteFile(repository, revision, path, size, etag)


def matching(files: Iterable[RemoteFile], patterns: Sequence[str]) -> list[RemoteFile]:
    return [file for file in files if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)]


@contextmanager
def explained(what: str, repository: str) -> Iterator[None]:
    """Turns what the hub's client raises into a DownloadError that says what to do."""
    try:
        yield
    except DownloadError:
        raise
    except Exception as error:  # the client passes on errors of whichever HTTP package it uses
        raise DownloadError(f"{what} could not be fetched: {_meaning(error, repository)}") from error


def _meaning(error: Exception, repository: str) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    page = f"https://huggingface.co/{repository}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids it. Unset it, or put the files in place by hand"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full. Make room and try again: what has arrived is kept"
    if status in (401, 403):
        return (
            f"the hub refuses (HTTP {status}). Accept the terms at {page} if there are any, and set HF_TOKEN to a token that may read it; "
            "a repository that does not exist is refused in the same way"
        )
    if status == 404:
        return f"the hub has nothing there (HTTP 404). See what is published at {page}, fetch it by hand and pass its path"
    if status is not None:
        return f"the hub answers HTTP {status}. Try again later"
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(error)).split())
    return f"{type(error).__name__}: {text}. Check the connection and HF_ENDPOINT, then try again: what has arrived is kept"
