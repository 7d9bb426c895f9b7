"""Lock on the folder of a shard's temporary files."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import NextscaleError
from ..io import write_errors
from .shard import Shard

WORK = ".sample"  # inside the folder of images
SHARD_NAME = re.compile(r"\d+-of-\d+")
LOCK_SECONDS = 0.2  # until an ending run has removed its lock
TRIES = 100  # to create a folder that ending runs remove


class FolderInUse(NextscaleError):
    """Error if another process writes the same images."""


@contextmanager
def working_folder(out: Path, shard: Shard) -> Iterator[Path]:
    """Yields a folder that only this process uses, and removes it at the end.

    The system releases the lock of a process that dies; the next run of the shard removes its files. A read-only `out` is neither locked
    nor changed, so that its images can still be verified.
    """
    folder = out / WORK / shard.name
    if is_read_only(out):
        yield folder
        return
    try:
        with _locked(folder, f"shard {shard.index}/{shard.count} of {out}", "Wait, or start other shards with --shard."):
            for name in sorted({path.name.removesuffix(".lock") for path in folder.parent.iterdir()}):  # removes folders of dead runs
                other = folder.with_name(name)
                if SHARD_NAME.fullmatch(name) and not name.endswith(f"-of-{shard.count}") and not other.is_symlink():
                    with _locked(other, f"{out}, in another number of shards ({name}),", "Wait, or use the same number of shards."):
                        pass
            yield folder
    finally:
        with suppress(OSError):  # other shards run
            (out / WORK).rmdir()


def is_read_only(out: Path) -> bool:
    return out.is_dir() and not os.access(out, os.W_OK)


@contextmanager
def _locked(folder: Path, name: str, remedy: str) -> Iterator[None]:
    """Locks and empties a folder, and removes it with its lock at the end."""
    file, owner = folder.with_name(f"{folder.name}.lock"), folder / "owner"
    if links := [path for path in (folder.parent, folder, file) if path.is_symlink()]:
        raise NextscaleError(
            f"{links[0]} is a symbolic link in a folder whose files are removed. Remove the link, or choose another folder."
        )
    lock = FileLock(file)
    for left in reversed(range(TRIES)):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(LOCK_SECONDS, poll_interval=0.01)
            if not isinstance(lock, FileLock):  # filelock's fallback outlives a process that is killed
                lock.release()
                raise NotImplementedError("no locks")
            break
        except Timeout as error:
            by = f" by {owner.read_text(encoding='utf-8')}" if owner.is_file() else ""
            raise FolderInUse(f"{name} is being written{by}. {remedy}") from error
        except (OSError, NotImplementedError) as error:
            if not left or not isinstance(error, FileNotFoundError | FileExistsError):
                raise NextscaleError(f"{folder} cannot be locked ({error}). Choose a folder on a file system with locks.") from error
    try:
        with write_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # Windows removes it on release
            file.unlink()
        lock.release()
