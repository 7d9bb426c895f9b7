"""Texts of different length as the keys and values of cross-attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache import real_entries
from ..errors import PromptError
from ..text.features import TextFeatures

if TYPE_CHECKING:
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


def masked_length(tokens: int) -> int:
    """Room for so many tokens, where a mask says which entries are real."""
    return math.ceil(tokens / MASK_MULTIPLE) * MASK_MULTIPLE


def padded_length(lengths: tuple[int, ...]) -> int:
    """To which texts are padded: those of one length need no mask."""
    return masked_length(max(lengths)) if len(set(lengths)) > 1 else lengths[0]


class Padding:
    """Rows of prompts of different length, from one after another to side by side."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device, width: int = 0) -> None:
        """`width`: pad at least so far, for those who need one shape for all batches."""
        self.samples = len(lengths)
        self.lengths: Tensor | None = None  # [R]
        self.mask: Tensor | None = None  # [R, 1, 1, T]
        if width or len(set(lengths)) > 1:
            self.width = masked_length(max(width, *lengths))
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


class PaddedAlready(Padding):
    """Rows that lie side by side: `width` of every prompt, however many of them are real, which the device alone knows."""

    def __init__(self, lengths: Tensor, width: int) -> None:
        self.samples, self.width = lengths.shape[0], width
        self.lengths, self.mask = lengths, real_entries(lengths, width)

    def pad(self, rows: Tensor) -> Tensor:
        """[R * T, ...] to [R, T, ...]."""
        return rows.unflatten(0, (self.samples, self.width))


@dataclass(frozen=True, eq=False)
class TextInputs:
    """The texts of a request for models whose blocks attend to them, one after another."""

    rows: Tensor  # [sum of lengths, C], of a type that does not depend on the prompts
    lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of a row that attention reads, padding included."""
        return padded_length(self.lengths)

    def padding(self) -> Padding:
        return Padding(self.lengths, self.rows.device)


@dataclass(frozen=True, eq=False)
class TextBuffer:
    """The same at a fixed address, for texts of any length up to a width; what lies behind them is never read, but must be finite."""

    rows: Tensor  # [R * width, C]
    lengths: Tensor  # [R], int32
    length: int

    def padding(self) -> PaddedAlready:
        return PaddedAlready(self.lengths, self.length)


def context_bytes(layers: int, rows: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
    """Memory of the context of `rows` texts, the longest of which has so many tokens."""
    return 2 * layers * rows * masked_length(tokens) * dim * dtype.itemsize


def check_channels(features: TextFeatures, expected: int) -> None:
    if features.channels != expected:
        raise PromptError(f"text features have {features.channels} channels; this model was trained with {expected}")
