"""Where weights lie, asked before every replay: captured graphs read them there."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any, TypeVar

from torch import nn

Found = TypeVar("Found")


class WeightPlaces:
    """The addresses of all weights and buffers of some modules.

    Walking through a model takes milliseconds, so what the walk has found is remembered for as long as the tree of modules is the same:
    1.5 ms for infinity-2b, and 0.1 when it is known.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._roots = roots
        self._children: list[dict[str, nn.Module | None]] = []
        self._known: list[nn.Module | None] = []  # all children, in order
        self._tensors: list[dict[str, Any]] = []  # of parameters and buffers

    def now(self) -> tuple[int, ...]:
        if not self._tree_is_known():
            self._walk()
        return tuple([tensor.data_ptr() for tensor in listed(self._tensors) if tensor is not None])

    def _tree_is_known(self) -> bool:
        found = listed(self._children)
        return bool(self._tensors) and len(found) == len(self._known) and all(map(is_, found, self._known))

    def _walk(self) -> None:
        modules = [module for root in self._roots for module in root.modules()]
        self._children = [module._modules for module in modules]
        self._known = listed(self._children)
        self._tensors = [owned for module in modules for owned in (module._parameters, module._buffers)]


def listed(dictionaries: list[dict[str, Found]]) -> list[Found]:
    """All values, in order."""
    return list(chain.from_iterable(map(dict.values, dictionaries)))
