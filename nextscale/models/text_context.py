"""Texts of different length as the keys and values of cross-attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import real_entries
from ..errors import PromptError
from ..text.features import TextFeatures
from .blocks import Block

MASK_MULTIPLE = 8  # key counts that fused attention with a mask wants


@dataclass(slots=True)
class TextContext:
    """Text keys and values of every layer, [R, T, H, D] each, and which of the T entries are real.

    A single row among several speaks to all of them, as in STAR's released program.
    """

    keys_values: list[tuple[Tensor, Tensor]]
    lengths: Tensor | None = None  # [R], int32; None when all rows are equally long
    mask: Tensor | None = None  # [R, 1, 1, T], says the same

    def rows(self, rows: slice) -> TextContext:
        if self.keys_values[0][0].shape[0] == 1:
            return self
        told = (None if told is None else told[rows] for told in (self.lengths, self.mask))
        return TextContext([(k[rows], v[rows]) for k, v in self.keys_values], *told)


class Padding:
    """Rows of prompts of different length, from one after another to side by side."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device, width: int = 0) -> None:
        """`width`: pad at least so far, for those who need one shape for all batches."""
        self.samples = len(lengths)
        self.lengths: Tensor | None = None  # [R]
        self.mask: Tensor | None = None  # [R, 1, 1, T]
        if width or len(set(lengths)) > 1:
            self.width = math.ceil(max(width, *lengths) / MASK_MULTIPLE) * MASK_MULTIPLE
            told = torch.tensor(lengths, dtype=torch.int32)
            mask = real_entries(told, self.width)
            self.places = mask.flatten().nonzero().squeeze(1).to(device)  # found on the host once: pad() runs for every layer
            self.lengths, self.mask = told.to(device), mask.to(device)

    def pad(self, rows: Tensor) -> Tensor:
        """[sum of lengths, ...] to [R, T, ...], zero where a prompt has ended."""
        if self.mask is not None:
            rows = rows.new_zeros(self.samples * self.width, *rows.shape[1:]).index_copy_(0, self.places, rows)
        return rows.unflatten(0, (self.samples, -1))

    def context(self, blocks: Sequence[Block], text: Tensor) -> TextContext:
        """What the blocks make of the text rows [sum of lengths, C]."""
        padded = [self.pad(block.text_attention.text_keys_values(text)) for block in blocks]
        return TextContext([(kv[:, :, 0], kv[:, :, 1]) for kv in padded], self.lengths, self.mask)


def context_bytes(layers: int, rows: int, tokens: int, width: int, dtype: torch.dtype) -> int:
    """Memory of the context of `rows` texts, the longest of which has so many tokens."""
    padded = math.ceil(tokens / MASK_MULTIPLE) * MASK_MULTIPLE
    return 2 * layers * rows * padded * width * dtype.itemsize


def check_channels(features: TextFeatures, expected: int) -> None:
    if features.channels != expected:
        raise PromptError(f"text features have {features.channels} channels; this model was trained with {expected}")
