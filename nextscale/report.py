"""What really happened in a request: time, MACs, tokens and rows per stage, memory."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StageReport:
    index: int
    height: int
    width: int
    skipped: bool
    tokens: float  # that enter the first block, per row, with HART's text, the mean where rows are packed; 0 when skipped
    computed: float  # tokens per row, without text, that the sublayers ran, mean of all; the cells when dense, 0 when skipped
    padding: float  # share of the tokens that no image needed: run because the captured graph or, in padded rows, another image has more
    rows: int  # images times cfg branches
    cfg_branches: int  # of guidance, that were run: 2 or 1; 0 when skipped
    cost_share: float  # MACs against those of the same stage in dense generation
    dense_macs: int  # of these
    seconds: float
    sampling_seconds: float | None  # of these: from logits to codes, STAR's refinement included; None: not run, or inside a replay
    residual_seconds: float | None  # of these: HART's residual diffusion; None likewise


@dataclass(frozen=True)
class Report:
    model: str
    engine: str  # "eager", or "graphs" where captured graphs were replayed
    captured_batch: int | None  # images that these have, of which the request may need fewer; None: eager
    method: str  # readable: the methods and those settings that are not the default
    selection_reason: str | None  # why this method, in words, where it was looked up for the request (`auto`); None: it was asked for
    device: str
    dtype: str
    size: tuple[int, int]  # height, width in pixels
    seeds: tuple[int, ...] | None  # None: the caller's own generator
    stages: tuple[StageReport, ...]
    cost_share: float  # MACs against those of dense generation, as `planning.cost` counts them; decoding is not counted
    condition_seconds: float  # prompt features to modulation and text keys
    decode_seconds: float
    peak_memory: int  # bytes: allocated on the GPU during the request, or the process's largest resident size on the CPU
    planned_memory: int  # bytes that the request was known to need for keys, values and text before it started
    quantize: str | None = None  # format of the weights of blocks; None: the dtype

    @property
    def seconds(self) -> float:
        return self.condition_seconds + sum(stage.seconds for stage in self.stages) + self.decode_seconds

    @property
    def padding(self) -> float:
        """Share of the tokens of all stages that no image needed."""
        ran = sum(stage.tokens * stage.rows for stage in self.stages)
        return sum(stage.padding * stage.tokens * stage.rows for stage in self.stages) / ran

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self) | {"seconds": self.seconds, "padding": self.padding}


class Stopwatch:
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
        """Ends a segment where that of the next stage begins."""
        self._stops[what, stage] = self._starts[what, stage + 1] = self._now()

    @contextmanager
    def time(self, what: str, stage: int = 0) -> Iterator[None]:
        self.start(what, stage)
        yield
        self.stop(what, stage)

    def seconds(self, what: str, stage: int = 0) -> float | None:
        """Length of a segment; None where it was not measured."""
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
    """The GPU's name, or the processor's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes, on the CPU that of the process; 0 if the system does not report it."""
    if device.type == "cuda":
        # What `max_memory_allocated` says, which puts all statistics into a sorted dictionary first.
        return torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {}).get("peak", 0)
    try:
        import resource  # POSIX only
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory(device: torch.device, captured: int = 0) -> int | None:
    """Bytes that can still be allocated, or None where the system does not tell. `captured`: kept by captured graphs, for nobody else."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - captured
        return torch.cuda.mem_get_info(device)[0] + max(unused, 0)
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
