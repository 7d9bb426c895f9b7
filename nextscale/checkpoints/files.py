"""Torch and safetensors files and folders of shards, read without executing code."""

import argparse
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..serialization import listed, read_json
from .layout import Layout, Shape, matches_any, published_key

WEIGHT_SUFFIXES = frozenset({".safetensors", ".pth", ".pt", ".bin", ".ckpt"})
INDEX_SUFFIX = ".index.json"
DOWNLOAD_AGAIN = "Download it again and compare its size with the published one."


@dataclass(frozen=True)
class Entry:
    shard: Path
    stored_key: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a weights file or a folder of shards, by published name. Holds no tensor data."""

    path: Path
    layout: Layout
    entries: dict[str, Entry]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: entry.shape for key, entry in self.entries.items()}

    def tensors(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields (key, tensor) shard by shard. The tensors are read-only views of the memory-mapped file."""
        wanted = list(keys)
        if absent := [key for key in wanted if key not in self.entries]:
            raise CheckpointError(f"{self.path} has no tensors named {listed(absent)}. Request only keys in `shapes`.")
        for shard in dict.fromkeys(self.entries[key].shard for key in wanted):
            state = _shard_state(shard, self.layout)
            for key in wanted:
                if self.entries[key].shard == shard:
                    yield key, state[self.entries[key].stored_key].detach()


def open_checkpoint(path: str | Path, layout: Layout) -> Checkpoint:
    """Opens a torch or safetensors file, a folder of shards, or the `.index.json` of such a folder. Reads only names and shapes."""
    path = Path(path)
    entries: dict[str, Entry] = {}
    for shard in _shard_paths(path, layout.preferred_file):
        for entry in _shard_entries(shard, layout):
            key = published_key(entry.stored_key, layout)
            if key in entries:
                places = [f"{twin.stored_key!r} in {twin.shard.name}" for twin in (entries[key], entry)]
                raise CheckpointError(f"{path} has {key!r} twice: {' and '.join(places)}. Pass the files of one checkpoint.")
            entries[key] = entry
    return Checkpoint(path, layout, entries)


def _shard_paths(path: Path, preferred: str | None) -> list[Path]:
    if os.path.isfile(path):
        return indexed_shards(path) if path.name.endswith(INDEX_SUFFIX) else [path]
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is not an existing file or folder. Pass a weights file or a folder of shards.")
    if preferred and (path / preferred).is_file():
        return [path / preferred]
    files = sorted(file for file in path.glob("*") if file.is_file())
    indexes = [file for file in files if file.name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise CheckpointError(f"{path} has several indexes: {listed([file.name for file in indexes])}. Pass the path of one.")
    if indexes:
        return indexed_shards(indexes[0])
    weights = [file for file in files if file.suffix.lower() in WEIGHT_SUFFIXES]
    if not weights:
        raise CheckpointError(f"{path} has no {', '.join(sorted(WEIGHT_SUFFIXES))} file. Pass the folder with the weights.")
    return weights


def indexed_shards(index: Path) -> list[Path]:
    """Returns the shards listed in an index. Raises CheckpointError if one does not exist."""
    names = shard_names(index)
    for name in names:
        if not os.path.isfile(index.parent / name):
            raise CheckpointError(f"index {index} lists the shard {name!r}, which does not exist. Download the whole folder again.")
    return [index.parent / name for name in names]


def shard_names(index: Path) -> list[str]:
    """Returns the file names listed in an index. Raises CheckpointError for names outside its folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f'index {index} must have a "weight_map" from tensor names to shard files. {DOWNLOAD_AGAIN}')
    names = sorted(set(weight_map.values()))
    for name in names:
        # Only the text is checked: download caches store shards as links to files elsewhere. Windows rules also cover POSIX names.
        pure = PureWindowsPath(name)
        if pure.anchor or ".." in pure.parts:
            raise CheckpointError(f"index {index} must list plain file names; got {name!r}, which is outside its folder.")
    return names


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object of a small file; raises CheckpointError for other content."""
    try:
        found = read_json(file)
        if not isinstance(found, dict):
            raise ValueError(f"must be a JSON object; got a {type(found).__name__}")
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}. Download it again, or check its permissions.") from error
    return found


def _shard_entries(path: Path, layout: Layout) -> Iterator[Entry]:
    foreign = []
    for key, value in _shard_state(path, layout).items():
        if isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
            yield Entry(path, key, tuple(value.shape), value.dtype)
        elif not isinstance(key, str) or not matches_any(published_key(key, layout), layout.ignored):
            foreign.append(f"{key!r} ({type(value).__name__})")
    if foreign:
        wrappers = "".join(f" or {'.'.join(wrapper)}" for wrapper in layout.wrappers)
        raise CheckpointError(
            f"{path} must contain only dense tensors with string keys, at the top level{wrappers}; got {listed(foreign)}. "
            "Save only the state dict."
        )


def _shard_state(path: Path, layout: Layout) -> Mapping[Any, Any]:
    """Returns the content of one file, memory-mapped if possible. The format is detected from the content, not from the name."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from error
    if not head:
        raise CheckpointError(f"{path} is empty (0 bytes). {DOWNLOAD_AGAIN}")
    if head[8:] == b"{":  # checked first, because the length field of a safetensors file may look like a zip or a pickle
        return _safetensors_state(path)
    if head.startswith((b"PK", b"\x80")):
        return _unwrapped(_torch_load(path, is_zip=head.startswith(b"PK")), path, layout)
    raise CheckpointError(
        f"{path} is not a checkpoint: it is neither a torch nor a safetensors file. "
        "Pass a weights file. A small text file is often a Git LFS pointer or an error page; download it again."
    )


def _safetensors_state(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping; tensors are memory-mapped
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is a truncated or damaged safetensors file. {DOWNLOAD_AGAIN}") from error


def _unwrapped(root: object, path: Path, layout: Layout) -> Mapping[Any, Any]:
    for wrapper in (*layout.wrappers, ()):  # the empty path is the top level
        member = root
        for key in wrapper:
            member = member.get(key) if isinstance(member, Mapping) else None
        if member is not None:
            break
    if not isinstance(member, Mapping):
        place = ".".join(wrapper) or "the top level"
        raise CheckpointError(f"{path} must have a dict of tensors at {place}; got a {type(member).__name__}. Save only the state dict.")
    return member


def _torch_load(path: Path, is_zip: bool) -> object:
    can_map = is_zip and not path.name.endswith(".safetensors")  # torch treats such paths as safetensors; old files cannot be mapped
    try:
        # Training programs store their settings in a Namespace, which only holds values and executes nothing.
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path if can_map else file, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} must contain only tensors; it has other objects, or a damaged pickle. nextscale never unpickles code. "
            "Open it in an environment you trust, save only the weights (a dict of tensors), and pass that file."
        ) from error
    except Exception as error:  # damaged archives raise almost any exception type
        raise CheckpointError(f"{path} is truncated, damaged or not written by torch.save. {DOWNLOAD_AGAIN}") from error
