"""Memory of a device and of CUDA graphs: sizes, expandable segments, the graph pool, and addresses of weights."""

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
    """Memory of this process on a GPU, in bytes."""

    reserved: int
    allocated: int  # by live tensors, included in `reserved`

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        return cls(torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))

    @staticmethod
    def total(device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).total_memory


def memory_advice(device: torch.device, planned: int, request: Request) -> str:
    return (
        f"{request.batch} image(s) of {request.schedule} on {device} need {planned / 2**30:.2f} GiB for the KV cache, besides weights and"
        " activations. Generate fewer images at a time, use a smaller size or a smaller dtype."
    )


def require_room(device: torch.device, planned: int, request: Request, captured: int) -> None:
    """Raises OutOfMemory if a request needs more memory than is free. `captured`: bytes that CUDA graphs keep."""
    free = free_memory(device, captured)
    if free is not None and planned > free:
        raise OutOfMemory(f"only {free / 2**30:.2f} GiB are free. {memory_advice(device, planned, request)}")


@contextmanager
def memory_errors(device: torch.device, planned: Callable[[], int], request: Request) -> Iterator[None]:
    """Converts out-of-memory errors to OutOfMemory with advice."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise OutOfMemory(f"out of memory. {memory_advice(device, planned(), request)}") from error
        raise


# --- expandable segments
#
# Segments of torch's allocator have a fixed size by default, and the decoder cannot use those that the stages have allocated in the pool.
# Expandable segments are reused for any size. Reserved memory of the pool for infinity-2b, one image of 1024 x 1024 pixels with CFG in
# bfloat16, on an H200 with torch 2.11:
#     dense     6.2 GB with fixed segments, 4.06 GB with expandable ones
#     StageVAR  3.6                         1.53
#     FastVAR   4.0                         1.81

OPTION = "expandable_segments"
_SETTINGS_LOCK = RLock()
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # newer versions of torch read both, in this order


@contextmanager
def expandable_segments() -> Iterator[None]:
    """Allocates with expandable segments inside the `with` block, unless the user has configured them.

    The setting is global to the process, so other threads wait.
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
            choose(before)  # older versions of torch reset settings that are not repeated


def allocator_settings() -> str:
    """Returns the allocator settings of the environment, or later ones."""
    current = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if current is not None:
        return current()
    return ",".join(filter(None, map(os.environ.get, VARIABLES)))


@cache
def allocator_setter() -> Callable[[str], None] | None:
    """Returns torch's private function for allocator settings, or None, with one warning, without expandable segments."""
    # torch.cuda.memory's function is deprecated in versions that have the first one.
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if setter is None or sys.platform != "linux" or torch.version.hip is not None:
        log.warning("torch %s has no expandable segments on %s: captures need more memory", torch.__version__, sys.platform)
        return None
    return setter


# --- the pool of captured graphs


@dataclass(eq=False)
class GraphPool:
    """Memory pool and stream of all captures, which share memory because only one is replayed at a time."""

    handle: Any  # torch has no public type for it
    stream: torch.cuda.Stream  # torch shares a pool's memory within one stream
    begun: int = 0  # number of captures, including failed ones

    @classmethod
    def fresh(cls, device: torch.device) -> GraphPool:
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Captures the launches inside into the graph. Allocations of other threads are not affected."""
        self.begun += 1
        try:
            with torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        """Closes the pool after a failed capture. Torch leaves it open, and then does not return cached memory to the device."""
        close = getattr(torch._C, "_cuda_endAllocateToPool", None)  # has no public name
        if close is not None:
            with suppress(RuntimeError):  # already closed
                close(self.stream.device_index, self.handle)


# --- weights


class WeightPointers:
    """Addresses of all weights and buffers of some modules, checked before every replay, because CUDA graphs read these addresses.

    Traversing a model takes milliseconds, so the result is cached while the module tree is unchanged. Most of the remaining time is cache
    misses, so `gc.get_referents` reads all dictionaries in one C loop: 0.45 ms for infinity-2b, 0.1 ms with warm caches, against 0.9 ms
    with the dictionaries' iterators.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._roots = roots
        self._children: list[dict[str, nn.Module | None]] = []
        self._known: list[Any] = []  # all children in order
        self._tensors: list[dict[str, Any]] = []  # dictionaries of parameters and buffers

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
