"""CUDA graphs emulated on the CPU in memory that behaves like a GPU's capture pool.

Memory that a capture has allocated and that has no owner is reused by later captures. A replay therefore destroys all tensors that were not
alive at its capture: those freed before, and those created later. Tensors allocated outside captures need an owner while a graph reads
them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tape import FEW_BUCKETS, Tape, play_graphs_on_the_cpu, tensors_in


@dataclass
class Memory:
    """A piece of memory that graphs use."""

    tensor: Tensor  # owned by a tape
    storage: torch.UntypedStorage
    born: int | None = None  # the graph whose capture allocated it; None: it was there before
    died: int | None = None  # the last graph during whose capture somebody held it


@dataclass
class Pool:
    """The memory of all graphs, by the address of torch's record of it."""

    graphs: int = 0
    known: dict[int, Memory] = field(default_factory=dict)
    held: Counter[int] = field(default_factory=Counter)  # tensors that tapes hold of it

    def alias(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that shares the memory, for a tape to hold."""
        own = tensor.detach()
        self.held[storage_of(own)] += 1
        return own

    def is_held(self, memory: Memory) -> bool:
        """Returns True if it has owners other than tapes."""
        address = memory.storage._cdata
        return torch._C._storage_Use_Count(address) - 1 > self.held[address]

    def bury(self) -> None:
        """Notes what nobody holds now."""
        for memory in self.known.values():
            if memory.born is not None and memory.died is None and not self.is_held(memory):
                memory.died = self.graphs - 1

    def destroy(self, graph: int) -> None:
        """Overwrites all memory that a replay of this graph may overwrite."""
        for memory in self.known.values():
            if memory.born is None:
                continue
            before, after = memory.born > graph, memory.died is not None and memory.died < graph
            if before or after:
                memory.storage.fill_(255)  # NaN in every floating-point format

    def lost(self) -> list[list[int]]:
        """Shapes of what graphs read that was not made by any, and that nobody holds: a GPU would have given it to others."""
        given = (memory for memory in self.known.values() if memory.born is None)
        # A single number travels with the launch.
        return [list(memory.tensor.shape) for memory in given if memory.tensor.ndim and not self.is_held(memory)]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class PooledTape(Tape):
    pool: Pool

    def __enter__(self) -> PooledTape:
        self.pool.bury()
        self.number, self.pool.graphs = self.pool.graphs, self.pool.graphs + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.pool.bury()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.ops[-1] = (func, *map(self._own, self.ops[-1][1:]))
        read = {storage_of(one) for one in tensors_in(self.ops[-1][1:3])}
        for tensor in tensors_in(self.ops[-1][1:]):
            storage = storage_of(tensor)
            if storage not in self.pool.known:
                self.pool.known[storage] = Memory(tensor, tensor.untyped_storage(), None if storage in read else self.number)
        return out

    def _own(self, value: Any) -> Any:
        """The same with tensors for this tape to hold."""
        if isinstance(value, Tensor):
            return self.pool.alias(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._own, value))
        return {name: self._own(part) for name, part in value.items()} if isinstance(value, dict) else value

    def replay(self) -> None:
        self.pool.destroy(self.number)
        super().replay()


def play_pooled_graphs_on_the_cpu(patch: pytest.MonkeyPatch, buckets: tuple[int, ...] = FEW_BUCKETS) -> Pool:
    """Returns the pool, for all captures of a test."""
    play_graphs_on_the_cpu(patch, buckets)
    pool = Pool()
    patch.setattr(torch.cuda, "CUDAGraph", type("PooledTapeOfATest", (PooledTape,), {"pool": pool}))
    return pool
