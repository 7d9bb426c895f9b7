"""Shared by the cases of acceleration methods on Infinity."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor

from nextscale import Stage
from nextscale.tokenizers import InfinityTokenizer

from .compare import Expected, Tolerance
from .infinity_cases import to_tokens

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
        near = (codes != stored) & ((logits[..., 1] - logits[..., 0]).abs() <= 2 * self.noise)
        self.settled += int(near.sum())
        return torch.where(near, stored, codes)

    def __enter__(self) -> SettledBits:
        return self

    def __exit__(self, *_: object) -> None:
        if self.settled:
            warnings.warn(f"{self.settled} bits between nearly equal logits were settled as in the stored run", stacklevel=2)


def stated_tolerance(case: dict[str, Any]) -> Tolerance:
    """The tolerance that a case states, such as "atol 1e-3 + rtol 1e-3 per stage; ..."."""
    atol, rtol = re.search(r"atol ([\d.e+-]+) \+ rtol ([\d.e+-]+)", case["suggested_tolerance"]["float"]).groups()
    return Tolerance(float(atol), float(rtol))
