"""Adaptive layer norm (AdaLN): scales, shifts and gates that the condition applies to the blocks and the head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..stage import Rows


class Modulation(NamedTuple):
    """Gates, scales and shifts of one block, [R, 1, C] each; scales include the added 1."""

    attention_gate: Tensor
    feed_forward_gate: Tensor
    attention_scale: Tensor
    feed_forward_scale: Tensor
    attention_shift: Tensor
    feed_forward_shift: Tensor

    @classmethod
    def of_layers(cls, six: Tensor, dtype: torch.dtype) -> list[Modulation]:
        """Splits [L, R, 6, C], in the published order of two gates, two scales and two shifts, into one modulation per layer."""
        one = six.new_zeros(6, 1)
        one[2:4].fill_(1)  # filled on the device: a CUDA graph cannot copy a tensor from the host
        return [cls(*layer.unsqueeze(2).unbind(1)) for layer in (six + one).to(dtype)]

    def rows(self, rows: Rows) -> Modulation:
        return Modulation(*(part[rows] for part in self))


class HeadModulation(NamedTuple):
    """Scale and shift of the hidden states before the head, [R, 1, C] each; the scale includes the added 1."""

    scale: Tensor
    shift: Tensor

    def rows(self, rows: Rows) -> HeadModulation:
        return HeadModulation(self.scale[rows], self.shift[rows])
