"""What really happened in a request: time, tokens and rows per stage, memory."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StageReport:
    index: int
    height: int
    width: int
    tokens: int  # run through the network, per row; 0 when skipped
    rows: int  # images times guidance branches
    seconds: float


@dataclass(frozen=True)
class Report:
    model: str
    device: str
    dtype: str
    size: tuple[int, int]  # height, width in pixels
    seeds: tuple[int, ...] | None  # None: the caller's own generator
    stages: tuple[StageReport, ...]
    condition_seconds: float  # prompt features to modulation and text keys
    decode_seconds: float
    peak_memory: int  # bytes: allocated on the GPU during the request, or the process's largest resident size on the CPU
    planned_memory: int  # bytes that the request was known to need for keys, values and text before it started

    @property
    def seconds(self) -> float:
        return self.condition_seconds + sum(stage.seconds for stage in self.stages) + self.decode_seconds

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self) | {"seconds": self.seconds}


class Stopwatch:
    """Times stretches of work. On a GPU it uses events, so that measuring does not make the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # host times or device events, alternating start and stop

    def start(self) -> None:
        self._marks.append(self._now())

    def stop(self) -> None:
        self._marks.append(self._now())

    def seconds(self) -> list[float]:
        """Length of every stretch between a start and its stop."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if self._device.type != "cuda":
            return [stop - start for start, stop in pairs]
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(stop) / 1000 for start, stop in pairs]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, or None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
