"""CUDA graphs played on a CPU: what runs inside a capture is written down op by op and can be run again on the same memory.

As on a GPU, a replay writes where the capture wrote, nothing on the host runs again, and reading from the device during a capture fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nextscale import pipeline
from nextscale.engine import captures, variants

HOST_READS = {f"aten::{name}" for name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "lift_fresh", "equal")}


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in arguments or results of an operator. Torch's tree functions would take most of the time of a capture."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts if isinstance(part, (Tensor, tuple, list, dict)) for tensor in tensors_in(part)]


class Watching(TorchDispatchMode):
    """Sees every operator. Torch's compiler need not be kept out, for which torch would import it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Tape(Watching):
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # A number that is written into a tensor becomes one of no dimensions here; on a GPU it travels with the launch.
        number = func._schema.name == "aten::lift_fresh" and args[0].ndim == 0
        if func._schema.name in HOST_READS and not number:
            raise RuntimeError(f"{func} during a capture synchronizes or copies from the host")
        out = func(*args, **kwargs or {})
        self.ops.append((func, args, kwargs or {}, out))
        return out

    @cached_property
    def launches(self) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]]:
        """Operations of a replay: operator, inputs, and the tensors that receive its results unless it writes in place."""
        found = []
        for func, args, kwargs, out in self.ops:
            in_place = any(value.alias_info is not None and value.alias_info.is_write for value in func._schema.returns)
            if not in_place and shares_memory(out, (args, kwargs)):
                continue  # a view stays where it is
            written = in_place or func._schema.name.startswith("aten::empty")
            found.append((func, args, kwargs, [] if written else tensors_in(out)))
        return found

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, targets in self.launches:
            fresh = func(*args, **kwargs)
            if targets:
                for target, source in zip(targets, tensors_in(fresh), strict=True):
                    target.copy_(source)


def shares_memory(out: Any, inputs: Any) -> bool:
    """Returns True for operators that may return a view or a copy: `to`, `reshape`, `contiguous`."""
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs)}
    return any(tensor.untyped_storage().data_ptr() in places for tensor in tensors_in(out))


class Dispatched(Watching):
    """Uses the Python dispatch path of captures without recording; some operators, such as attention, round differently there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return func(*args, **kwargs or {})


class Stream:
    device_index = 0

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...


class Event:
    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def captured(tape: Tape, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    with tape:
        yield
    assert tape.ops, "nothing was captured: torch warns of empty graphs"


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    yield


FEW_BUCKETS = (32, 24, 12, 4)
"""Shares of 32: enough sizes, with padding in most. All shares would give such small stages a size for nearly every count."""


def play_graphs_on_the_cpu(patch: pytest.MonkeyPatch, buckets: tuple[int, ...] = FEW_BUCKETS, timed: bool = False) -> None:
    """Emulates CUDA graphs on the CPU. Unless `timed`, captures are not timed, and replays count as faster than eager requests."""
    if not timed:
        patch.setattr(captures, "replay_seconds", lambda *_: 0.0)
    patch.setattr(variants, "BUCKETS", buckets)
    for name, value in {
        "CUDAGraph": Tape,
        "graph": captured,
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": Stream,
        "graph_pool_handle": lambda: (0, 0),
        "synchronize": lambda *_: None,
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**40),
    }.items():
        patch.setattr(torch.cuda, name, value)
    for module in (captures, pipeline):
        patch.setattr(module, "graphs_run_on", lambda device: True)
