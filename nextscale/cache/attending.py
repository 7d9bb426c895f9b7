"""Caches that attend to their keys in a way of their own, and what attention hands to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..stage import Tokens
from . import DenseLayerCache, Slot


class AttentionCall(NamedTuple):
    """One attention of one layer, whose keys and values are in the cache already."""

    projected: Callable[[], tuple[Tensor, Tensor]]  # x [R, N, C] and the weights [3 * C, C] that made queries, keys and values of it
    q: Tensor  # [R, N, H, D]
    slot: Slot
    tokens: Tokens
    scale: float
    captured: bool  # launches cost the host nothing
    batch: int  # images: of a guided pair the conditional row comes first, this number of rows before the other


class AttendingCache(DenseLayerCache):
    """Base of caches with an attention of their own: it reads some of the keys, or changes the cache when it has read them."""

    def attend(self, seen: AttentionCall) -> Tensor:
        """What attention returns before its projection, [R, N, H * D]."""
        raise NotImplementedError
