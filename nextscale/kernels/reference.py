"""8-bit formats in plain torch, without Triton: e4m3, and int8 keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
INT8_MAX = 127
MIN_SCALE = 1e-30  # avoids division by zero for zero vectors


def to_e4m3(x: Tensor, scale: float) -> Tensor:
    """Returns x / scale in e4m3. Values out of range are clamped; NaN stays NaN."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def from_e4m3(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the dequantized values of `to_e4m3`."""
    return (x.float() * scale).to(dtype)


class Int8Tokens(NamedTuple):
    """int8 keys and values in [-127, 127], with one scale per token and head."""

    keys: Tensor  # [R, S, H, D], int8
    values: Tensor
    key_scales: Tensor  # [R, S, H], float32
    value_scales: Tensor

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Codes and scales of the keys, then of the values."""
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
