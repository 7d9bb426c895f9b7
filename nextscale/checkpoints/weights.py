"""Loading, conversion and writing of weights. Start at `load_weights`."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import CheckpointError, NextscaleError, WeightsMismatch
from ..io import replacing
from ..serialization import listed
from .files import Checkpoint, open_checkpoint
from .layout import Layout, PublishedTensor, check, published_tensors

CASTABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class NoInitialValues(TorchFunctionMode):
    """Skips the initialization of parameters on the meta device, for which torch would import its compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)


def load_weights(
    module: nn.Module, source: str | Path, layout: Layout, *,
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, float32: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Loads `source` into `module`, which is best built on the meta device. If it fails, the module is unchanged.

    The file is memory-mapped, so memory grows by the loaded parameters and one tensor. Parameters whose names start with a prefix in
    `float32` are loaded as float32, all others as `dtype`.
    """
    _require_castable(dtype)
    checkpoint = open_checkpoint(source, layout)
    wanted = _fitting(module, checkpoint)
    parameters = {
        name: torch.empty(tensor.shape, device=device, dtype=torch.float32 if name.startswith(float32) else dtype)
        for name, tensor in module.state_dict().items()
    }
    in_rows = {name: tensor.view(tensor.shape or (1,)) for name, tensor in parameters.items()}  # scalars are treated as one row
    rows = {key: in_rows[place.parameter][place.rows] for key, place in wanted.items()}
    for key in wanted.keys() - checkpoint.entries.keys():
        rows[key].zero_()
    for key, tensor in checkpoint.tensors(key for key in checkpoint.entries if key in wanted):
        kept = tensor[: wanted[key].shape[0]] if tensor.ndim else tensor
        rows[key].copy_(kept.reshape(rows[key].shape))
    for name, tensor in parameters.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _fitting(module: nn.Module, checkpoint: Checkpoint) -> dict[str, PublishedTensor]:
    wanted = published_tensors(module, checkpoint.layout)
    problems = check(wanted, checkpoint.shapes, checkpoint.layout).lines()
    dtypes = {key: entry.dtype for key, entry in checkpoint.entries.items() if key in wanted}
    if uncastable := [f"{key} ({dtype})" for key, dtype in dtypes.items() if dtype not in CASTABLE_DTYPES]:
        problems.append(f"unsupported dtypes, expected {listed(CASTABLE_DTYPES)} ({len(uncastable)}): {listed(uncastable)}")
    if problems:
        raise WeightsMismatch(
            "\n  ".join([f"{checkpoint.path} does not match {type(module).__name__}:", *problems])
            + "\nPass the weights published for this model, or choose the model of this file."
        )
    return wanted


def convert(source: str | Path, target: str | Path, module: nn.Module, layout: Layout, dtype: torch.dtype | None = None) -> int:
    """Writes the checkpoint `source` of `module` as one safetensors file with the published names. Returns the number of tensors.

    Ignored keys are dropped; extra rows (`Layout.cut_rows`) are kept. Without `dtype`, memory-mapped tensors are written directly, except
    those that share storage or are not contiguous. With `dtype`, all converted copies are in memory at once, because the safetensors writer
    needs them together.
    """
    _require_castable(dtype)
    target = Path(target)
    checkpoint = open_checkpoint(source, layout)
    _require_target(target, checkpoint)
    wanted = _fitting(module, checkpoint)
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for key, tensor in checkpoint.tensors(key for key in checkpoint.entries if key in wanted):
        ready = tensor.to(dtype or tensor.dtype).contiguous()
        storage = ready.untyped_storage().data_ptr()
        tensors[key] = ready.clone() if storage in storages else ready
        storages.add(storage)
    write_whole(tensors, target)
    return len(tensors)


def write_weights(module: nn.Module, target: str | Path, layout: Layout, dtype: torch.dtype | None = torch.float16) -> int:
    """Writes a module as one safetensors file with the published names, for `load_weights`. Returns the size in bytes.

    dtype: of all tensors; None keeps their dtypes.
    """
    _require_castable(dtype)
    target = Path(target)
    ours = {name: tensor.detach().to("cpu", dtype or tensor.dtype) for name, tensor in module.state_dict().items()}
    in_rows = {name: tensor.contiguous().view(tensor.shape or (1,)) for name, tensor in ours.items()}  # may be channels-last on a GPU
    places = published_tensors(module, layout).items()
    parts = {key: in_rows[place.parameter][place.rows].reshape(place.shape) for key, place in places}
    write_whole({key: part.clone(memory_format=torch.contiguous_format) for key, part in parts.items()}, target)
    return target.stat().st_size


def _require_target(target: Path, checkpoint: Checkpoint) -> None:
    if target.is_dir() or not target.parent.is_dir():
        raise CheckpointError(f"target must be a file in an existing folder; got {target}.")
    if target.exists() and any(target.samefile(file) for file in {checkpoint.path, *(e.shard for e in checkpoint.entries.values())}):
        raise CheckpointError(f"target must not be the source; got {target}. Pass another file name.")


def write_whole(tensors: dict[str, Tensor], target: Path) -> None:
    """Writes one safetensors file atomically."""
    try:
        with replacing(target) as temporary:
            temporary.touch(exist_ok=False)
            usual_mode = stat.S_IMODE(temporary.stat().st_mode)
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(usual_mode)  # safetensors makes its files readable only by the owner
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
    except (NextscaleError, SafetensorError) as error:
        raise CheckpointError(f"{target} could not be written ({error}). Check the free space and the permissions.") from error


def _require_castable(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in CASTABLE_DTYPES:
        raise CheckpointError(f"dtype must be one of {listed(CASTABLE_DTYPES)}; got {dtype}.")
