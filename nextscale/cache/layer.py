"""Keys and values of one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..stage import Rows, Stage, Tokens
from .spec import CacheSpec
from .workspace import Pair, Workspace, copy_wide, total_bytes


class LayerCache(Protocol):
    """Keys and values of one layer: dense here, compressed in a method's own class."""

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds k, v [R, N, H, D] of `tokens`; returns all keys and values [R, T, H, D] and a mask [R, 1, 1, T] or None."""
        ...

    def keep_rows(self, rows: Rows) -> None: ...


def real_entries(lengths: Tensor, entries: int) -> Tensor:
    """A mask of the entries that rows of these lengths [R] have: [R, 1, 1, entries]."""
    return (torch.arange(entries, device=lengths.device) < lengths[:, None])[:, None, None]


class Slot(NamedTuple):
    """Where new keys and values go, and what a stage reads once they are there."""

    keys: Tensor  # [R, T, H, D]
    values: Tensor
    start: int | Tensor  # of the new entries; [R] once rows differ
    end: int
    lengths: Tensor | None = None  # [R] entries of each row once they differ, the new ones included; int32

    @property
    def filled(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and a mask [R, 1, 1, end] where rows differ."""
        mask = None if self.lengths is None else real_entries(self.lengths, self.end)
        return self.keys.narrow(1, 0, self.end), self.values.narrow(1, 0, self.end), mask


