"""Keys and values of which every layer keeps a part when a stage has run: their sizes, and a cache that holds no more than that.

A stage reads what its layer has kept, and its own keys, from the workspace that all layers share. So the largest stage takes memory
once and not in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from ..stage import Rows, Tokens
from . import CacheSpec, Slot, copy_wide, row_count
from .attending import AttendingCache


@dataclass(frozen=True)
class CompressedSpec(CacheSpec):
    """Sizes where some stages leave a part of what the layers hold (`StageKeys.kept`)."""

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of a row that every layer holds before each stage that runs, and after the last, which leaves nothing."""
        held = [(0,) * self.layers]
        for stage in self.stages:
            seen = [before + new for before, new in zip(held[-1], stage.tokens, strict=True)]
            held.append(tuple(seen if stage.kept is None else map(min, seen, stage.kept)))
        return (*held[:-1], (0,) * self.layers)

    @property
    def tokens(self) -> int:
        """The most tokens of a row that a layer reads at a stage."""
        sizes = zip(self.held, self.stages, strict=False)
        return max((before + new for held, stage in sizes for before, new in zip(held, stage.tokens, strict=True)), default=0)

    def bytes_at(self, stage: int, workspace: bool = True) -> int:
        """Layers are compressed one after another, so that some hold what they had before the stage and some what they have after it."""
        number = next(place for place, known in enumerate(self.stages) if known.stage == stage)
        before, after = self.held[number], self.held[number + 1]
        most = max(accumulate((new - old for old, new in zip(before, after, strict=True)), initial=sum(before)))
        shared = self._pair_bytes(self.stages[0].rows, self.tokens) if workspace else 0
        return self._pair_bytes(self.stages[number].rows, most) + shared

    def freed_bytes(self, layers: int) -> int:
        return self._pair_bytes(self._rows_at(self.final), sum(self.held[len(self.stages) - 1][:layers]))


class CompressedLayerCache(AttendingCache):
    """Holds what was kept, in memory of just that size. A subclass says in `attend` what to keep."""

    def reserve(self, rows: int, new: int, tokens: Tokens, *, finite_tails: bool = True) -> Slot:
        keys, values = self.workspace.pair(rows, self.length + new)
        for target, source in zip((keys, values), self._pair or (), strict=False):
            copy_wide(target.narrow(1, 0, self.length), source)
        self._pair = None
        slot = Slot(keys, values, self.length, self.length + new)
        if self.lengths is not None or tokens.count is not None:
            added = tokens.prefix + tokens.count if tokens.count is not None and tokens.prefix else tokens.count
            slot = self._ragged(slot, new, added, True, finite_tails)
        self.length += new
        return slot

    def kept_after(self, stage: int) -> int | None:
        """How many tokens of a row to keep when this stage has run; None if that is all that there are."""
        kept = next(known.kept for known in self.spec.stages if known.stage == stage)
        return kept[0] if kept is not None and kept[0] < self.length else None

    def keep(self, slot: Slot, selection: Tensor | None) -> None:
        """Holds the entries at `selection` [R, K, H], ascending, of what the workspace has; None: all."""
        for_heads = None if selection is None else selection[..., None].expand(-1, -1, -1, slot.keys.shape[-1])
        filled = [store.narrow(1, 0, slot.end) for store in (slot.keys, slot.values)]
        keys, values = (store.clone() if for_heads is None else store.gather(1, for_heads) for store in filled)
        self._pair = keys, values
        if selection is not None:
            self.length = selection.shape[1]
            self.lengths = None if self.lengths is None else self.lengths.clamp(max=self.length)

    def keep_rows(self, rows: Rows) -> None:
        self._rows = row_count(rows, self._rows)
        if self._pair is not None:
            self._pair = self._pair[0][rows].clone(), self._pair[1][rows].clone()
        self.lengths = None if self.lengths is None else self.lengths[rows]

    def _clear_tail(self) -> None:
        """What lies beyond the rows' ends is in the workspace, where it is cleared."""
