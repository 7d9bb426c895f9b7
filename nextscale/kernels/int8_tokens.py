"""Keys and values in 8 bits in plain torch: the references of `quantize_tokens` and `dequantize_tokens`, and what runs without Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import require_shape

LARGEST = 127
SMALLEST_SCALE = 1e-30  # only keeps a zero vector from dividing by zero


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


def require_stores(keys: Tensor, values: Tensor, store: Int8Tokens) -> None:
    rows, tokens, heads, channels = keys.shape
    require_shape("values", values, rows, tokens, heads, channels)
    for name, (numbers, scales) in zip(("keys", "values"), store.pairs, strict=True):
        require_shape(f"the store of {name}", numbers, rows, numbers.shape[1], heads, channels)
        require_shape(f"the scales of {name}", scales, *store.keys.shape[:3])


def require_room(keys: Tensor, start: int | Tensor, new: int, store: Int8Tokens) -> None:
    room = min(keys.shape[1], store.keys.shape[1])
    if isinstance(start, Tensor):
        require_shape("start", start, keys.shape[0])
    elif not 0 <= start <= room - new:
        raise ValueError(f"{new} tokens from {start} on do not fit into {room}")


def quantize_tokens_reference(keys: Tensor, values: Tensor, start: int | Tensor, new: int, store: Int8Tokens) -> None:
    require_stores(keys, values, store)
    require_room(keys, start, new, store)
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    begin = start[:, None].long() if isinstance(start, Tensor) else start
    entry = begin + torch.arange(new, device=keys.device)[None]
    for source, (numbers, scales) in zip((keys, values), store.pairs, strict=True):
        fresh = source[row, entry].float()
        scale = (fresh.abs().amax(dim=-1) / LARGEST).clamp(min=SMALLEST_SCALE)
        numbers[row, entry] = (fresh / scale[..., None] + 0.5).floor().clamp(-LARGEST, LARGEST).to(torch.int8)
        scales[row, entry] = scale


def dequantize_tokens_reference(store: Int8Tokens, keys: Tensor, values: Tensor) -> None:
    require_stores(keys, values, store)
    tokens = keys.shape[1]
    for target, (numbers, scales) in zip((keys, values), store.pairs, strict=True):
        target.copy_(numbers[:, :tokens].float() * scales[:, :tokens, :, None])
