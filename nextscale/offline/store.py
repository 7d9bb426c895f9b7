"""Folder of the images of a run. Files are written atomically, each with a line in the manifest."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..errors import NextscaleError, SettingError
from ..io import encode_image, write_errors
from .lock import is_read_only
from .manifest import Entry, manifest_files, read_manifest
from .plan import Batch, Picture
from .shard import Shard

PER_SIZE = ("stages", "chosen")  # settings that differ within a run
WRITERS = min(16, os.cpu_count() or 1)  # threads; each takes about 12 ms for a PNG of 512 x 512 pixels and releases the interpreter


@dataclass(frozen=True)
class Encoded:
    """An encoded image."""

    content: bytes
    sha256: str
    size: tuple[int, int]

    @staticmethod
    def of(image: Image.Image, suffix: str) -> Encoded:
        buffer = io.BytesIO()
        encode_image(image, buffer, suffix)
        content = buffer.getvalue()
        return Encoded(content, hashlib.sha256(content).hexdigest(), (image.height, image.width))


class Store:
    """Folder `out` for one shard, with the locked folder `work` for temporary files.

    settings: of all images; images with other settings are not touched. versions: of programs and machine. chosen: the method selected
    by `auto`, by `Picture.stages`.
    """

    def __init__(
        self,
        out: Path,
        work: Path,
        shard: Shard,
        settings: Mapping[str, Any],
        versions: Mapping[str, Any],
        chosen: Mapping[str, str] | None = None,
    ) -> None:
        self.out, self._work, self.shard = out, work, shard
        self._settings, self._versions, self._chosen = settings, versions, chosen or {}
        self._manifest = out / ("manifest.jsonl" if shard.count == 1 else f"manifest-{shard.name}.jsonl")

    def read(self, batches: Sequence[Batch]) -> list[tuple[Path, Entry]]:
        """Returns the entries of all manifests with the manifests' paths. Raises SettingError if one belongs to another run.

        batches: of all shards.
        """
        planned = {picture.file: picture for batch in batches for picture in batch.pictures}
        lines = [(file, entry) for file in manifest_files(self.out) for entry in read_manifest(file)]
        for file, entry in lines:
            self._require_same(planned.get(entry.file), entry, file)
        return lines

    def verified(self, batches: Sequence[Batch]) -> set[str]:
        """Returns the names of the shard's complete pictures.

        If some are missing, rewrites its manifest with the complete ones. batches: of all shards.
        """
        planned = {picture.file for batch in self.shard.part(batches) for picture in batch.pictures}
        lines = self.read(batches)
        asked = [(file, entry) for file, entry in lines if entry.file in planned]
        with ThreadPoolExecutor(WRITERS) as threads:
            whole = threads.map(lambda one: one[1].matches(self.out), asked)
            good = {entry.file: (file, entry) for (file, entry), matches in zip(asked, whole, strict=True) if matches}
        kept = [entry for file, entry in good.values() if file == self._manifest]
        self._warn_of_versions(entry for _, entry in good.values())
        if not (lacking := len(planned - good.keys())):
            return planned  # and nothing is written
        if is_read_only(self.out):
            raise NextscaleError(f"{self.out} is read-only and lacks {lacking} images. Choose a writable folder.")
        others = [entry for file, entry in lines if file == self._manifest and entry.file not in planned]
        self._rewrite([*others, *kept])
        return {*good}

    def write(self, picture: Picture, image: Encoded, **versions: Any) -> Entry:
        """Writes the file, without its line in the manifest; thread-safe. versions: of this image only."""
        self._put(self.out / picture.file, image.content)
        settings, versions = self._settings_of(picture), {**self._versions, **versions}
        return Entry(picture.file, picture.id, picture.prompt, picture.seed, image.size, settings, image.sha256, versions, picture.original)

    def record(self, entry: Entry) -> None:
        """Appends the line of a written image."""
        with write_errors(self._manifest), self._manifest.open("ab", buffering=0) as lines:
            line, end = entry.line.encode(), lines.tell()
            try:
                if lines.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                lines.truncate(end)  # half a line would make the manifest unreadable
                raise

    def arrange(self, batches: Sequence[Batch]) -> None:
        """Sorts the shard's manifest into the order of the plan."""
        order = {picture.file: number for number, picture in enumerate(picture for batch in batches for picture in batch.pictures)}
        self._rewrite(sorted(read_manifest(self._manifest), key=lambda entry: order.get(entry.file, -1)))

    def _rewrite(self, entries: Iterable[Entry]) -> None:
        self._put(self._manifest, "".join(entry.line for entry in entries).encode(), lasting=True)

    def _put(self, file: Path, content: bytes, lasting: bool = False) -> None:
        """Writes a file atomically. lasting: syncs it first, since a manifest emptied by a power failure would cost all images."""
        temporary = self._work / file.name
        with write_errors(file):
            with temporary.open("wb") as target:
                target.write(content)
                if lasting:
                    target.flush()
                    os.fsync(target.fileno())
            os.replace(temporary, file)

    def _settings_of(self, picture: Picture) -> dict[str, Any]:
        chosen = {"chosen": self._chosen[picture.stages]} if picture.stages in self._chosen else {}
        return {**self._settings, **chosen, "stages": picture.stages}

    def _require_same(self, picture: Picture | None, entry: Entry, file: Path) -> None:
        if picture is None:  # of other prompts
            ours, theirs = {**self._settings}, {name: value for name, value in entry.settings.items() if name not in PER_SIZE}
        else:
            ours = {"prompt": picture.prompt, "seed": picture.seed, **self._settings_of(picture)}
            theirs = {"prompt": entry.prompt, "seed": entry.seed, **entry.settings}
        if self.shard.count > 1 and file.name.endswith(
            f"-of-{self.shard.count}.jsonl"
        ):  # with other batches no shard would generate some images
            ours["batch"], theirs["batch"] = self._versions.get("batch"), entry.versions.get("batch")
        for name in {**theirs, **ours}:
            if ours.get(name) != theirs.get(name):
                raise SettingError(
                    f"{file} says that {entry.file} has {name} {theirs.get(name)!r}; this run has {ours.get(name)!r}."
                    f" Choose another folder, or the settings of the existing images."
                )

    def _warn_of_versions(self, entries: Iterable[Entry]) -> None:
        differing = {
            name: (value, self._versions.get(name))
            for entry in entries
            for name, value in entry.versions.items()
            if value != self._versions.get(name, value)  # devices of a cluster are unknown here
        }
        if differing:
            told = ", ".join(f"{name} {theirs!r}, now {ours!r}" for name, (theirs, ours) in differing.items())
            warnings.warn(
                f"images in {self.out} were generated with other versions ({told}). New images may differ from them by rounding.",
                stacklevel=3,
            )
