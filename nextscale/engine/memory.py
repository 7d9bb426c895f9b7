"""Memory of a device and of captured graphs: what there is, segments that grow, the pool of graphs, and where weights lie."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from gc import get_referents
from operator import is_, is_not
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..device import free_memory
from ..errors import OutOfMemory
from ..request import Request

log = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """Bytes of a GPU that this process has."""

    reserved: int
    allocated: int  # of these: by tensors that are alive

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        return cls(torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))

    @staticmethod
    def total(device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).total_memory


def memory_advice(device: torch.device, planned: int, request: Request) -> str:
    return (
        f"{request.batch} image(s) of {request.schedule} on {device} need {planned / 2**30:.2f} GiB for keys and values"
        " besides weights and activations: generate fewer images at a time, a smaller size, or in a smaller dtype"
    )


def require_room(device: torch.device, planned: int, request: Request, captured: int) -> None:
    """Refuses a request whose known need is larger than what is free. `captured`: bytes that captured graphs keep for themselves."""
    free = free_memory(device, captured)
    if free is not None and planned > free:
        raise OutOfMemory(f"{free / 2**30:.2f} GiB are free. {memory_advice(device, planned, request)}")


@contextmanager
def memory_errors(device: torch.device, planned: Callable[[], int], request: Request) -> Iterator[None]:
    """Explains running out of memory on the way."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise OutOfMemory(f"memory ran out. {memory_advice(device, planned(), request)}") from error
        raise


# --- segments that grow
#
# A segment of torch's allocator has a fixed size by default, and what the pool of a capture has taken for the stages does not fit the
# decoder. Segments that grow are cut anew for whatever comes next. What the pool of a capture reserves for infinity-2b, 1024 x 1024
# pixels, one guided image, in bfloat16 on an H200 with torch 2.11:
#     dense     6.2 GB with fixed segments, 4.06 with growing ones
#     StageVAR  3.6                         1.53
#     FastVAR   4.0                         1.81

OPTION = "expandable_segments"
_SETTINGS_LOCK = RLock()
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # newer versions of torch read both, the first one first


@contextmanager
def expandable_segments() -> Iterator[None]:
    """Allocates what is made inside in segments that grow. Settings of the user stay.

    The settings belong to the whole process, so that threads with other GPUs wait.
    """
    with _SETTINGS_LOCK:
        choose, before = allocator_setter(), allocator_settings()
        if choose is None or OPTION in before or "cudaMallocAsync" in before:
            yield
            return
        choose(",".join(filter(None, (before, f"{OPTION}:True"))))
        try:
            yield
        finally:
            choose(f"{OPTION}:False")
            choose(before)  # older versions of torch forget what is not named again


def allocator_settings() -> str:
    """As they were given, in the environment or since."""
    current = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if current is not None:
        return current()
    return ",".join(filter(None, map(os.environ.get, VARIABLES)))


@cache
def allocator_setter() -> Callable[[str], None] | None:
    """Torch has no public name for it. None, and said once, where segments cannot grow."""
    # torch.cuda.memory's own is deprecated where the first one exists.
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if setter is None or sys.platform != "linux" or torch.version.hip is not None:
        log.warning("captures take more memory here: torch %s has no expandable segments on %s", torch.__version__, sys.platform)
        return None
    return setter


# --- the pool of captured graphs


@dataclass(eq=False)
class GraphPool:
    """Where captures lie. They share memory where they share both, since only one is replayed at a time."""

    handle: Any  # torch names no public type
    stream: torch.cuda.Stream  # torch shares a pool's memory within a stream
    begun: int = 0  # captures that have begun, failed ones included

    @classmethod
    def fresh(cls, device: torch.device) -> GraphPool:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched inside becomes the graph. Other threads may allocate meanwhile: theirs is no part of it."""
        self.begun += 1
        try:
            with torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        """Torch leaves the pool of a capture that failed open, and as long as one is open it gives no cached memory back to the device."""
        close = getattr(torch._C, "_cuda_endAllocateToPool", None)  # which has no public name
        if close is not None:
            with suppress(RuntimeError):  # it was closed
                close(self.stream.device_index, self.handle)


# --- weights


class WeightPointers:
    """The addresses of all weights and buffers of some modules, asked before every replay: captured graphs read them there.

    Walking through a model takes milliseconds, so what the walk has found is remembered for as long as the tree of modules is the same.
    The rest is mostly waiting for memory that other work has driven from the caches, so dictionaries are read by `gc.get_referents`, one
    loop in C over all of them: infinity-2b takes 0.45 ms so, 0.1 when it is in the caches, and 0.9 with the dictionaries' own iterators.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._roots = roots
        self._children: list[dict[str, nn.Module | None]] = []
        self._known: list[Any] = []  # all children, in order
        self._tensors: list[dict[str, Any]] = []  # of parameters and buffers

    def now(self) -> tuple[int, ...]:
        if not self._tree_is_known():
            self._walk()
        return tuple(map(Tensor.data_ptr, filter(partial(is_not, None), get_referents(*self._tensors))))

    def _tree_is_known(self) -> bool:
        found = get_referents(*self._children)
        return bool(self._tensors) and len(found) == len(self._known) and all(map(is_, found, self._known))

    def _walk(self) -> None:
        modules = [module for root in self._roots for module in root.modules()]
        self._children = [module._modules for module in modules]
        self._known = get_referents(*self._children)
        self._tensors = [owned for module in modules for owned in (module._parameters, module._buffers)]
