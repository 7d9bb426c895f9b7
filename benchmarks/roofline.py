"""The roofline of a request: its minimum time at the measured speed of a large matrix product, reading weights once per stage at the
measured speed of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nextscale.device import Timer
from nextscale.kernels.reference import E4M3
from nextscale.models.base import NextScaleModel
from nextscale.models.macs import macs_per_token
from nextscale.models.quantization import Quantize
from nextscale.planning.cost import BlockMacs, StageCost, Workload, request_cost

MATRIX_SIDE, COPIED_BYTES = 8192, 2**31  # on a GPU
SMALL_SIDE, SMALL_BYTES = 256, 2**22  # elsewhere
TIMED = 20  # runs


@dataclass(frozen=True)
class Rates:
    """Measured speeds of the machine, per second."""

    flops: float  # a MAC counts as two
    bytes: float  # reading and writing
    linear_flops: float | None = None  # of the blocks' linear layers, if they run in another format

    @staticmethod
    def measured(device: torch.device, dtype: torch.dtype, quantize: Quantize | None = None) -> Rates:
        side, size = (MATRIX_SIDE, COPIED_BYTES) if device.type == "cuda" else (SMALL_SIDE, SMALL_BYTES)
        a, b, product = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(3))
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        multiplied = _seconds(device, lambda: torch.mm(a, b, out=product))
        copied = _seconds(device, lambda: target.copy_(source))
        return Rates(2 * side**3 / multiplied, 2 * size / copied, _fp8_flops(a) if quantize == "fp8" else None)

    def to_row(self) -> dict[str, float]:
        fp8 = {} if self.linear_flops is None else {"fp8_tflops": round(self.linear_flops / 1e12, 3)}
        return {"matmul_tflops": round(self.flops / 1e12, 3), "copy_tb_per_s": round(self.bytes / 1e12, 4), **fp8}


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Returns the median time of several runs after a warmup."""
    clock = Timer(device)
    for number in range(-3, TIMED):
        clock.start("work", number)
        work()
        clock.stop("work", number)
    return statistics.median(clock.seconds("work", number) or 0.0 for number in range(TIMED))


@dataclass(frozen=True)
class Roofline:
    """Minimum times in seconds."""

    arithmetic: float  # of all stages
    reading: float  # of weights, once per stage that runs
    both: float  # the larger of the two per stage, because they overlap


def request_roofline(model: NextScaleModel, workload: Workload, shares: Sequence[float], rates: Rates) -> Roofline:
    """Returns the roofline of generation, without decoding, KV cache reads and operations other than matrix products.

    shares: MACs of every stage relative to dense generation, as in a report; 0 for skipped stages.
    """
    block = BlockMacs.of(model, workload)
    of_blocks = len(model.blocks) * (block.attention + block.text + block.feed_forward)
    others = macs_per_token(model.head, model.word_embed) * model.dtype.itemsize
    reading = (of_blocks * (1 if model.quantize else model.dtype.itemsize) + others) / rates.bytes
    dense = request_cost(model, workload).stages
    arithmetic = [share * _seconds_of(stage, rates) for stage, share in zip(dense, shares, strict=True) if share > 0]
    return Roofline(sum(arithmetic), reading * len(arithmetic), sum(max(seconds, reading) for seconds in arithmetic))


def _seconds_of(stage: StageCost, rates: Rates) -> float:
    linear = 2 * stage.linear / (rates.linear_flops or rates.flops)
    return linear + 2 * (stage.attention + stage.head) / rates.flops


def _fp8_flops(matrix: torch.Tensor) -> float:
    """Returns the speed of a square e4m3 matrix product of the size of `matrix`, on a GPU."""
    a, one = matrix.to(E4M3), torch.ones((), device=matrix.device)
    seconds = _seconds(matrix.device, lambda: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    return 2 * matrix.shape[0] ** 3 / seconds
