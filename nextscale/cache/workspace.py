"""Keys and values that all layers of a stage read from one place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .spec import CacheSpec

Pair = tuple[Tensor, Tensor]


class Workspace:
    """Keys and values of all stages so far, for a stage after which nothing reads them there: all layers share one pair.

    It is allocated when it is needed: until then there may be more rows, whose caches need the memory.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._pair: tuple[Tensor, ...] | None = None  # [1, entries of all rows, H, D]

    def pair(self, rows: int, tokens: int) -> Pair:
        """Keys and values [rows, tokens, H, D]."""
        entries = rows * tokens
        if self._pair is None or self._pair[0].shape[1] < entries:
            self._pair = None  # before the next one is made
            self._pair = CacheSpec.allocate(replace(self.spec, rows=1), max(entries, self.spec.workspace_entries(rows)))  # never in 8 bits
        keys, values = (store[0, :entries].unflatten(0, (rows, tokens)) for store in self._pair)
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return total_bytes(self._pair)


def total_bytes(stores: tuple[Tensor, ...] | None) -> int:
    return sum(store.nbytes for store in stores or ())


WIDEST = torch.complex128  # 16 bytes, the most that a thread of a GPU reads or writes at a time


def copy_wide(target: Tensor, source: Tensor) -> None:
    """Copies source to target, of the same dtype, in elements of 16 bytes where both consist of such.

    Rows that are not side by side torch copies element by element, and those of half precision have 2 bytes. Apple GPUs have no such dtype.
    """
    if target.device.type != "mps" and in_widest(target) and in_widest(source):
        target, source = target.view(WIDEST), source.view(WIDEST)
    target.copy_(source)


def in_widest(x: Tensor) -> bool:
    """Whether a tensor can be viewed in elements of 16 bytes; memory that torch allocates begins at a multiple of that."""
    *outer, last = x.stride()
    together = WIDEST.itemsize // x.element_size()
    return last == 1 and not any(number % together for number in (x.shape[-1], x.storage_offset(), *outer))
