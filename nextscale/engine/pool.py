"""The memory of captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch


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
