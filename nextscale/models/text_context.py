"""Keys and values of prompts of different lengths, for cross-attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache import real_entries
from ..errors import PromptError
from ..stage import Rows
from ..text.features import TextFeatures

if TYPE_CHECKING:
    from .blocks import Block

MASK_MULTIPLE = 8  # fused attention with a mask needs key counts that are multiples of this


def masked_length(tokens: int) -> int:
    """Rounds a text length up to the number of keys that masked attention uses."""
    return math.ceil(tokens / MASK_MULTIPLE) * MASK_MULTIPLE


@dataclass(frozen=True, eq=False)
class TextInputs:
    """Features of all prompts, concatenated, for models with cross-attention to the text.

    CUDA graphs need fixed shapes: each prompt then occupies `room` rows, and `counts` holds the number of real rows on the device. Padding
    rows are masked, but must be finite.
    """

    rows: Tensor  # [sum of lengths, C], or [R * room, C] with `counts`; the dtype must not depend on the prompts
    lengths: tuple[int, ...] = ()
    room: int = 0
    counts: Tensor | None = None  # [R], int32; set together with `room`

    @property
    def length(self) -> int:
        """Number of keys per row, including padding."""
        return self.room or (masked_length(max(self.lengths)) if len(set(self.lengths)) > 1 else self.lengths[0])

    def context(self) -> TextContext:
        if self.counts is None:
            return TextContext.of(self.lengths, self.rows.device)
        return TextContext(self.counts.shape[0], self.counts, real_entries(self.counts, self.room))


@dataclass(slots=True)
class TextContext:
    """Text keys and values of every layer, with a mask of the real entries.

    All rows may share a single row of keys and values, as in STAR's reference implementation (`rows_share_text`).
    """

    prompts: int
    lengths: Tensor | None = None  # [R], int32; None if all rows are equally long
    mask: Tensor | None = None  # [R, 1, 1, T], equivalent to `lengths`
    places: Tensor | None = None  # [sum of lengths], indices of the text rows among the padded rows; None if already padded
    keys_values: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # [R, T, H, D] each, per layer

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device, least: int = 0) -> TextContext:
        """Builds the mask for prompts of these lengths, padded to at least `least` tokens."""
        if not least and len(set(lengths)) == 1:
            return cls(len(lengths))
        on_host = torch.tensor(lengths, dtype=torch.int32)
        mask = real_entries(on_host, masked_length(max(least, *lengths)))
        places = mask.flatten().nonzero().squeeze(1)  # on the host and once, because pad() runs for every layer
        return cls(len(lengths), on_host.to(device), mask.to(device), places.to(device))

    def pad(self, rows: Tensor) -> Tensor:
        """Pads text rows [sum of lengths, ...] with zeros to [R, T, ...]."""
        if self.places is not None and self.mask is not None:
            rows = rows.new_zeros(self.mask.numel(), *rows.shape[1:]).index_copy_(0, self.places, rows)
        return rows.unflatten(0, (self.prompts, -1))

    def project(self, blocks: Sequence[Block], text: Tensor) -> TextContext:
        """Computes the keys and values of all blocks from text rows [sum of lengths, C]."""
        padded = [self.pad(block.text_attention.text_keys_values(text)) for block in blocks]
        self.keys_values = [(kv[:, :, 0], kv[:, :, 1]) for kv in padded]
        return self

    def rows(self, rows: Rows) -> TextContext:
        if self.prompts == 1:
            return self
        lengths, mask = (None if x is None else x[rows] for x in (self.lengths, self.mask))
        keys_values = [(k[rows], v[rows]) for k, v in self.keys_values]
        return replace(self, prompts=keys_values[0][0].shape[0], lengths=lengths, mask=mask, places=None, keys_values=keys_values)


def context_bytes(layers: int, rows: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
    """Returns the size of the keys and values of `rows` prompts in bytes; `tokens` is the longest prompt's length."""
    return 2 * layers * rows * masked_length(tokens) * dim * dtype.itemsize


def check_channels(features: TextFeatures, expected: int) -> None:
    if features.channels != expected:
        raise PromptError(f"text features must have {expected} channels for this model; got {features.channels}.")
