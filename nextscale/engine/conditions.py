"""Conditions at fixed addresses, with room for texts of different length."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.base import Conditioning
from ..models.text_context import TextContext

TEXT_WIDTHS = (16, 32, 64, 128, 256, 512)
"""Texts are padded to one of these, so that few recordings serve all prompts."""


def text_width(tokens: int) -> int:
    return next((width for width in TEXT_WIDTHS if width >= tokens), tokens)


def text_tokens(cond: Conditioning) -> int:
    """Of the longest prompt; 0 where blocks do not attend to a text."""
    return 0 if cond.text is None else cond.text.keys_values[0][0].shape[1]


class FixedConditioning:
    """A copy of a condition in which others of the same shape can take its place; their texts may be shorter than `width` tokens."""

    @torch.inference_mode()
    def __init__(self, cond: Conditioning, width: int) -> None:
        self.value = copy.deepcopy(cond)
        if cond.text is not None:
            self.value.text = _widened(cond.text, width)
        self._tensors = list(_tensors(self.value, TextContext))

    @torch.inference_mode()
    def load(self, cond: Conditioning) -> None:
        fresh = list(_tensors(cond, TextContext))
        targets = list(self._tensors)
        if cond.text is not None:
            assert self.value.text is not None and self.value.text.mask is not None
            tokens = text_tokens(cond)
            for (keys, values), (new_keys, new_values) in zip(self.value.text.keys_values, cond.text.keys_values, strict=True):
                targets += [keys.narrow(1, 0, tokens), values.narrow(1, 0, tokens)]
                fresh += [new_keys, new_values]
            self.value.text.mask.zero_()
            told = self.value.text.mask.narrow(3, 0, tokens)
            told.fill_(True) if cond.text.mask is None else told.copy_(cond.text.mask)
        torch._foreach_copy_(targets, fresh)


def _widened(text: TextContext, width: int) -> TextContext:
    """Keys and values with zeros behind them, which the mask hides."""
    rows = text.keys_values[0][0].shape[0]
    device = text.keys_values[0][0].device

    def room(x: Tensor) -> Tensor:
        return x.new_zeros(rows, width, *x.shape[2:])

    mask = torch.zeros(rows, 1, 1, width, dtype=torch.bool, device=device)
    return TextContext([(room(keys), room(values)) for keys, values in text.keys_values], mask)


def _tensors(value: Any, *left_out: type) -> Iterator[Tensor]:
    """All tensors inside nested lists, tuples and objects, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, *left_out)
    elif value is not None and not isinstance(value, left_out):
        names = [field.name for field in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", ()))
        for name in names:
            yield from _tensors(getattr(value, name), *left_out)
