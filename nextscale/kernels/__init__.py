"""Triton kernels: each file holds a kernel, its launcher, and the same in plain torch under the name `..._reference`.

    if kernels.available(x):
        y = kernels.norm_modulate(x, scale, shift)

Triton is imported when the first kernel is used, so that nothing else needs it. All but attention are memory-bound: they read every
input once and write every output once. All compute in float32 and round once; none has a gradient. A kernel is compiled when it first
meets a width and a dtype, which a captured graph does not allow: run a stage once before it is captured.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import attend_lengths
    from .bits import draw_bits
    from .distance import distance_from_mean, mean_over_tokens
    from .largest import places_of_largest
    from .norm import norm_modulate, residual_norm_modulate
    from .restore import restore_tokens
    from .rotate import rotate_into_cache

__all__ = [
    "attend_lengths",
    "available",
    "distance_from_mean",
    "draw_bits",
    "mean_over_tokens",
    "norm_modulate",
    "places_of_largest",
    "residual_norm_modulate",
    "restore_tokens",
    "rotate_into_cache",
]

FILES = {
    "attend_lengths": "attention",
    "norm_modulate": "norm",
    "residual_norm_modulate": "norm",
    "rotate_into_cache": "rotate",
    "restore_tokens": "restore",
    "distance_from_mean": "distance",
    "mean_over_tokens": "distance",
    "places_of_largest": "largest",
    "draw_bits": "bits",
}
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
OLDEST = (8, 0)  # compute capability: bfloat16


def available(tensor: Tensor) -> bool:
    """Whether the kernels can work on tensors like this one, and are wanted. On a CPU only where TRITON_INTERPRET=1 asks for it, as tests
    do."""
    return not torch.is_grad_enabled() and tensor.dtype in DTYPES and enabled(tensor.device)


def enabled(device: torch.device) -> bool:
    """Whether requests on this device run with kernels."""
    if not wanted():
        return False
    if device.type == "cuda":
        return usable(device)
    return os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu" and installed()


@cache
def wanted() -> bool:
    """Not with NEXTSCALE_KERNELS=0: plain torch in their place, to tell where a difference comes from."""
    return os.environ.get("NEXTSCALE_KERNELS") != "0"


@cache
def installed() -> bool:
    return find_spec("triton") is not None


@cache
def usable(device: torch.device) -> bool:
    return installed() and torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST


def __getattr__(name: str) -> Any:
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{FILES[name]}", __name__), name)
    globals()[name] = found  # the next use does not come here
    return found
