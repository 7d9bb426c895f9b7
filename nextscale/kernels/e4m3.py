"""Numbers of eight bits, e4m3: four of the exponent, three of the mantissa, in plain torch. What runs without Triton, too."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """x / scale, rounded; what is too large becomes the largest number, and NaN stays NaN."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def from_e4m3(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_e4m3` was given, as far as eight bits tell."""
    return (x.float() * scale).to(dtype)
