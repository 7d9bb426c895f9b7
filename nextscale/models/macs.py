"""Multiply-accumulate operations (MACs), from sizes alone: what one token costs, and how many tokens the sublayers of a block compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from .quantization import QuantizedLinear


@dataclass(frozen=True, slots=True)
class SublayerTokens:
    """How many tokens of a row each sublayer of a block computes. Those of `attention` leave their keys in the cache."""

    attention: int
    text: int
    feed_forward: int

    @classmethod
    def same(cls, num_tokens: int) -> SublayerTokens:
        """The same number in every sublayer."""
        return cls(num_tokens, num_tokens, num_tokens)

    @classmethod
    def total(cls, layers: Iterable[SublayerTokens]) -> SublayerTokens:
        """The sums over these layers."""
        return sum(layers, start=cls.same(0))

    def __add__(self, other: SublayerTokens) -> SublayerTokens:
        return SublayerTokens(self.attention + other.attention, self.text + other.text, self.feed_forward + other.feed_forward)


def macs_per_token(*modules: nn.Module) -> int:
    """MACs of one token through every linear layer of these modules: the entries of all their matrices."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear | QuantizedLinear))
    return sum(layer.in_features * layer.out_features for layer in layers)
