"""Shared parts of methods that attend to some of the keys: positions of each stage's keys, and attention to lists of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nextscale.cache import AttentionCall, CacheSpec, CacheView
from nextscale.cache.attention import reads_lengths
from nextscale.errors import SettingError
from nextscale.stage import Schedule, Stage

from .attend_lists import attend_lists_reference


class KeyMap(NamedTuple):
    """The stages whose keys a cache holds, in order; all cells of each, after a text prefix."""

    prefix: int
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: CacheSpec, stage: Stage) -> KeyMap:
        """Returns the cached stages when `stage` attends: the stages that have run, and itself."""
        ran = [known.stage for known in spec.stages if known.stage <= stage.index]
        return cls(spec.prefix, tuple(spec.schedule[index].size for index in ran))

    @property
    def keys(self) -> int:
        return self.prefix + sum(height * width for height, width in self.sizes)


class KeyLists(NamedTuple):
    """The keys that groups of queries, one after another, read."""

    numbers: Tensor  # [R or 1, H or 1, groups, M], int32
    counts: Tensor  # [R or 1, H or 1, groups], int32: how many of the M are read
    group: int  # queries of a group

    def mean(self, queries: int) -> float:
        """Keys of a query, mean over this number of queries; the last group may be smaller than the others."""
        sizes = torch.tensor([min(self.group, queries - start) for start in range(0, queries, self.group)], device=self.counts.device)
        return float((self.counts.double().mean(dim=(0, 1)) * sizes).sum() / queries)

    def rows(self, rows: slice | Tensor) -> KeyLists:
        return self if self.numbers.shape[0] == 1 else KeyLists(self.numbers[rows], self.counts[rows], self.group)


def attend_listed(q: Tensor, view: CacheView, lists: KeyLists, scale: float) -> Tensor:
    """q [R, N, H, D] over the keys that the lists name, [R, N, H * D]."""
    if reads_lengths(q):
        from .attend_lists_kernel import attend_lists  # Triton is imported where it is used
    else:
        attend_lists = attend_lists_reference
    keys, values = (store.narrow(1, 0, view.end) for store in (view.keys, view.values))
    return attend_lists(q, keys, values, lists.numbers, lists.counts, lists.group, scale)


def require_whole(seen: AttentionCall, there: KeyMap, method: str) -> None:
    """Raises SettingError where another method runs a part of the cells of a stage: keys could not be found by position."""
    if seen.tokens.index is not None or seen.view.lengths is not None or seen.view.end != there.keys:
        raise SettingError(
            f"{method} finds keys by position, and another method runs a part of the cells of stage {seen.tokens.stage.index} or of"
            " one before it: choose one of them"
        )


def key_map(schedule: Schedule, stage: Stage, prefix: int) -> KeyMap:
    """The keys of dense generation when `stage` attends."""
    return KeyMap(prefix, schedule.sizes[: stage.index + 1])


def centers(queries: Tensor, side: int, key_side: int) -> Tensor:
    """Finds the cells of one side on another: rounded, half to even, so that some centers can fall off the grid."""
    return (queries.double() / side * key_side).round()
