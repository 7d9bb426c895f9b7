"""Memory that grows in place, for captures.

A segment of torch's allocator has a fixed size by default, and what the pool of a capture has taken for the stages does not fit the
decoder. Segments that grow are cut anew for whatever comes next. What the pool of a capture reserves for infinity-2b, 1024 x 1024
pixels, one guided image, in bfloat16 on an H200 with torch 2.11:
    dense     6.2 GB with fixed segments, 4.06 with growing ones
    StageVAR  3.6                         1.53
    FastVAR   4.0                         1.81
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock

import torch

log = logging.getLogger(__name__)

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
