"""Compiles every kernel for a Hopper GPU, on a machine without one: `python -m tests.compile_kernels` prints those that fail.

Launches are taken at the door: Triton compiles for the target and starts nothing, so results are whatever lay in memory. What the
interpreter of other tests takes and the compiler does not, such as shapes that are no powers of two or casts that have no instruction,
shows here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nextscale import kernels
from nextscale.kernels.reference import Int8Tokens
from nextscale_research.methods.attend_lists_kernel import attend_lists

HOPPER = GPUTarget("cuda", 90, 32)
CHANNELS, HEADS, HEAD_DIM = 256, 4, 64


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def image(*shape: int) -> Tensor:
    return tensor(*shape).contiguous(memory_format=torch.channels_last)


def numbers(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def calls() -> dict[str, Callable[[], Any]]:
    """One call for every way in which a kernel is compiled."""
    x, row, weight = tensor(2, 6, CHANNELS), tensor(2, 1, CHANNELS), tensor(CHANNELS)
    index, places = torch.zeros(2, 3, dtype=torch.int64), numbers(6)
    q, keys, values = tensor(2, 6, HEADS, HEAD_DIM), tensor(2, 40, HEADS, HEAD_DIM), tensor(2, 40, HEADS, HEAD_DIM)
    packed = tensor(1, 6, HEADS, HEAD_DIM)
    qkv = tensor(2, 6, 3, HEADS, HEAD_DIM)
    temperature = torch.ones(HEADS, 1)
    rotation, cells = torch.polar(torch.ones(6, HEAD_DIM // 2), torch.zeros(6, HEAD_DIM // 2)), torch.zeros(2, 6, dtype=torch.int64)
    codes = torch.zeros(64, CHANNELS, dtype=torch.int8)
    held = Int8Tokens(*torch.zeros(2, 2, 40, HEADS, HEAD_DIM, dtype=torch.int8), *torch.zeros(2, 2, 40, HEADS))
    pixels, bias = image(1, 64, 16, 16), tensor(64)
    return {
        "norm": lambda: kernels.norm_modulate(x, row, row),
        "norm, learned": lambda: kernels.norm_modulate(x, weight, weight),
        "norm, root mean square": lambda: kernels.norm_modulate(x, weight, None, centered=False),
        "norm, to float32": lambda: kernels.norm_modulate(x, None, None, dtype=torch.float32),
        "norm, gathered": lambda: kernels.norm_modulate(x, row, row, index),
        "norm, packed": lambda: kernels.norm_modulate(x, tensor(4, 1, CHANNELS), tensor(4, 1, CHANNELS), image=places),
        "norm, e4m3": lambda: kernels.norm_modulate(x, row, row, e4m3_scale=0.5),
        "residual and norm": lambda: kernels.residual_norm_modulate(x, row, x, row, row),
        "residual and norm, no gain": lambda: kernels.residual_norm_modulate(x, None, x, None, None),
        "residual and norm, e4m3": lambda: kernels.residual_norm_modulate(x, row, x, row, row, e4m3_scale=0.5),
        "attention": lambda: kernels.attend_lengths(q, keys, values, 40, 0.125),
        "attention, ragged": lambda: kernels.attend_lengths(q, keys, values, numbers(2), 0.125),
        "attention, unit queries": lambda: kernels.attend_lengths(q, keys, values, numbers(2), 0.125, unit=True),
        "attention, packed": lambda: kernels.attend_lengths(packed, keys, values, numbers(2), 0.125, cu_seqlens=numbers(3), longest=6),
        "attention, e4m3": lambda: kernels.attend_lengths(q, keys, values, 40, 0.125, unit=True, e4m3_scale=0.5),
        "attention over lists": lambda: attend_lists(q, keys, values, numbers(1, 1, 2, 32), numbers(1, 1, 2), 4, 0.125),
        "rotation": lambda: kernels.rotate_into_cache(qkv, temperature, rotation, None, keys, values, 4),
        "rotation, at cells": lambda: kernels.rotate_into_cache(qkv, None, rotation, cells, keys, values, 4),
        "no rotation": lambda: kernels.rotate_into_cache(qkv, temperature, None, None, keys, values, 4),
        "keys to eight bits": lambda: kernels.quantize_tokens(keys, values, 4, 6, held),
        "keys to eight bits, ragged": lambda: kernels.quantize_tokens(keys, values, numbers(2), 6, held),
        "keys of eight bits": lambda: kernels.dequantize_tokens(held, keys, values),
        "int8": lambda: kernels.int8_linear(x, codes, torch.ones(64), tensor(64)),
        "int8, restored": lambda: kernels.restore_int8(codes, torch.ones(64), torch.bfloat16),
        "int8, many tokens": lambda: kernels.int8_linear(tensor(2, 32, CHANNELS), codes, torch.ones(64)),
        "e4m3": lambda: kernels.round_to_e4m3(x, 0.5),
        "e4m3, gelu": lambda: kernels.gelu_to_e4m3(x, 0.5),
        "e4m3, silu": lambda: kernels.silu_to_e4m3(x, 0.5),
        "restoration": lambda: kernels.restore_tokens(tensor(2, 4, CHANNELS), (2, 2), (4, 4), tensor(2, 3, CHANNELS), index),
        "restoration, residual": lambda: kernels.restore_tokens(
            tensor(2, 4, CHANNELS), (2, 2), (4, 4), tensor(2, 3, CHANNELS), index, base=tensor(2, 16, CHANNELS), gate=row
        ),
        "distances": lambda: kernels.distance_from_mean(x, kernels.mean_over_tokens(x)),
        "selection": lambda: kernels.topk_indices_sorted(torch.zeros(2, 64), 16),
        "bits": lambda: kernels.sample_bits(torch.zeros(2, 6, 8, 2), torch.ones(2, 6, 8, 2), 0.9),
        "group norm": lambda: kernels.group_norm_silu(pixels, 32, bias, bias, 1e-6, bias),
        "group norm and convolution": lambda: kernels.group_norm_silu_conv(pixels, 32, bias, bias, 1e-6, image(3, 64, 3, 3), tensor(3)),
        "group norm and convolution, 160 channels": lambda: kernels.group_norm_silu_conv(
            image(1, 160, 16, 40), 32, tensor(160), tensor(160), 1e-6, image(3, 160, 3, 3), tensor(3)
        ),
        "centered": lambda: kernels.centered_silu(pixels, torch.zeros(1, 64), torch.zeros(1, 64), bias),
        "bias and residual": lambda: kernels.add_bias_residual_(pixels, bias, pixels.clone(memory_format=torch.preserve_format), bias),
        "bias, residual and sums": lambda: kernels.add_bias_residual_sums_(
            pixels, bias, pixels.clone(memory_format=torch.preserve_format), bias
        ),
        "upsampling": lambda: kernels.upsample_nearest(pixels),
    }  # fmt: skip


def compile_all() -> dict[str, str]:
    """What could not be compiled, and why."""
    driver.set_active(SimpleNamespace(
        get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    ))  # fmt: skip
    compiled: list[str] = []

    def launcher(self: JITFunction, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **settings: Any) -> None:
            self.run(*args, grid=grid, warmup=True, **settings)
            compiled.append(self.fn.__name__)

        return launch

    JITFunction.__getitem__ = launcher
    torch.cuda.device_of = lambda x: nullcontext()  # type: ignore[assignment, misc]
    failed = {}
    for name, call in calls().items():
        before = len(compiled)
        try:
            call()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            if len(compiled) == before:
                failed[name] = "no kernel was launched"
    return failed


if __name__ == "__main__":
    failures = compile_all()
    print(json.dumps(failures, indent=1))
    sys.exit(bool(failures))
