"""Measures each kernel: time, bytes per second, and the time of its torch reference.

    python -m benchmarks.kernels [--out FILE] [NAME ...]

Sizes are taken from infinity-2b at 1024 x 1024 with CFG (two rows), and of one image in the decoder. "mb" is the required traffic, every
input and output once; "tb_s" is that divided by the median time; "floor_ms" is the minimum time at the copy speed of an H200. Between runs
only triton.testing.do_bench clears the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nextscale.eval.results import Row

from .results import measure, options, record, require_gpu

COPY_TB_S = 4.3  # reading and writing on an H200
DIM, HEADS, HEAD_DIM, BITS = 2048, 16, 128, 32
SIDES = (16, 32, 40, 64)  # of stages
MEMORY = (24, 24)
KEPT = 0.5
MAPS = ((128, 1024), (256, 512), (512, 256), (512, 64))  # channels and side of levels of the decoder
LAST_MAPS = ((128, 1024), (160, 256), (64, 512))  # of the last level: Infinity, VAR and nano
QUANTILES = (0.5, 0.2, 0.8)


@dataclass(frozen=True)
class Case:
    kernel: str
    shape: tuple[int, ...]
    bytes: int
    run: Callable[..., Any]
    reference: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.shape))}"


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cases(device: str, dtype: torch.dtype, rows: int = 2) -> Iterator[Case]:
    from nextscale.kernels.bits import sample_bits, sample_bits_reference
    from nextscale.kernels.distance import (
        distance_from_mean,
        distance_from_mean_reference,
        mean_over_tokens,
        mean_over_tokens_reference,
    )
    from nextscale.kernels.kv_int8 import dequantize_tokens, dequantize_tokens_reference, quantize_tokens, quantize_tokens_reference
    from nextscale.kernels.norm import (
        norm_modulate,
        norm_modulate_reference,
        residual_norm_modulate,
        residual_norm_modulate_reference,
    )
    from nextscale.kernels.reference import Int8Tokens
    from nextscale.kernels.restore import restore_tokens, restore_tokens_reference
    from nextscale.kernels.rotate import rotate_into_cache, rotate_into_cache_reference
    from nextscale.kernels.topk import topk_indices_sorted, topk_indices_sorted_reference

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    for side in SIDES:
        tokens = side * side
        x, update = normal(rows, tokens, DIM), normal(rows, tokens, DIM)
        gate, scale, shift = normal(rows, 6, DIM)[:, :3, None].unbind(1)
        kept = int(tokens * KEPT)
        index = torch.rand(rows, tokens, generator=generator, device=device).argsort(dim=1)[:, :kept].sort(dim=1).values
        whole = size(x)

        def case(
            kernel: Callable[..., Any], reference: Callable[..., Any], shape: tuple[int, ...], moved: int, *inputs: Any, **settings: Any
        ) -> Case:
            return Case(kernel.__name__, shape, moved, partial(kernel, *inputs, **settings), partial(reference, *inputs, **settings))

        shape = (rows, tokens, DIM)
        yield case(norm_modulate, norm_modulate_reference, shape, 2 * whole, x, scale, shift)
        yield case(norm_modulate, norm_modulate_reference, (rows, kept, DIM), 2 * (whole * kept // tokens), x, scale, shift, index)
        yield case(residual_norm_modulate, residual_norm_modulate_reference, shape, 4 * whole, x, gate, update, scale, shift)
        qkv, angles = normal(rows, tokens, 3, HEADS, HEAD_DIM), normal(tokens, HEAD_DIM // 2, dtype=torch.float32)
        keys, values = (torch.empty(rows, tokens + 697, HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
        rotation, temperature = torch.polar(torch.ones_like(angles), angles), normal(HEADS, dtype=torch.float32).exp()
        inputs = qkv, temperature, rotation, None, keys, values, 697
        yield case(rotate_into_cache, rotate_into_cache_reference, tuple(qkv.shape), 2 * size(qkv), *inputs)
        keys, values = (part.contiguous() for part in qkv.unbind(2)[:2])
        store = Int8Tokens(*torch.zeros(2, *keys.shape, dtype=torch.int8, device=device), *torch.ones(2, *keys.shape[:3], device=device))
        moved = size(keys, values, *store)
        yield case(quantize_tokens, quantize_tokens_reference, tuple(keys.shape), moved, keys, values, 0, tokens, store)
        yield case(dequantize_tokens, dequantize_tokens_reference, tuple(keys.shape), moved, store, keys, values)
        if side > MEMORY[0]:
            memory, fresh = normal(rows, MEMORY[0] * MEMORY[1], DIM), normal(rows, kept, DIM)
            inputs = memory, MEMORY, (side, side), fresh, index
            moved = 2 * whole + size(memory, fresh)
            yield case(restore_tokens, restore_tokens_reference, shape, moved, *inputs, base=x, gate=gate)
        yield case(mean_over_tokens, mean_over_tokens_reference, shape, whole, x)
        mean = x.mean(dim=1, keepdim=True, dtype=torch.float32)
        yield case(distance_from_mean, distance_from_mean_reference, shape, whole, x, mean)
        score = normal(rows, tokens, dtype=torch.float32)
        moved = size(score) + rows * kept * 8
        yield case(topk_indices_sorted, topk_indices_sorted_reference, (rows, tokens), moved, score, kept)
        logits = normal(1, tokens, BITS, 2, dtype=torch.float32)
        noise = normal(1, tokens, BITS, 2, dtype=torch.float32).exp()
        moved = size(logits, noise) + tokens * BITS * 8
        yield case(sample_bits, sample_bits_reference, tuple(logits.shape), moved, logits, noise, top_p=0.97)


def decoder_cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases in channels-last layout. Group norm reads its input twice. Inputs that are updated in place grow from run to run."""
    from nextscale.kernels.bias_residual import add_bias_residual_, add_bias_residual_reference
    from nextscale.kernels.group_norm import group_norm_silu, group_norm_silu_reference
    from nextscale.kernels.norm_conv import group_norm_silu_conv, group_norm_silu_conv_reference
    from nextscale.kernels.upsample import upsample_nearest, upsample_nearest_reference

    for channels, side in MAPS:
        x, residual = torch.randn(2, 1, channels, side, side, device=device, dtype=dtype)
        x, residual = (image.contiguous(memory_format=torch.channels_last) for image in (x, residual))
        weight, bias, shift = torch.randn(3, channels, device=device, dtype=dtype)
        for kernel, reference, inputs, maps in (
            (group_norm_silu, group_norm_silu_reference, (x, 32, weight, bias, 1e-6, shift), 3),
            (add_bias_residual_, add_bias_residual_reference, (x, bias, residual), 3),
            (upsample_nearest, upsample_nearest_reference, (x,), 5),
        ):
            yield Case(kernel.__name__, tuple(x.shape), maps * size(x), partial(kernel, *inputs), partial(reference, *inputs))
    for channels, side in LAST_MAPS:
        x = torch.randn(1, channels, side, side, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(2, channels, device=device, dtype=dtype)
        last = torch.randn(3, channels, 3, 3, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        inputs = (x, 32, weight, bias, 1e-6, last, bias[:3])
        both = partial(group_norm_silu_conv, *inputs), partial(group_norm_silu_conv_reference, *inputs)
        yield Case("group_norm_silu_conv", tuple(x.shape), 2 * size(x), *both)


def milliseconds(run: Callable[[], Any]) -> dict[str, float]:
    from triton.testing import do_bench

    median, p20, p80 = do_bench(run, quantiles=list(QUANTILES))
    return {"median_ms": round(median, 5), "p20_ms": round(p20, 5), "p80_ms": round(p80, 5)}


def timed(case: Case) -> dict[str, Any]:
    found = milliseconds(case.run)
    row: dict[str, Any] = {
        **found,
        "mb": round(case.bytes / 1e6, 2),
        "tb_s": round(case.bytes / found["median_ms"] / 1e9, 3),
        "floor_ms": round(case.bytes / COPY_TB_S / 1e9, 5),
        "reference": milliseconds(case.reference),
    }
    row["speedup"] = round(row["reference"]["median_ms"] / found["median_ms"], 2)
    return row


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Yields rows of the kernels with these names, or of all without names."""
    for case in chain(cases("cuda", torch.bfloat16), decoder_cases("cuda", torch.bfloat16)):
        if names and case.kernel not in names:
            continue
        config = {"case": case.name, "kernel": case.kernel, "shape": list(case.shape), "dtype": "bfloat16", "quality": None}
        yield measure("kernels", config, partial(timed, case))


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels, for example norm_modulate; default: all")
    args = parser.parse_args()
    require_gpu(parser, "kernels are measured")
    record(rows(args.names), args.out)


if __name__ == "__main__":
    main()
