"""One caller at a time on a device.

Captured graphs share their memory, and eager requests would take it from one another. So other threads wait until a call has ended. A
call from inside another (from `on_stage`) does not wait, and runs eagerly: the graphs' memory is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch


class Turn:
    def __init__(self) -> None:
        self._lock = RLock()
        self._depth = 0

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Waits for its turn; yields whether the same thread is inside another call already."""
        with self._lock:
            self._depth += 1
            try:
                yield self._depth > 1
            finally:
                self._depth -= 1


_TURNS: dict[torch.device, Turn] = {}  # of the process, as devices are: several pipelines may share one


def turn_on(device: torch.device) -> Turn:
    return _TURNS.setdefault(device, Turn())  # atomic, which `functools.cache` is not
