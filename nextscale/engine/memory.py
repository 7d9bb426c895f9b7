"""What a device has, and what to say where it is not enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..device import free_memory
from ..errors import OutOfMemory
from ..request import Request


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
