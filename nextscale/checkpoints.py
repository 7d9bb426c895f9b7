"""Reads published checkpoints into our modules, strictly and without ever executing anything in a file. Start at `load_weights`."""

import argparse
import json
import os
import pickle
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nextscale.errors import CheckpointError, WeightsMismatch

Shape = tuple[int, ...]
Template = str | Callable[[re.Match[str]], str]

WEIGHT_SUFFIXES = frozenset({".safetensors", ".pth", ".pt", ".bin", ".ckpt"})
INDEX_SUFFIX = ".index.json"
CASTABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMES_SHOWN = 8
DOWNLOAD_AGAIN = "Download it again and compare its size with the published one."


@dataclass(frozen=True)
class Rule:
    """Published names of every parameter of ours whose whole name matches `pattern`."""

    pattern: str
    names: tuple[Template, ...]  # `re.Match.expand` templates or functions of the match; several: equal parts along dim 0, in order
    shape: Callable[[Shape], Shape] | None = None  # shape of one part of ours -> published shape: same elements, same order


@dataclass(frozen=True)
class Layout:
    """How the published files name and pack the parameters of one of our modules. Patterns match whole names, except in `aliases`."""

    rules: tuple[Rule, ...] = ()  # the first that matches our parameter name wins; none: the published name equals ours
    prefix: str = ""  # before every published name of ours
    wrappers: tuple[tuple[str, ...], ...] = ()  # key paths of the state dict in a torch file, tried in order; none there: a flat file
    ignored: tuple[str, ...] = ()  # published keys with statistics or recomputable tables: may be absent, may have any shape
    zero_if_absent: tuple[str, ...] = ()  # published keys that are constant zeros: absent means zeros, present means used
    aliases: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) for `re.sub` on incoming keys, before anything else
    cut_rows: tuple[str, ...] = ()  # published keys that may have more rows than ours: the surplus is dropped
    preferred_file: str | None = None  # the file to read where a folder holds several whole checkpoints, e.g. averaged weights


@dataclass(frozen=True)
class Slot:
    """Where one published tensor goes: these rows of this parameter of ours. `shape` is the published shape."""

    parameter: str
    rows: slice
    shape: Shape


