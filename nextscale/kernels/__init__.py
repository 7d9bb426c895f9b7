"""Triton kernels. Each file holds a kernel, its launcher, and a torch implementation named `..._reference`.

    if kernels.available(x):
        y = kernels.norm_modulate(x, scale, shift)

On an H200, infinity-2b with CUDA graphs takes 284 ms without them and 213 ms with them for 1024 x 1024 pixels, and decoding takes 123 and
19 ms. All kernels but attention are memory-bound: they read every input and write every output once. They compute in float32, round once
and have no gradients. Triton is imported when the first kernel is used.

A kernel is compiled when it first meets a dtype, a layout, a tile size, or a number of channels, heads or groups. The numbers of tokens,
pixels and images are launch arguments. CUDA graph capture does not allow compilation, so run a stage once before it is captured.
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
    from .group_norm import centered_silu, group_norm_silu
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
    "group_norm": ("centered_silu", "group_norm_silu"),
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
MIN_CAPABILITY = (8, 0)  # compute capability with bfloat16


def available(tensor: Tensor) -> bool:
    """Returns True if kernels run on tensors like this one: on a supported device, without gradients and outside torch.compile."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or tensor.dtype not in DTYPES:
        return False
    return enabled(tensor.device)


def enabled(device: torch.device) -> bool:
    """Returns True if requests on this device use kernels: CUDA, or the CPU with TRITON_INTERPRET=1, as in tests."""
    if not wanted():
        return False
    if device.type == "cuda":
        return usable(device)
    return os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu" and installed()


@cache
def wanted() -> bool:
    """Returns False if NEXTSCALE_KERNELS=0, which selects plain torch for debugging."""
    return os.environ.get("NEXTSCALE_KERNELS") != "0"


@cache
def installed() -> bool:
    return find_spec("triton") is not None


@cache
def usable(device: torch.device) -> bool:
    """Returns True if a trivial kernel can be launched. Triton may be installed and still fail, for example without a C compiler."""
    if not installed() or torch.version.hip is not None or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return False
    try:
        found = import_module(".distance", __name__).mean_over_tokens(torch.ones(1, 1, 1, device=device)).item()
        if found != 1:
            raise RuntimeError(f"a test kernel launched on {device} wrote no result")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.warning("Triton kernels are disabled on %s because a test launch failed; using plain torch: %s", device, error)
        return False
    return True


def __getattr__(name: str) -> Any:
    for file, kernels in FILES.items():
        if name in kernels:
            found = globals()[name] = getattr(import_module(f".{file}", __name__), name)  # bypasses __getattr__ next time
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
