"""Eight-bit numbers in plain torch: e4m3, and int8 keys and values. It runs without Triton, too."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
INT8_MAX = 127
MIN_SCALE = 1e-30  # only keeps a zero vector from dividing by zero


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """x / scale, rounded; what is too large becomes the largest number, and NaN stays NaN."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def from_e4m3(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_e4m3` was given, as far as eight bits tell."""
    return (x.float() * scale).to(dtype)


class Int8Tokens(NamedTuple):
    """Whole numbers from -127 to 127, and what multiplies those of a head."""

    keys: Tensor  # [R, S, H, D], int8
    values: Tensor
    key_scales: Tensor  # [R, S, H], float32
    value_scales: Tensor

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Numbers and scales of keys, then of values."""
        return (self.keys, self.key_scales), (self.values, self.value_scales)


def quantize_tokens_reference(keys: Tensor, values: Tensor, start: int | Tensor, new: int, store: Int8Tokens) -> None:
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    begin = start[:, None].long() if isinstance(start, Tensor) else start
    entry = begin + torch.arange(new, device=keys.device)[None]
    for source, (numbers, scales) in zip((keys, values), store.pairs, strict=True):
        fresh = source[row, entry].float()
        scale = (fresh.abs().amax(dim=-1) / INT8_MAX).clamp(min=MIN_SCALE)
        numbers[row, entry] = (fresh / scale[..., None] + 0.5).floor().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        scales[row, entry] = scale


def dequantize_tokens_reference(store: Int8Tokens, keys: Tensor, values: Tensor) -> None:
    tokens = keys.shape[1]
    for target, (numbers, scales) in zip((keys, values), store.pairs, strict=True):
        target.copy_(numbers[:, :tokens].float() * scales[:, :tokens, :, None])
