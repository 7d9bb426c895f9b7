"""Scratch memory for keys and values, shared by all layers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .spec import CacheSpec

Pair = tuple[Tensor, Tensor]


class Workspace:
    """Scratch buffer for keys and values, shared by all layers.

    It is allocated at first use: before that, more rows may run, and their caches need the memory.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._pair: tuple[Tensor, ...] | None = None  # [1, entries of all rows, H, D]

    def pair(self, rows: int, tokens: int) -> Pair:
        """Returns keys and values [rows, tokens, H, D]."""
        entries = rows * tokens
        if self._pair is None or self._pair[0].shape[1] < entries:
            self._pair = None  # freed before the next allocation
            self._pair = CacheSpec.allocate(replace(self.spec, rows=1), max(entries, self.spec.workspace_entries(rows)))  # never int8
        keys, values = (store[0, :entries].unflatten(0, (rows, tokens)) for store in self._pair)
        return keys, values

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return total_bytes(self._pair)


def total_bytes(stores: tuple[Tensor, ...] | None) -> int:
    return sum(store.nbytes for store in stores or ())


WIDEST = torch.complex128  # 16 bytes, the largest access of a GPU thread


def copy_wide(target: Tensor, source: Tensor) -> None:
    """Copies between tensors of the same dtype, in elements of 16 bytes if their layouts allow it.

    Torch copies non-contiguous rows element by element, with 2 bytes each in half precision. MPS has no 16-byte dtype.
    """
    if target.device.type != "mps" and in_widest(target) and in_widest(source):
        target, source = target.view(WIDEST), source.view(WIDEST)
    target.copy_(source)


def in_widest(x: Tensor) -> bool:
    """Returns True if a tensor can be viewed in 16-byte elements; torch aligns allocations to more than that."""
    *outer, last = x.stride()
    together = WIDEST.itemsize // x.element_size()
    return last == 1 and not any(number % together for number in (x.shape[-1], x.storage_offset(), *outer))
