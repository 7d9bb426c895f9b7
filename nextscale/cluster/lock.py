"""A folder of its own for every shard that is at work, locked: temporary files lie there and nowhere else."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..errors import NextscaleError
from .shard import Shard

WORK = ".sample"  # inside the folder of images
LOCK = "lock"
SHARD_FOLDER = re.compile(r"\d+-of-\d+")  # others are not ours to remove
TRIES = 100  # of making a folder while runs that have just ended remove theirs


class FolderInUse(NextscaleError):
    """Another process writes the same images."""


@contextmanager
def working_folder(out: Path, shard: Shard) -> Iterator[Path]:
    """An empty folder for temporary files, which is this process's alone and gone at the end.

    The lock is released by the system when its process dies, so a killed run leaves only files that the next one of this shard removes.
    Where nothing can be written there is nothing to lock: the folder is then not made, and the images of `out` can be verified.
    """
    folder = out / WORK / shard.name
    if is_read_only(out):
        yield folder
        return
    lock = _locked(folder)
    if lock is None:
        owner = _owner(folder)
        raise FolderInUse(
            f"shard {shard.index}/{shard.count} of {out} is being written{owner}: wait until that ends, or start other shards with --shard"
        )
    try:
        _refuse_other_counts(out, shard)
        _empty(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
        with suppress(OSError):  # other shards are at work
            (out / WORK).rmdir()


def is_read_only(out: Path) -> bool:
    return out.is_dir() and not os.access(out, os.W_OK)


def _locked(folder: Path) -> IO[str] | None:
    """The locked file of a folder, which is made where there is none; None where another process holds it."""
    if links := [path for path in (folder.parent, folder, folder / LOCK) if path.is_symlink()]:
        raise NextscaleError(f"{links[0]} is a symbolic link, and files are removed there: remove the link, or choose another folder")
    tries = TRIES
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _lock(folder / LOCK)
        except OSError as error:
            tries -= 1
            if tries and isinstance(error, FileNotFoundError | FileExistsError):  # its last owner, or that of one beside it, removed it
                continue
            raise NextscaleError(f"{folder} cannot be made and locked ({error}): choose a folder on a file system with locks") from error


def _lock(path: Path) -> IO[str] | None:
    """The locked file; None where another process holds it. FileNotFoundError where its last owner removes it meanwhile."""
    try:
        import fcntl  # POSIX only
    except ImportError as error:
        raise NextscaleError("folders of images are locked by flock, which this system does not have: run `sample` on Linux") from error
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
            raise FileNotFoundError(errno.ENOENT, "removed and made again", str(path))
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        file.close()
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return file


def _owner(folder: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return f" by {(folder / LOCK).read_text(encoding='utf-8')}"
    return ""


def _refuse_other_counts(out: Path, shard: Shard) -> None:
    """Runs that split the work into another number of shards would do some of it twice; what dead ones left is removed."""
    for folder in (out / WORK).iterdir():
        is_of_a_shard = SHARD_FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if not is_of_a_shard or folder.name.endswith(f"-of-{shard.count}"):
            continue
        lock = _locked(folder)
        if lock is None:
            raise FolderInUse(
                f"{out} is being written in another number of shards, {folder.name}{_owner(folder)}: wait, or use the same number of shards"
            )
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name == LOCK:
            continue
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)
