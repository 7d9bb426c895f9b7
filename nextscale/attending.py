"""Caches that attend to their keys in a way of their own, and what attention hands to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .cache import DenseLayerCache, Slot
from .stage import Tokens


class Attended(NamedTuple):
    """One attention of one layer, whose keys and values are in the cache already."""

    x: Tensor  # [R, N, C], what queries, keys and values were made of
    q: Tensor  # [R, N, H, D]
    slot: Slot
    tokens: Tokens
    scale: float
    weight: Tensor  # [3 * C, C], which made queries, keys and values, without their bias
    captured: bool  # launches cost the host nothing
    batch: int  # images: of a guided pair the conditional row comes first, this number of rows before the other


class AttendingCache(DenseLayerCache):
    """Base of caches with an attention of their own: it reads some of the keys, or changes the cache when it has read them."""

    def attend(self, seen: Attended) -> Tensor:
        """What attention returns before its projection, [R, N, H * D]."""
        raise NotImplementedError
