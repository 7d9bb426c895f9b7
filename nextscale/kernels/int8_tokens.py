"""Tokens in 8 bits in plain torch: the references of `quantize_tokens` and `dequantize_tokens`, and what runs without Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import require_shape

LARGEST = 127
SMALLEST_SCALE = 1e-30  # only keeps a zero vector from dividing by zero


def require_stores(source: Tensor, start: int | Tensor, new: int, numbers: Tensor, scales: Tensor) -> None:
    rows, tokens, heads, channels = source.shape
    room = numbers.shape[1]
    require_shape("numbers", numbers, rows, room, heads, channels)
    require_shape("scales", scales, rows, room, heads)
    if isinstance(start, Tensor):
        require_shape("start", start, rows)
    elif not 0 <= start <= min(tokens, room) - new:
        raise ValueError(f"{new} tokens from {start} on do not fit into {min(tokens, room)}")


def quantize_tokens_reference(source: Tensor, start: int | Tensor, new: int, numbers: Tensor, scales: Tensor) -> None:
    require_stores(source, start, new, numbers, scales)
    if isinstance(start, int):
        fresh = source.narrow(1, start, new)
    else:
        row = torch.arange(source.shape[0], device=source.device)[:, None]
        entry = start[:, None].long() + torch.arange(new, device=source.device)
        fresh = source[row, entry]
    fresh = fresh.float()
    scale = (fresh.abs().amax(dim=-1) / LARGEST).clamp(min=SMALLEST_SCALE)
    rounded = (fresh / scale[..., None] + 0.5).floor().clamp(-LARGEST, LARGEST).to(torch.int8)
    if isinstance(start, int):
        numbers.narrow(1, start, new).copy_(rounded)
        scales.narrow(1, start, new).copy_(scale)
    else:
        numbers[row, entry], scales[row, entry] = rounded, scale


def dequantize_tokens_reference(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    require_shape("numbers", numbers, *out.shape)
    require_shape("scales", scales, *out.shape[:3])
    out.copy_(numbers.float() * scales[..., None])
