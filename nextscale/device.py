"""Choice of device and dtype, the device lock, timing and memory."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, get_args

import torch
from torch import nn

from .errors import SettingError
from .models.base import KvDtype
from .models.quantization import FORMATS, Quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_FROM = (8, 9)  # compute capability


def choose_device(wanted: str | torch.device | None) -> torch.device:
    """Returns the given device if it exists; by default the GPU if there is one."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", str(wanted)):
        raise SettingError(f"device must be cpu, cuda, cuda:N or mps; got {str(wanted)!r}.")
    device, gpus = torch.device(wanted), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise SettingError(f"device {wanted} does not exist: torch {torch.__version__} finds {gpus} GPU(s) here. Use cpu.")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingError(f"device mps does not exist: torch {torch.__version__} finds no Apple GPU here. Use cpu.")
    return device


def choose_dtype(wanted: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Returns the given dtype; by default bfloat16 on a GPU and float32 on the CPU."""
    dtype = wanted or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype not in DTYPES:
        raise SettingError(f"dtype must be one of {', '.join(str(known) for known in DTYPES)}; got {dtype}.")
    return dtype


def check_quantize(wanted: str | None, device: torch.device, dtype: torch.dtype) -> Quantize | None:
    """Returns the format of the weights if the device can multiply them; else raises SettingError with the alternatives."""
    chosen = next((known for known in FORMATS if known == wanted), None)
    if wanted is None or chosen == "int8":
        return chosen
    if chosen is None:
        raise SettingError(f"quantize must be one of {', '.join(FORMATS)}, or None; got {wanted!r}.")
    alternatives = "quantize='int8' halves the weights on every device; without quantize they stay bfloat16"
    if device.type != "cuda":
        raise SettingError(f"quantize='fp8' needs an NVIDIA GPU; the device is {device}. {alternatives} or float32.")
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < FP8_FROM:
        raise SettingError(
            f"quantize='fp8' needs an NVIDIA GPU of compute capability {FP8_FROM[0]}.{FP8_FROM[1]} (Ada) or 9.0 (Hopper) and newer;"
            f" {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. {alternatives}."
        )
    check_quantized_dtype(chosen, dtype)
    return chosen


def check_quantized_dtype(quantize: Quantize | None, dtype: torch.dtype) -> None:
    """Raises SettingError if products of such weights have no results of this dtype on any device."""
    if quantize == "fp8" and dtype == torch.float32:
        raise SettingError(f"quantize='fp8' needs dtype bfloat16 or float16; got {dtype}. Change dtype, or use quantize='int8'.")


def place(module: nn.Module, device: torch.device, dtype: torch.dtype, float32: tuple[str, ...]) -> None:
    """Moves and casts a module; parameters whose name starts with one of the prefixes in `float32` stay float32."""
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(device, torch.float32 if name.startswith(float32) else dtype)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def choose_kv_dtype(wanted: KvDtype | None) -> KvDtype | None:
    """Returns the type of keys and values; None is the dtype of the model."""
    if wanted is not None and wanted not in get_args(KvDtype):
        raise SettingError(f"kv_dtype must be {', '.join(get_args(KvDtype))}, or None for the model's dtype; got {wanted!r}.")
    return wanted


# --- one caller at a time


class DeviceLock:
    """Lock of a device for one caller at a time, since captured graphs share their memory. Nested calls do not wait."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Waits for the device; yields True inside another call of the same thread."""
        with self._lock:
            self._depth += 1
            try:
                yield self._depth > 1
            finally:
                self._depth -= 1


_LOCKS: dict[torch.device, DeviceLock] = {}  # shared by all pipelines of the process


def device_lock(device: torch.device) -> DeviceLock:
    return _LOCKS.setdefault(device, DeviceLock())  # atomic, which `functools.cache` is not


# --- time and memory


class Timer:
    """Times segments of a request by name and stage. On a GPU it uses events, so that measuring does not make the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starts: dict[tuple[str, int], Any] = {}  # host times or device events
        self._stops: dict[tuple[str, int], Any] = {}

    def start(self, what: str, stage: int = 0) -> None:
        self._starts[what, stage] = self._now()

    def stop(self, what: str, stage: int = 0) -> None:
        self._stops[what, stage] = self._now()

    def lap(self, what: str, stage: int) -> None:
        """Ends a segment at the start of the next stage's."""
        self._stops[what, stage] = self._starts[what, stage + 1] = self._now()

    @contextmanager
    def time(self, what: str, stage: int = 0) -> Iterator[None]:
        self.start(what, stage)
        yield
        self.stop(what, stage)

    def seconds(self, what: str, stage: int = 0) -> float | None:
        """Returns the length of a segment; None if it was not measured."""
        if (what, stage) not in self._stops:
            return None
        start, stop = self._starts[what, stage], self._stops[what, stage]
        if self._device.type != "cuda":
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1000

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def hardware_name(device: torch.device) -> str:
    """Returns the GPU's name, or the processor's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes, for the CPU the peak of the process; 0 if the system does not report it."""
    if device.type == "cuda":
        # As `max_memory_allocated`, which first puts all statistics into a sorted dictionary.
        return torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {}).get("peak", 0)
    try:
        import resource  # POSIX only
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory(device: torch.device, captured: int = 0) -> int | None:
    """Returns the bytes that can still be allocated; None if the system does not report it. `captured`: bytes kept by captured graphs."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - captured
        return torch.cuda.mem_get_info(device)[0] + max(unused, 0)
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
