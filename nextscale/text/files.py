"""The files of a text encoder: which there have to be, and where to find them on this machine or on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..checkpoints.files import shard_names
from ..checkpoints.hub import cached_snapshot, snapshot
from ..errors import CheckpointError, DownloadError, MissingExtra, TextEncoderUnavailable
from ..io import expanded

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_WEIGHTS_SHARDS = "model-*.safetensors"


@dataclass(frozen=True)
class EncoderFiles:
    """What one kind of text encoder is read from, by the names in its published folder."""

    kind: str  # as messages name it
    repository: str  # on the hub
    tokenizer_needs: tuple[tuple[str, ...], ...]  # each entry is one thing that must be there, under any of the names given
    tokenizer_helps: tuple[str, ...]
    tokenizer_folder: str = ""
    model_folder: str = ""
    model_types: tuple[str, ...] = ()  # in config.json; empty where any will do whose weights fit

    @property
    def needed(self) -> tuple[tuple[str, ...], ...]:
        return (
            self._in_model_folder(_CONFIG),
            *(self._in_tokenizer_folder(*names) for names in self.tokenizer_needs),
            self._in_model_folder(_WEIGHTS, _WEIGHTS_INDEX),
        )

    @property
    def helpful(self) -> tuple[str, ...]:
        return self._in_tokenizer_folder(*self.tokenizer_helps)

    @property
    def downloaded(self) -> tuple[str, ...]:
        """Patterns of everything that is fetched from the hub."""
        return (*(name for names in self.needed for name in names), *self.helpful, *self._in_model_folder(_WEIGHTS_SHARDS))

    def absent(self, folder: Path) -> list[str]:
        """Names to show when something needed is absent; empty when the folder can be loaded."""
        absent = [" or ".join(names) for names in self.needed if not any((folder / name).is_file() for name in names)]
        index = folder / self.model_folder / _WEIGHTS_INDEX
        if index.is_file() and not index.with_name(_WEIGHTS).is_file():
            absent += [shard for shard in self._in_model_folder(*_shards(index)) if not (folder / shard).is_file()]
        if absent:
            absent += [f"{name} (optional)" for name in self.helpful if not (folder / name).is_file()]
        return absent

    def how_to_fetch(self, repository: str) -> str:
        needed = ", ".join(" or ".join(names) for names in self.needed)
        return (
            f"Fetch {needed} (with its shards), {' and '.join(self.helpful)} from https://huggingface.co/{repository} "
            'into any folder and pass that folder: text_encoder="<folder>"'
        )

    def missing_extra(self, module: str) -> MissingExtra:
        return MissingExtra(
            f"the {self.kind} text encoder needs the package {module!r}, which is not installed: pip install 'nextscale[text]'"
        )

    def _in_model_folder(self, *names: str) -> tuple[str, ...]:
        return tuple(str(PurePosixPath(self.model_folder, name)) for name in names)

    def _in_tokenizer_folder(self, *names: str) -> tuple[str, ...]:
        return tuple(str(PurePosixPath(self.tokenizer_folder, name)) for name in names)


class EncoderSource:
    """A folder or hub name as the user gave it, and what it should hold. A folder never touches the network.

    A hub name stands for the folder in the hub's cache; without `download`, what is not there is not fetched.
    """

    def __init__(self, given: str | Path, files: EncoderFiles, download: bool = True) -> None:
        self._given = given
        self._files = files
        self._can_download = download
        self._is_hub_name = is_hub_name(given)

    def open(self) -> Path:
        """A folder on this machine in which every needed file was found."""
        folder = self._from_hub(str(self._given)) if self._is_hub_name else expanded(self._given)
        if not folder.is_dir():
            raise self.unavailable("is not a folder on this machine.")
        absent = self._files.absent(folder)
        if absent:
            raise self.unavailable(f"is incomplete; absent: {', '.join(absent)}.")
        return folder

    def check_model_type(self, folder: Path) -> None:
        expected = self._files.model_types
        found = json.loads((folder / self._files.model_folder / _CONFIG).read_text(encoding="utf-8")).get("model_type")
        if expected and found not in expected:
            raise self.unavailable(f"has model_type {found!r} in its {_CONFIG}; expected {' or '.join(map(repr, expected))}.")

    def unavailable(self, problem: str) -> TextEncoderUnavailable:
        repository = str(self._given) if self._is_hub_name else self._files.repository
        return TextEncoderUnavailable(f"text encoder {str(self._given)!r} {problem} {self._files.how_to_fetch(repository)}")

    def _from_hub(self, repository: str) -> Path:
        cached = cached_snapshot(repository)
        if cached is not None and not self._files.absent(cached):
            return cached
        if not self._can_download:
            raise self.unavailable("is not in the hub's cache, and downloads are not allowed.")
        try:
            return snapshot(repository, self._files.downloaded)
        except DownloadError as error:
            raise self.unavailable(f"is not on this machine. {error}.") from error


def is_hub_name(source: str | Path) -> bool:
    if isinstance(source, Path):
        return False
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source
    return not looks_like_path and not Path(source).exists()


def _shards(index: Path) -> list[str]:
    try:
        return shard_names(index)
    except CheckpointError as error:
        raise TextEncoderUnavailable(str(error)) from error