@dataclass(frozen=True)
class Mismatch:
    """What keeps a checkpoint from fitting a module; false when it fits. `misshaped` maps a key to (shape in the file, shape expected)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: dict[str, tuple[Shape, Shape]]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def lines(self) -> list[str]:
        """One line of text for each kind of problem."""
        shapes = [f"{key} (file {list(found)}, expected {list(expected)})" for key, (found, expected) in self.misshaped.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "mis-shaped": shapes}
        return [f"{kind} ({len(names)}): {_listed(names)}" for kind, names in kinds.items() if names]


@dataclass(frozen=True)
class _Entry:
    shard: Path
    stored_key: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a weights file or of a folder of shards, under their published names. Holds no tensor data."""

    path: Path
    layout: Layout
    entries: dict[str, _Entry]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {key: entry.shape for key, entry in self.entries.items()}

    def tensors(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields (key, tensor) shard by shard. The tensors are views of the mapped file: read them, do not write to them."""
        wanted = list(keys)
        if absent := [key for key in wanted if key not in self.entries]:
            raise CheckpointError(f"{self.path} has no tensors named {_listed(absent)}. Ask only for keys in `shapes`.")
        for shard in dict.fromkeys(self.entries[key].shard for key in wanted):
            state = _shard_state(shard, self.layout)
            for key in wanted:
                if self.entries[key].shard == shard:
                    yield key, state[self.entries[key].stored_key].detach()


def published_slots(module: nn.Module, layout: Layout) -> dict[str, Slot]:
    """Published key -> slot, for every parameter of `module` (which may be on the meta device)."""
    slots: dict[str, Slot] = {}
    for parameter, tensor in module.state_dict().items():
        for key, slot in _parameter_slots(parameter, tuple(tensor.shape), layout):
            if key in slots:
                raise ValueError(f"The layout names both {slots[key].parameter} and {parameter} {key!r}; published keys must be unique.")
            slots[key] = slot
    return slots


def _parameter_slots(parameter: str, shape: Shape, layout: Layout) -> Iterator[tuple[str, Slot]]:
    names, published_shape = _publication(parameter, layout)
    rows, *rest = shape or (1,)
    if rows % len(names) or (not shape and len(names) > 1):
        raise ValueError(f"The layout cuts {parameter} {list(shape)} into {len(names)} parts; its rows must be a multiple of that.")
    part_rows = rows // len(names)
    part_shape = (part_rows, *rest) if shape else ()
    slot_shape = published_shape(part_shape) if published_shape else part_shape
    if prod(slot_shape) != prod(part_shape):
        raise ValueError(f"The layout reshapes {parameter} {list(part_shape)} to {list(slot_shape)}; both must have as many elements.")
    for part, name in enumerate(names):
        yield name, Slot(parameter, slice(part * part_rows, (part + 1) * part_rows), slot_shape)


def _publication(parameter: str, layout: Layout) -> tuple[list[str], Callable[[Shape], Shape] | None]:
    for rule in layout.rules:
        if match := re.fullmatch(rule.pattern, parameter):
            names = [match.expand(name) if isinstance(name, str) else name(match) for name in rule.names]
            return [layout.prefix + name for name in names], rule.shape
    return [layout.prefix + parameter], None


def check(slots: Mapping[str, Slot], shapes: Mapping[str, Shape], layout: Layout) -> Mismatch:
    """Compares what a module takes with what a file has."""
    return Mismatch(
        missing=tuple(key for key in slots if key not in shapes and not _matches_any(key, layout.zero_if_absent)),
        unexpected=tuple(key for key in shapes if key not in slots and not _matches_any(key, layout.ignored)),
        misshaped={
            key: (shapes[key], slot.shape)
            for key, slot in slots.items()
            if key in shapes and not _shape_fits(shapes[key], slot.shape, can_cut=_matches_any(key, layout.cut_rows))
        },
    )


def fits(slots: Mapping[str, Slot], shapes: Mapping[str, Shape], layout: Layout) -> bool:
    """Whether a file with these shapes fills the module exactly."""
    return not check(slots, shapes, layout)


def _shape_fits(found: Shape, expected: Shape, can_cut: bool) -> bool:
    if can_cut and found and expected:
        return found[1:] == expected[1:] and found[0] >= expected[0]
    return found == expected


def open_checkpoint(path: str | Path, layout: Layout) -> Checkpoint:
    """Opens a torch or safetensors file, a folder of shards, or the `.index.json` of such a folder. Keeps names and shapes only."""
    path = Path(path)
    entries: dict[str, _Entry] = {}
    for shard in _shard_paths(path, layout.preferred_file):
        for entry in _shard_entries(shard, layout):
            key = _published_key(entry.stored_key, layout)
            if key in entries:
                places = [f"{twin.stored_key!r} in {twin.shard.name}" for twin in (entries[key], entry)]
                raise CheckpointError(f"{path} has {key!r} twice: {' and '.join(places)}. Pass the file or the folder of one checkpoint.")
            entries[key] = entry
    return Checkpoint(path, layout, entries)


def _shard_paths(path: Path, preferred: str | None) -> list[Path]:
    if os.path.isfile(path):
        return _indexed_shards(path) if path.name.endswith(INDEX_SUFFIX) else [path]
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is not an existing file or folder. Pass a weights file or a folder of shards.")
    if preferred and (path / preferred).is_file():
        return [path / preferred]
    files = sorted(file for file in path.glob("*") if file.is_file())
    indexes = [file for file in files if file.name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise CheckpointError(f"{path} has several indexes: {_listed([file.name for file in indexes])}. Pass the path of the one you mean.")
    if indexes:
        return _indexed_shards(indexes[0])
    weights = [file for file in files if file.suffix.lower() in WEIGHT_SUFFIXES]
    if not weights:
        raise CheckpointError(f"{path} has no {', '.join(sorted(WEIGHT_SUFFIXES))} file. Pass the folder that holds the weights.")
    return weights


def _indexed_shards(index: Path) -> list[Path]:
    try:
        content = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The index {index} cannot be read as JSON. {DOWNLOAD_AGAIN}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f'The index {index} has no "weight_map" from tensor names to shard files. {DOWNLOAD_AGAIN}')
    return [_shard_beside(index, name) for name in sorted(set(weight_map.values()))]


def _shard_beside(index: Path, name: str) -> Path:
    # Judged by the text alone: download caches keep shards as links to files elsewhere. Windows rules also cover POSIX names.
    pure = PureWindowsPath(name)
    if pure.anchor or ".." in pure.parts:
        raise CheckpointError(f"The index {index} names {name!r}, outside its folder. Refused: use an index with plain file names.")
    shard = index.parent / name
    if not os.path.isfile(shard):
        raise CheckpointError(f"The index {index} names the shard {name!r}, which is not there. Download the whole folder again.")
    return shard


def _shard_entries(path: Path, layout: Layout) -> Iterator[_Entry]:
    foreign = []
    for key, value in _shard_state(path, layout).items():
        if isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
            yield _Entry(path, key, tuple(value.shape), value.dtype)
        elif not isinstance(key, str) or not _matches_any(_published_key(key, layout), layout.ignored):
            foreign.append(f"{key!r} ({type(value).__name__})")
    if foreign:
        wrappers = "".join(f" or {'.'.join(wrapper)}" for wrapper in layout.wrappers)
        raise CheckpointError(
            f"{path} has values that are not dense tensors under text keys: {_listed(foreign)}. "
            f"Expected nothing but named tensors, at the top level{wrappers}. Re-save only the state dict."
        )


def _shard_state(path: Path, layout: Layout) -> Mapping[Any, Any]:
    """The content of one file, mapped wherever the format allows. The format is told by content, not by the file's name."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from error
    if not head:
        raise CheckpointError(f"{path} is empty (0 bytes). {DOWNLOAD_AGAIN}")
    if head[8:] == b"{":  # asked first: the length field of a safetensors file may begin like a zip or a pickle
        return _safetensors_state(path)
    if head.startswith((b"PK", b"\x80")):
        return _unwrapped(_torch_load(path, is_zip=head.startswith(b"PK")), path, layout)
    raise CheckpointError(
        f"{path} is not a checkpoint: it starts like neither a torch file nor a safetensors file. "
        "Pass a weights file; a small text file in its place is often a Git LFS pointer or an error page, so download it again."
    )


def _safetensors_state(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping; the tensors are views of the map
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is a truncated or damaged safetensors file. {DOWNLOAD_AGAIN}") from error


def _unwrapped(root: object, path: Path, layout: Layout) -> Mapping[Any, Any]:
    for wrapper in (*layout.wrappers, ()):  # the empty path is the file itself
        member = root
        for key in wrapper:
            member = member.get(key) if isinstance(member, Mapping) else None
        if member is not None:
            break
    if not isinstance(member, Mapping):
        place = ".".join(wrapper) or "the top level"
        raise CheckpointError(f"{path} has a {type(member).__name__} at {place}; expected a dict of tensors. Re-save the state dict alone.")
    return member


def _torch_load(path: Path, is_zip: bool) -> object:
    can_map = is_zip and not path.name.endswith(".safetensors")  # torch takes paths so named for safetensors; older files cannot be mapped
    try:
        # Training programs keep their settings beside the weights; a Namespace only holds values and runs nothing.
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path if can_map else file, map_location="cpu", weights_only=True, mmap=can_map)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains objects besides tensors (or a damaged pickle). nextscale never unpickles code. "
            "Open it where you trust it, re-save only the weights (a dict of tensors), and pass that file."
        ) from error
    except Exception as error:  # a damaged archive surfaces as almost any exception type
        raise CheckpointError(f"{path} is truncated, damaged or not made by torch.save. {DOWNLOAD_AGAIN}") from error


