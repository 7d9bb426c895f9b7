"""Weights between published checkpoints and our modules: read, converted and written, whole or not at all. Start at `load_weights`."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CheckpointError, WeightsMismatch
from .files import Checkpoint, open_checkpoint
from .layout import Layout, Slot, check, listed, published_slots

CASTABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        problems.append(f"not {listed(map(str, CASTABLE_DTYPES))} ({len(uncastable)}): {listed(uncastable)}")
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


def write_weights(module: nn.Module, target: str | Path, layout: Layout, dtype: torch.dtype | None = torch.float16) -> int:
    """Writes a module as one flat safetensors file with the published names, so that `load_weights` reads it; returns its bytes.

    dtype: of all tensors; None leaves each as it is.
    """
    if dtype is not None:
        _require_castable(dtype)
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    ours = {name: tensor.detach().to("cpu", dtype or tensor.dtype) for name, tensor in module.state_dict().items()}
    in_rows = {name: tensor.contiguous().view(tensor.shape or (1,)) for name, tensor in ours.items()}  # a GPU keeps channels last
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
        raise CheckpointError(f"Weights cannot be stored as {dtype}. Use one of {listed(map(str, CASTABLE_DTYPES))}.")
