"""On which device a pipeline's modules lie, and in which precision."""

from __future__ import annotations

import re
from typing import get_args

import torch
from torch import nn

from .errors import SettingError
from .models.base import KvDtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_device(wanted: str | torch.device | None) -> torch.device:
    """The one asked for if it is there; by default the GPU if there is one."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(wanted)):
        raise SettingError(f"device {str(wanted)!r}: choose cpu, cuda or cuda:N")
    device, gpus = torch.device(wanted), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise SettingError(f"device {wanted}: torch {torch.__version__} finds {gpus} GPU(s) here; cpu always works")
    return device


def choose_dtype(wanted: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The one asked for; by default bfloat16 on a GPU and float32 on the CPU."""
    dtype = wanted or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype not in DTYPES:
        raise SettingError(f"dtype {dtype}: choose one of {', '.join(str(known) for known in DTYPES)}")
    return dtype


def place(module: nn.Module, device: torch.device, dtype: torch.dtype, float32: tuple[str, ...]) -> None:
    """Moves and casts a module; parameters whose name starts with one of the prefixes in `float32` stay float32."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(device, torch.float32 if name.startswith(float32) else dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def choose_kv_dtype(wanted: KvDtype | None) -> KvDtype | None:
    """What keys and values are kept in; None: in the dtype of the model."""
    if wanted is not None and wanted not in get_args(KvDtype):
        raise SettingError(f"kv_dtype {wanted!r}: choose {', '.join(get_args(KvDtype))}, or leave it out to keep them as they are computed")
    return wanted
