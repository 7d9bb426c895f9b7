"""Prompts of different length as the keys and values of cross-attention."""

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

MASK_MULTIPLE = 8  # key counts that fused attention with a mask wants


def masked_length(tokens: int) -> int:
    """Returns the entries that `tokens` are padded to where a mask marks the real ones."""
    return math.ceil(tokens / MASK_MULTIPLE) * MASK_MULTIPLE


@dataclass(frozen=True, eq=False)
class TextInputs:
    """The prompts of a request, one after another, for models whose blocks attend to them.

    A captured graph reads them at fixed addresses: every prompt has `room` rows then, and the device alone knows how many are real. The
    others are never read, but must be finite.
    """

    rows: Tensor  # [sum of lengths, C], or [R * room, C]; of a dtype that does not depend on the prompts
    lengths: tuple[int, ...] = ()
    room: int = 0
    counts: Tensor | None = None  # [R], int32, with `room`

    @property
    def length(self) -> int:
        """Tokens of a row that attention reads, padding included."""
        return self.room or (masked_length(max(self.lengths)) if len(set(self.lengths)) > 1 else self.lengths[0])

    def context(self) -> TextContext:
        if self.counts is None:
            return TextContext.of(self.lengths, self.rows.device)
        return TextContext(self.counts.shape[0], self.counts, real_entries(self.counts, self.room))


@dataclass(slots=True)
class TextContext:
    """Prompts side by side: text keys and values of every layer, and which of the T entries of each row are real.

    A single row serves all rows that run, as in STAR's reference implementation (`rows_share_text`).
    """

    prompts: int
    lengths: Tensor | None = None  # [R], int32; None when all rows are equally long
    mask: Tensor | None = None  # [R, 1, 1, T], the same as a mask
    places: Tensor | None = None  # [sum of lengths], of text rows among the padded ones; None if they are padded already
    keys_values: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # [R, T, H, D] each, per layer

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device, least: int = 0) -> TextContext:
        """Lays out prompts of these lengths, padded at least to `least` if one shape has to do for all batches."""
        if not least and len(set(lengths)) == 1:
            return cls(len(lengths))
        on_host = torch.tensor(lengths, dtype=torch.int32)
        mask = real_entries(on_host, masked_length(max(least, *lengths)))
        places = mask.flatten().nonzero().squeeze(1)  # found on the host once: pad() runs for every layer
        return cls(len(lengths), on_host.to(device), mask.to(device), places.to(device))

    def pad(self, rows: Tensor) -> Tensor:
        """Moves text rows [sum of lengths, ...] to [R, T, ...], zero where a prompt has ended."""
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
    """Returns the bytes of the keys and values of `rows` prompts, the longest of which has this number of tokens."""
    return 2 * layers * rows * masked_length(tokens) * dim * dtype.itemsize


def check_channels(features: TextFeatures, expected: int) -> None:
    if features.channels != expected:
        raise PromptError(f"text features must have {expected} channels for this model; got {features.channels}")
