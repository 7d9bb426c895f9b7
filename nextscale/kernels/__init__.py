"""Triton kernels: each file holds a kernel, its launcher, and the same in plain torch under the name `..._reference`.

    if kernels.available(x):
        y = kernels.norm_modulate(x, scale, shift)

Without them a captured request of infinity-2b, 1024 x 1024 pixels, takes 284 ms and its decoding 123 on an H200; with them 213 and 19.
Triton is imported when the first kernel is used, so that nothing else needs it. All but attention are memory-bound: they read every
input once and write every output once. All compute in float32 and round once; none has a gradient. A kernel is compiled when it first
meets a dtype, a number of channels, heads or groups, a layout, or a size of tiles, which are smaller for small inputs; how many tokens,
pixels and images there are is an argument of the launch. A captured graph does not allow compiling: run a stage once before it is captured.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import attend_lengths
    from .bias_residual import add_bias_residual_, add_bias_residual_sums_
    from .bits import sample_bits
    from .distance import distance_from_mean, mean_over_tokens
    from .group_norm import centred_silu, group_norm_silu
    from .int8 import int8_linear, restore_int8
    from .kv_int8 import dequantize_tokens, quantize_tokens
    from .norm import norm_modulate, residual_norm_modulate
    from .norm_conv import group_norm_silu_conv
    from .quantize import gelu_to_e4m3, round_to_e4m3, silu_to_e4m3
    from .restore import restore_tokens
    from .rotate import rotate_into_cache
    from .topk import topk_indices_sorted
    from .upsample import upsample_nearest

FILES = {
    "attention": ("attend_lengths",),
    "bias_residual": ("add_bias_residual_", "add_bias_residual_sums_"),
    "bits": ("sample_bits",),
    "distance": ("distance_from_mean", "mean_over_tokens"),
    "group_norm": ("centred_silu", "group_norm_silu"),
    "int8": ("int8_linear", "restore_int8"),
    "kv_int8": ("dequantize_tokens", "quantize_tokens"),
    "norm": ("norm_modulate", "residual_norm_modulate"),
    "norm_conv": ("group_norm_silu_conv",),
    "quantize": ("gelu_to_e4m3", "round_to_e4m3", "silu_to_e4m3"),
    "restore": ("restore_tokens",),
    "rotate": ("rotate_into_cache",),
    "topk": ("topk_indices_sorted",),
    "upsample": ("upsample_nearest",),
}
__all__ = ["available", "enabled", *(name for names in FILES.values() for name in names)]
log = logging.getLogger(__name__)

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn})
OLDEST = (8, 0)  # compute capability: bfloat16


def available(tensor: Tensor) -> bool:
    """Whether the kernels can work on tensors like this one, and are wanted. On a CPU only where TRITON_INTERPRET=1 asks for it, as tests
    do; what is compiled is fused by the compiler."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or tensor.dtype not in DTYPES:
        return False
    return enabled(tensor.device)


def enabled(device: torch.device) -> bool:
    """Whether requests on this device run with kernels."""
    if not wanted():
        return False
    if device.type == "cuda":
        return usable(device)
    return os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu" and installed()


@cache
def wanted() -> bool:
    """False with NEXTSCALE_KERNELS=0: plain torch in place of kernels, to find where a difference comes from."""
    return os.environ.get("NEXTSCALE_KERNELS") != "0"


@cache
def installed() -> bool:
    return find_spec("triton") is not None


@cache
def usable(device: torch.device) -> bool:
    """Whether a kernel can be launched, tried once with a trivial one: a system without a C compiler has Triton and cannot use it."""
    if not installed() or torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        found = import_module(".distance", __name__).mean_over_tokens(torch.ones(1, 1, 1, device=device)).item()
        if found != 1:
            raise RuntimeError(f"a kernel was launched on {device} and did not write")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.warning("plain torch runs instead of Triton kernels on %s, since one could not be launched: %s", device, error)
        return False
    return True


def __getattr__(name: str) -> Any:
    for file, kernels in FILES.items():
        if name in kernels:
            found = globals()[name] = getattr(import_module(f".{file}", __name__), name)  # the next use does not come here
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
