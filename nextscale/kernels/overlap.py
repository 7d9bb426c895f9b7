"""Launches that overlap: a kernel is brought to its multiprocessors while the one before it still runs, and waits there.

CUDA calls it programmatic dependent launch (Hopper and newer). What it saves is the time between two kernels, about a microsecond each;
a block of a small stage is a dozen kernels of a few microseconds. Nothing else changes: a kernel that overlaps reads and writes nothing
before the one before it has ended. Whether it pays is measured by `benchmarks.small_stages`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAPPED = False  # not measured yet: a GPU has not run it
OLDEST = (9, 0)  # compute capability


@triton.jit
def after_previous(OVERLAPPED: tl.constexpr):
    """Waits for the kernel before this one; from then on the next one may come and wait. The first line of a kernel that overlaps."""
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()


def overlap(x: Tensor) -> dict[str, Any]:
    """What a launcher passes to a kernel that works on tensors like this one."""
    if OVERLAPPED and x.is_cuda and overlaps(x.device):
        return {"OVERLAPPED": True, "launch_pdl": True}
    return {"OVERLAPPED": False}


@cache
def overlaps(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST
