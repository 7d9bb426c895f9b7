"""The parts of a model that are published: where they lie on this machine, and which files of the hub they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from ..checkpoints.files import INDEX_SUFFIX, indexed_shards
from ..errors import CheckpointError, DownloadError
from ..hub import RemoteFile, Wanted, cached_snapshot, matching
from ..io import home
from ..text.encoder import TextEncoder
from ..text.files import EncoderFiles
from .config_file import CONFIG_NAME
from .presets import ModelSpec, Source, TextSource

KINDS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
"""Endings of weights, those first that are fetched where a folder has several."""


class Part(Protocol):
    """Something that a model needs and that is published on its own."""

    @property
    def what(self) -> str:
        """As messages name it."""
        ...

    @property
    def repository(self) -> str: ...

    def require_known(self) -> None:
        """DownloadError where the publication does not say which files it is."""
        ...

    def below(self, root: Path) -> Path | None:
        """The part in a folder such as NEXTSCALE_HOME names, if it is whole."""
        ...

    def cached(self) -> Path | None:
        """The part in the hub's cache, if it is whole."""
        ...

    def select(self, files: Sequence[RemoteFile]) -> list[Wanted]:
        """The files of the repository that are needed, and no others."""
        ...


@dataclass(frozen=True)
class Weights:
    """A file or a folder of weights."""

    what: str
    source: Source

    @property
    def repository(self) -> str:
        return self.source.repository

    def below(self, root: Path) -> Path | None:
        return whole(root / self.source.local)

    def cached(self) -> Path | None:
        snapshot = cached_snapshot(self.repository) if self.source.file else None
        found = None if snapshot is None else whole(snapshot / self.source.file)
        if found is not None and found.is_dir() and self.source.only and not (found / self.source.only).is_file():
            return None  # another program has fetched other weights of that folder
        return found

    def require_known(self) -> None:
        if not self.source.file:
            raise DownloadError(
                f"{self.what}: its publication names no file. Choose it at {self.source.url} and save it as "
                f"{home() / self.source.local}, or pass its path"
            )

    def select(self, files: Sequence[RemoteFile]) -> list[Wanted]:
        by_path = {file.path: file for file in files}
        if self.source.file in by_path:
            return [Wanted(by_path[self.source.file], self.source.local)]
        inside = {PurePosixPath(path).name: file for path, file in by_path.items() if str(PurePosixPath(path).parent) == self.source.file}
        needed = self._needed_inside(list(inside))
        if not needed:
            raise DownloadError(
                f"{self.what}: {self.repository} no longer has {self.source.file}. See what is published at "
                f"https://huggingface.co/{self.repository}, fetch it by hand and pass its path"
            )
        return [Wanted(inside[name], f"{self.source.local}/{name}") for name in needed]

    def _needed_inside(self, names: Sequence[str]) -> list[str]:
        """The configuration, and of several formats of the same weights one."""
        kind = next((kind for kind in KINDS if any(name.endswith(kind) for name in names)), None)
        if kind is None:
            return []
        weights = [name for name in names if name.endswith((kind, kind + INDEX_SUFFIX))]
        return [name for name in (CONFIG_NAME, *([self.source.only] if self.source.only in names else weights)) if name in names]


@dataclass(frozen=True)
class EncoderPart:
    """A text encoder, which is a folder."""

    what: str
    repository: str
    files: EncoderFiles

    def require_known(self) -> None:
        pass

    @property
    def name(self) -> str:
        return PurePosixPath(self.repository).name

    def below(self, root: Path) -> Path | None:
        return self._whole(root / self.name)

    def cached(self) -> Path | None:
        snapshot = cached_snapshot(self.repository)
        return None if snapshot is None else self._whole(snapshot)

    def _whole(self, folder: Path) -> Path | None:
        return folder if folder.is_dir() and not self.files.absent(folder) else None

    def select(self, files: Sequence[RemoteFile]) -> list[Wanted]:
        return [Wanted(file, f"{self.name}/{file.path}") for file in matching(files, self.files.downloaded)]


def whole(path: Path) -> Path | None:
    """A file of weights, or a folder that has all its shards, if it is there; the file that it was converted to comes first."""
    if (converted := converted_file(path)).is_file():
        return converted
    if not path.is_dir():
        return path if os.path.exists(path) else None
    try:
        for index in path.glob(f"*{INDEX_SUFFIX}"):
            indexed_shards(index)  # raises where one is absent
    except CheckpointError:
        return None
    return path if any(file.suffix in KINDS for file in path.iterdir()) else None


def converted_file(path: Path) -> Path:
    """Where the safetensors file lies that was made of a file or a folder of weights."""
    stem = path.stem if path.suffix in KINDS else path.name
    return path.with_name(f"{stem}.safetensors")


def weight_parts(spec: ModelSpec) -> list[Weights]:
    """The published parts that hold weights; without those that come with the package or are not released."""
    sources = {f"weights of {spec.name}": spec.weights, f"tokenizer of {spec.name}": spec.tokenizer_weights}
    return [Weights(what, source) for what, source in sources.items() if isinstance(source, Source)]


def encoder_part(spec: ModelSpec) -> EncoderPart | None:
    source = spec.text_encoder
    files = None if source is None else encoder_files(source)
    if source is None or files is None or not isinstance(source.origin, str):
        return None
    return EncoderPart(f"text encoder of {spec.name}", source.origin, files)


def encoder_files(source: TextSource) -> EncoderFiles | None:
    """None for an encoder that comes with the package."""
    encoder = source.encoder
    return encoder.files if isinstance(encoder, type) and issubclass(encoder, TextEncoder) else None


def encoder_bytes(spec: ModelSpec) -> int:
    """Bytes of the text encoder's weights on a GPU; 0 where there is none, or where one comes with the package and is small."""
    encoder = None if spec.text_encoder is None else spec.text_encoder.encoder
    return encoder.cuda_bytes if isinstance(encoder, type) and issubclass(encoder, TextEncoder) else 0