class DenseLayerCache:
    """Every token of every stage, written in place into memory that is allocated when the first stage comes.

    What was planned is allocated at once; it grows where a method runs more than its forecast said. When rows leave, what the others
    have is copied to memory of their own size. The last stage reads everything from the workspace, and the layer's own memory is freed.
    """

    reads_workspace: ClassVar[bool] = False  # True: so do all stages

    def __init__(self, spec: CacheSpec, workspace: Workspace) -> None:
        self.spec = spec
        self.workspace = workspace
        self.length = 0  # entries written so far, padding included: a bound that the host knows
        self.lengths: Tensor | None = None  # [R] real entries, once rows differ
        self._finite_tails = False  # whether what lies beyond them is finite
        self._rows = spec.rows
        self._pair: tuple[Tensor, ...] | None = None  # what is held for later stages
        self._spent = False  # the last stage has run

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return total_bytes(self._pair)

    @property
    def keys(self) -> Tensor:
        return self._held()[0]

    @property
    def values(self) -> Tensor:
        return self._held()[1]

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.put(k, v, tokens).filled

    def put(self, k: Tensor, v: Tensor, tokens: Tokens) -> Slot:
        """Adds k, v [R, N, H, D] of `tokens`; returns where all keys and values are."""
        rows, new = k.shape[:2]
        slot = self.reserve(rows, new, tokens)
        for store, fresh in ((slot.keys, k), (slot.values, v)):
            if isinstance(slot.start, int):
                store.narrow(1, slot.start, new).copy_(fresh)
            else:
                row = torch.arange(rows, device=k.device)[:, None]
                store[row, slot.start[:, None] + torch.arange(new, device=k.device)] = fresh.to(store.dtype)
        self.written(slot, new)
        return slot

    def append_packed(self, k: Tensor, v: Tensor, tokens: Tokens) -> Slot:
        """Adds k, v [F, T, H, D] of packed tokens, each at the end of its row."""
        packing = tokens.packing
        assert packing is not None
        slot = self.reserve(tokens.rows_of(k), tokens.num_tokens, tokens)
        assert isinstance(slot.start, Tensor)
        row = packing.row(k.shape[0])
        entry = slot.start[row] + packing.place
        for store, fresh in ((slot.keys, k), (slot.values, v)):
            store[row, entry] = packing.repeat_last(fresh.to(store.dtype))  # padding goes where the last token does
        self.written(slot, tokens.num_tokens)
        return slot

    def reserve(self, rows: int, new: int, tokens: Tokens, *, finite_tails: bool = True) -> Slot:
        """Makes room for `new` entries per row, which the caller writes, and then says so with `written`.

        finite_tails: what lies beyond a row's end is finite, as a mask needs it: zero times NaN is NaN. Attention that reads a row up
        to its length does without, then at all stages that follow.
        """
        end = self.length + new
        final = tokens.stage.index == self.spec.final
        if final and self._spent:
            raise ValueError(f"stage {tokens.stage.index} is the last one, and its keys are gone: a layer cannot run it again")
        if not final:
            self._make_room(end, tokens.stage)
        in_workspace = final or self.reads_workspace
        keys, values = self._read(*self.workspace.pair(rows, end)) if in_workspace else (self.keys, self.values)
        slot = Slot(keys, values, self.length, end)
        if self.lengths is not None or tokens.count is not None:
            added = tokens.prefix + tokens.count if tokens.count is not None and tokens.prefix else tokens.count
            slot = self._ragged(slot, new, added, in_workspace, finite_tails)
        if final:
            self._pair, self._spent = None, True
        else:
            self.length = end
        return slot

    def written(self, slot: Slot, new: int) -> None:
        """The `new` entries per row of the slot that was reserved last are there."""

    def _read(self, keys: Tensor, values: Tensor) -> Pair:
        """What is held goes to the beginning of these."""
        for target, source in ((keys, self.keys), (values, self.values)):
            copy_wide(target.narrow(1, 0, self.length), source.narrow(1, 0, self.length))
        return keys, values

    def _ragged(self, slot: Slot, new: int, added: Tensor | None, in_workspace: bool, finite_tails: bool) -> Slot:
        """Rows of different length: each row continues at its own end, so the next stage overwrites this one's padding."""
        rows, device = slot.keys.shape[0], slot.keys.device
        if self.lengths is None:
            self.lengths = torch.full((rows,), self.length, dtype=torch.int32, device=device)
            self._finite_tails = finite_tails
            if finite_tails:
                self._clear_tail()
        assert self._finite_tails or not finite_tails, "tails that an earlier stage has not cleared"
        if in_workspace and finite_tails:
            for store in (slot.keys, slot.values):
                store.narrow(1, self.length, new).zero_()
        start = self.lengths
        self.lengths = (start + (new if added is None else added)).int()
        return slot._replace(start=start, lengths=self.lengths)

    def keep_rows(self, rows: Rows) -> None:
        self._rows = row_count(rows, self._rows)
        if self._pair is not None:
            self._move(max(self.spec.room(self._rows), self.length), rows)  # copies: a view would keep the others alive
        if self.lengths is not None:
            self.lengths = self.lengths[rows]

    def _held(self) -> tuple[Tensor, ...]:
        if self._pair is None:
            self._pair = replace(self.spec, rows=self._rows).allocate(self.spec.room(self._rows))
        return self._pair

    def _make_room(self, end: int, stage: Stage) -> None:
        """Grows to `end` tokens where that is more than was planned, and then to those planned after `stage` as well."""
        if stage.index > self.spec.final:
            raise ValueError(
                f"stage {stage.index} was not planned to run, so that stage {self.spec.final} has left no keys for it: a method's forecast"
                " may only skip stages that its runs skip"
            )
        if self.keys.shape[1] < end:
            self._move(end + self.spec.room(self._rows, after=stage.index), slice(None))

    def _move(self, tokens: int, rows: Rows) -> None:
        """Copies some of the rows to memory with room for `tokens`."""
        old, fresh = self._held(), replace(self.spec, rows=self._rows).allocate(tokens)
        for target, source in zip(fresh, old, strict=True):
            copy_wide(target.narrow(1, 0, self.length), source[rows].narrow(1, 0, self.length))
        self._pair = fresh
        if self._finite_tails:
            self._clear_tail()

    def _clear_tail(self) -> None:
        for store in self._held():
            store.narrow(1, self.length, store.shape[1] - self.length).zero_()


class NoCache:
    """The cache of blocks that read nothing of earlier stages (STAR's refiner)."""

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        mask = None
        if tokens.count is not None:
            mask = real_entries(tokens.prefix + tokens.count, k.shape[1])
        return k.to(v.dtype), v, mask

    def append_packed(self, k: Tensor, v: Tensor, tokens: Tokens) -> Slot:
        assert tokens.count is not None
        keys, values = tokens.unpack(k.to(v.dtype)), tokens.unpack(v)
        return Slot(keys, values, 0, keys.shape[1], (tokens.prefix + tokens.count).int())

    def keep_rows(self, rows: Rows) -> None:
        """Nothing is kept."""


def row_count(rows: Rows, of: int) -> int:
    """How many of a number of rows these are."""
    return len(range(*rows.indices(of))) if isinstance(rows, slice) else rows.shape[0]
