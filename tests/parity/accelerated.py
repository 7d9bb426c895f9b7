"""Shared by the cases of acceleration methods on Infinity."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor

from nextscale import Schedule, Stage
from nextscale.sampling import filter_logits
from nextscale.tokenizers import InfinityTokenizer
from tests.parity.compare import Expected, Tolerance
from tests.parity.infinity_cases import OFFICIAL_SAMPLER, to_tokens
from tests.parity.supplied import StoredRng

SAMPLING = {"sampling": "argmax per bit"}  # all else at the top of a case describes how it was made


class SettledBits:
    """Sets a bit to the stored one where its two logits are as close as rounding may bring them. Passed to the pipeline as `revise`.

    `noise` is the largest difference of a logit between two runs of the reference implementation.
    """

    def __init__(self, tokenizer: InfinityTokenizer, expected: Expected, noise: float) -> None:
        self.tokenizer, self.expected, self.noise = tokenizer, expected, noise
        self.settled = 0

    def __call__(self, stage: Stage, codes: Tensor) -> Tensor:
        bits, logits = (self.expected.tensors.get(f"s{stage.index}.{name}") for name in ("bits", "logits"))
        if bits is None or logits is None:
            return codes
        stored = to_tokens(self.tokenizer, bits)
        near = (codes != stored) & self.undecided(stage, logits)
        self.settled += int(near.sum())
        return torch.where(near, stored, codes)

    def undecided(self, stage: Stage, logits: Tensor) -> Tensor:
        return (logits[..., 1] - logits[..., 0]).abs() <= 2 * self.noise

    def __enter__(self) -> SettledBits:
        return self

    def __exit__(self, *_: object) -> None:
        if self.settled:
            warnings.warn(f"{self.settled} bits between nearly equal logits were settled as in the stored run", stacklevel=2)


class SettledDraws(SettledBits):
    """Likewise where bits were drawn: those whose probability is as close to the stored number as rounding may bring it."""

    def undecided(self, stage: Stage, logits: Tensor) -> Tensor:
        zero = filter_logits(logits, **OFFICIAL_SAMPLER).softmax(dim=-1)[..., 0]
        return (zero - self.expected.tensors[f"s{stage.index}.uniform"].view(zero.shape)).abs() <= 2 * self.noise


def bit_rng(expected: Expected, schedule: Schedule) -> StoredRng:
    """Returns random numbers with which our sampler draws the stored bits: 1 if the number is at least the probability of 0.

    Our sampler takes the larger of two ratios of a probability to its number: p0 / u and (1 - p0) / (1 - u).
    """
    drawn = (expected.input(f"s{stage.index}.uniform") for stage in schedule if f"s{stage.index}.uniform" in expected)
    return StoredRng(exponential=map(drawn_bits, drawn))


def drawn_bits(number: Tensor) -> Tensor:
    return torch.stack([number.clamp(min=1e-30), 1 - number], dim=-1)


def stated_tolerance(case: dict[str, Any]) -> Tolerance:
    """Returns the tolerance stated in a case, such as "atol 1e-3 + rtol 1e-3 per stage; ..."."""
    atol, rtol = re.search(r"atol ([\d.e+-]+) \+ rtol ([\d.e+-]+)", case["suggested_tolerance"]["float"]).groups()
    return Tolerance(float(atol), float(rtol))
