"""Sizes and options of the transformer block that all backbones share."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal


@dataclass(frozen=True)
class TextAttentionConfig:
    """Cross-attention to the prompt."""

    channels: int  # of the text features
    cosine: bool = False  # as in BlockConfig
    sharpness: float = 1.0  # of attention without cosine: factor of the usual scale
    learned_norm: bool = False  # the norm before it has a weight and a bias


@dataclass(frozen=True)
class BlockConfig:
    dim: int
    heads: int
    hidden_dim: int
    _: KW_ONLY
    cosine: bool = True  # queries and keys of unit length with a learned temperature per head
    modulation: Literal["own", "shared"] | None = None  # by the condition; "shared": one for all blocks, plus a table per block
    rms_norm: bool = False  # one learned root-mean-square norm for all sublayers, in place of plain layer norms
    gated: bool = False  # feed-forward with a SiLU gate and no biases
    text: TextAttentionConfig | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads
