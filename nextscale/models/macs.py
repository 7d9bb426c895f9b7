"""Multiply-accumulate operations (MACs) per token, and the number of tokens that each sublayer computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from .quantization import QuantizedLinear


@dataclass(frozen=True, slots=True)
class SublayerTokens:
    """Number of tokens per row that each sublayer of a block computes; `attention` tokens enter the KV cache."""

    attention: int
    text: int
    feed_forward: int

    @classmethod
    def same(cls, num_tokens: int) -> SublayerTokens:
        """Returns the same number for every sublayer."""
        return cls(num_tokens, num_tokens, num_tokens)

    @classmethod
    def total(cls, layers: Iterable[SublayerTokens]) -> SublayerTokens:
        """Returns the sums over these layers."""
        return sum(layers, start=cls.same(0))

    def __add__(self, other: SublayerTokens) -> SublayerTokens:
        return SublayerTokens(self.attention + other.attention, self.text + other.text, self.feed_forward + other.feed_forward)


def macs_per_token(*modules: nn.Module) -> int:
    """Returns the MACs of one token through all linear layers of these modules."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear | QuantizedLinear))
    return sum(layer.in_features * layer.out_features for layer in layers)
