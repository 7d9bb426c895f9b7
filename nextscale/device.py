"""On which device a pipeline's modules lie, and in which precision."""

from __future__ import annotations

import re
from typing import get_args

import torch
from torch import nn

from .errors import SettingError
from .models.base import KvDtype
from .models.quantization import FORMATS, Quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_FROM = (8, 9)  # compute capability


def choose_device(wanted: str | torch.device | None) -> torch.device:
    """The one asked for if it is there; by default the GPU if there is one."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", str(wanted)):
        raise SettingError(f"device {str(wanted)!r}: choose cpu, cuda, cuda:N or mps")
    device, gpus = torch.device(wanted), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise SettingError(f"device {wanted}: torch {torch.__version__} finds {gpus} GPU(s) here; cpu always works")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingError(f"device mps: torch {torch.__version__} finds no Apple GPU here; cpu always works")
    return device


def choose_dtype(wanted: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The one asked for; by default bfloat16 on a GPU and float32 on the CPU."""
    dtype = wanted or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype not in DTYPES:
        raise SettingError(f"dtype {dtype}: choose one of {', '.join(str(known) for known in DTYPES)}")
    return dtype


def check_quantize(wanted: str | None, device: torch.device, dtype: torch.dtype) -> Quantize | None:
    """The format of the weights if such a device can multiply them; SettingError with the alternatives if not."""
    chosen = next((known for known in FORMATS if known == wanted), None)
    if wanted is None or chosen == "int8":
        return chosen
    if chosen is None:
        raise SettingError(f"quantize {wanted!r}: choose one of {', '.join(FORMATS)}, or leave it out")
    alternatives = "quantize='int8' halves the weights everywhere, and without quantize they stay bfloat16"
    if device.type != "cuda":
        raise SettingError(f"quantize 'fp8' multiplies on a GPU, and the device is {device}: {alternatives} or float32")
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < FP8_FROM:
        raise SettingError(
            f"quantize 'fp8' needs an NVIDIA GPU of compute capability {FP8_FROM[0]}.{FP8_FROM[1]} (Ada) or 9.0 (Hopper) and newer; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: {alternatives}"
        )
    check_quantized_dtype(chosen, dtype)
    return chosen


def check_quantized_dtype(quantize: Quantize | None, dtype: torch.dtype) -> None:
    """SettingError where products of such weights have no results of this dtype, on whatever device."""
    if quantize == "fp8" and dtype == torch.float32:
        raise SettingError(f"quantize 'fp8' gives results in half precision, and dtype is {dtype}: choose bfloat16 or float16, or int8")


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
