"""Prompts of different length as the keys and values of cross-attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache import real_entries
from ..errors import PromptError
from ..stage import Rows
from ..text.features import TextFeatures

if TYPE_CHECKING:
    from .blocks import Block

MASK_MULTIPLE = 8  # key counts that fused attention with a mask wants


@dataclass(slots=True)
class TextContext:
    """Text keys and values of every layer, [R, T, H, D] each, and which of the T entries are real.

    A single row serves all rows that run, as in STAR's reference implementation (`rows_share_text`).
    """

    keys_values: list[tuple[Tensor, Tensor]]
    lengths: Tensor | None = None  # [R], int32; None when all rows are equally long
    mask: Tensor | None = None  # [R, 1, 1, T], the same as a mask

    def rows(self, rows: Rows) -> TextContext:
        if self.keys_values[0][0].shape[0] == 1:
            return self
        lengths, mask = (None if x is None else x[rows] for x in (self.lengths, self.mask))
        return TextContext([(k[rows], v[rows]) for k, v in self.keys_values], lengths, mask)


def masked_length(tokens: int) -> int:
    """Entries that `tokens` are padded to where a mask says which of them are real."""
    return math.ceil(tokens / MASK_MULTIPLE) * MASK_MULTIPLE


def padded_length(lengths: tuple[int, ...]) -> int:
    """Entries that prompts of these lengths are padded to; those of one length need no mask."""
    return masked_length(max(lengths)) if len(set(lengths)) > 1 else lengths[0]


class Padding:
    """Rows of prompts of different length, from one after another to side by side."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device, least: int = 0) -> None:
        """`least`: pad at least to this length, for those who need one shape for all batches."""
        self.samples = len(lengths)
        self.lengths: Tensor | None = None  # [R]
        self.mask: Tensor | None = None  # [R, 1, 1, T]
        if least or len(set(lengths)) > 1:
            self.padded = masked_length(max(least, *lengths))
            on_host = torch.tensor(lengths, dtype=torch.int32)
            mask = real_entries(on_host, self.padded)
            self.places = mask.flatten().nonzero().squeeze(1).to(device)  # found on the host once: pad() runs for every layer
            self.lengths, self.mask = on_host.to(device), mask.to(device)

    def pad(self, rows: Tensor) -> Tensor:
        """[sum of lengths, ...] to [R, T, ...], zero where a prompt has ended."""
        if self.mask is not None:
            rows = rows.new_zeros(self.samples * self.padded, *rows.shape[1:]).index_copy_(0, self.places, rows)
        return rows.unflatten(0, (self.samples, -1))

    def context(self, blocks: Sequence[Block], text: Tensor) -> TextContext:
        """Keys and values that the blocks compute from the text rows [sum of lengths, C]."""
        padded = [self.pad(block.text_attention.text_keys_values(text)) for block in blocks]
        return TextContext([(kv[:, :, 0], kv[:, :, 1]) for kv in padded], self.lengths, self.mask)


class PaddedAlready(Padding):
    """Rows that lie side by side: `padded` of every prompt, however many of them are real, which the device alone knows."""

    def __init__(self, lengths: Tensor, padded: int) -> None:
        self.samples, self.padded = lengths.shape[0], padded
        self.lengths, self.mask = lengths, real_entries(lengths, padded)

    def pad(self, rows: Tensor) -> Tensor:
        """[R * T, ...] to [R, T, ...]."""
        return rows.unflatten(0, (self.samples, self.padded))


@dataclass(frozen=True, eq=False)
class TextInputs:
    """The prompts of a request, one after another, for models whose blocks attend to them."""

    rows: Tensor  # [sum of lengths, C], of a dtype that does not depend on the prompts
    lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of a row that attention reads, padding included."""
        return padded_length(self.lengths)

    def padding(self) -> Padding:
        return Padding(self.lengths, self.rows.device)


@dataclass(frozen=True, eq=False)
class TextBuffer:
    """`TextInputs` at a fixed address, for prompts up to a length; what lies behind them is never read, but must be finite."""

    rows: Tensor  # [R * length, C]
    lengths: Tensor  # [R], int32
    length: int

    def padding(self) -> PaddedAlready:
        return PaddedAlready(self.lengths, self.length)


def context_bytes(layers: int, rows: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `rows` prompts, the longest of which has this number of tokens."""
    return 2 * layers * rows * masked_length(tokens) * dim * dtype.itemsize


def check_channels(features: TextFeatures, expected: int) -> None:
    if features.channels != expected:
        raise PromptError(f"text features have {features.channels} channels; this model was trained with {expected}")
