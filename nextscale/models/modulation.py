"""What the condition does to the hidden states of every block and of the head: scales, shifts and gains."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..stage import Rows


class Modulation(NamedTuple):
    """Condition-dependent gains, scales and shifts of one block, [R, 1, C] each; scales are stored with the 1 added."""

    attention_gate: Tensor
    feed_forward_gate: Tensor
    attention_scale: Tensor
    feed_forward_scale: Tensor
    attention_shift: Tensor
    feed_forward_shift: Tensor

    @classmethod
    def of_layers(cls, six: Tensor, dtype: torch.dtype) -> list[Modulation]:
        """One per layer from [L, R, 6, C] in the published order: two gains, two scales, two shifts."""
        one = six.new_zeros(6, 1)
        one[2:4].fill_(1)  # on the device: a captured graph cannot take a tensor from the host
        return [cls(*layer.unsqueeze(2).unbind(1)) for layer in (six + one).to(dtype)]

    def rows(self, rows: Rows) -> Modulation:
        return Modulation(*(part[rows] for part in self))


class HeadModulation(NamedTuple):
    """What the condition does to the hidden states before the head, [R, 1, C] each; the scale is stored with the 1 added."""

    scale: Tensor
    shift: Tensor

    def rows(self, rows: Rows) -> HeadModulation:
        return HeadModulation(self.scale[rows], self.shift[rows])