def load_weights(
    module: nn.Module, source: str | Path, layout: Layout, *,
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, float32: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Fills `module` (best built on the meta device) from `source`; a failure leaves the module as it was.

    The file is mapped, so memory grows by the finished parameters and one tensor. Parameters whose name starts with one of the
    prefixes in `float32` stay float32, the others become `dtype`.
    """
    _require_castable(dtype)
    checkpoint = open_checkpoint(source, layout)
    slots = _matching_slots(module, checkpoint)
    parameters = {
        name: torch.empty(tensor.shape, device=device, dtype=torch.float32 if name.startswith(float32) else dtype)
        for name, tensor in module.state_dict().items()
    }
    in_rows = {name: tensor.view(tensor.shape or (1,)) for name, tensor in parameters.items()}  # a scalar counts as one row
    rows = {key: in_rows[slot.parameter][slot.rows] for key, slot in slots.items()}
    for key in slots.keys() - checkpoint.entries.keys():
        rows[key].zero_()
    for key, tensor in checkpoint.tensors(key for key in checkpoint.entries if key in slots):
        kept = tensor[: slots[key].shape[0]] if tensor.ndim else tensor
        rows[key].copy_(kept.reshape(rows[key].shape))
    for name, tensor in parameters.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _matching_slots(module: nn.Module, checkpoint: Checkpoint) -> dict[str, Slot]:
    slots = published_slots(module, checkpoint.layout)
    problems = check(slots, checkpoint.shapes, checkpoint.layout).lines()
    dtypes = {key: entry.dtype for key, entry in checkpoint.entries.items() if key in slots}
    if uncastable := [f"{key} ({dtype})" for key, dtype in dtypes.items() if dtype not in CASTABLE_DTYPES]:
        problems.append(f"not {_listed(map(str, CASTABLE_DTYPES))} ({len(uncastable)}): {_listed(uncastable)}")
    if problems:
        raise WeightsMismatch(
            "\n  ".join([f"{checkpoint.path} does not fit {type(module).__name__}:", *problems])
            + "\nPass the weights published for this model, or choose the model that this file belongs to."
        )
    return slots


def convert(source: str | Path, target: str | Path, module: nn.Module, layout: Layout, dtype: torch.dtype | None = None) -> int:
    """Writes the checkpoint `source` of `module` as one flat safetensors file with the published names; returns the number of tensors.

    Ignored keys are left out; surplus rows (`Layout.cut_rows`) stay. The target appears whole or not at all. Without `dtype` the
    mapped tensors go straight to the file, except that those which share storage or are not contiguous are copied; with `dtype` the
    cast copies of all tensors are in memory at once, because the safetensors writer takes them together.
    """
    if dtype is not None:
        _require_castable(dtype)
    target = Path(target)
    checkpoint = open_checkpoint(source, layout)
    _require_target(target, checkpoint)
    slots = _matching_slots(module, checkpoint)
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for key, tensor in checkpoint.tensors(key for key in checkpoint.entries if key in slots):
        ready = tensor.to(dtype or tensor.dtype).contiguous()
        storage = ready.untyped_storage().data_ptr()
        tensors[key] = ready.clone() if storage in storages else ready
        storages.add(storage)
    write_whole(tensors, target)
    return len(tensors)


def write_weights(module: nn.Module, target: str | Path, layout: Layout, dtype: torch.dtype = torch.float16) -> int:
    """Writes a module as one flat safetensors file with the published names, so that `load_weights` reads it; returns its bytes."""
    _require_castable(dtype)
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    ours = {name: tensor.detach().to("cpu", dtype) for name, tensor in module.state_dict().items()}
    in_rows = {name: tensor.view(tensor.shape or (1,)) for name, tensor in ours.items()}
    slots = published_slots(module, layout).items()
    parts = {key: in_rows[slot.parameter][slot.rows].reshape(slot.shape) for key, slot in slots}
    write_whole({key: part.clone(memory_format=torch.contiguous_format) for key, part in parts.items()}, target)
    return target.stat().st_size


def _require_target(target: Path, checkpoint: Checkpoint) -> None:
    if not target.parent.is_dir():
        raise CheckpointError(f"The folder {target.parent} of the target {target.name} does not exist. Create it first.")
    if target.is_dir():
        raise CheckpointError(f"The target {target} is a folder. Pass the path of the file to write, for example weights.safetensors.")
    if target.exists() and any(target.samefile(file) for file in {checkpoint.path, *(e.shard for e in checkpoint.entries.values())}):
        raise CheckpointError(f"The target {target} is the source itself. Pass another file name.")


def write_whole(tensors: dict[str, Tensor], target: Path) -> None:
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        usual_mode = stat.S_IMODE(temporary.stat().st_mode)
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(usual_mode)  # safetensors leaves its files readable by the owner only
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written ({error}). Check the free space and the permissions there.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _require_castable(dtype: torch.dtype) -> None:
    if dtype not in CASTABLE_DTYPES:
        raise CheckpointError(f"Weights cannot be stored as {dtype}. Use one of {_listed(map(str, CASTABLE_DTYPES))}.")


def _published_key(stored_key: str, layout: Layout) -> str:
    for pattern, replacement in layout.aliases:
        stored_key = re.sub(pattern, replacement, stored_key)
    return stored_key


def _matches_any(key: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in patterns)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{shown} and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else shown
