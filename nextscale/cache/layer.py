"""Keys and values of one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..stage import Rows, Stage, Tokens
from .attention import MAX_FEW_QUERIES, AttentionCall, CacheView, attend, attend_rows
from .spec import CacheSpec
from .workspace import Pair, Workspace, copy_wide, total_bytes


class LayerCache:
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

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> CacheView:
        """Adds k, v [R, N, H, D] of `tokens`, or packed ones [F, T, H, D], each at the end of its row."""
        packing, new = tokens.packing, tokens.num_tokens
        view = self.reserve(tokens.rows_of(k), new, tokens)
        for store, fresh in ((view.keys, k), (view.values, v)):
            if isinstance(view.start, int):
                store.narrow(1, view.start, new).copy_(fresh)
            elif packing is None:
                row = torch.arange(k.shape[0], device=k.device)[:, None]
                store[row, view.start[:, None] + torch.arange(new, device=k.device)] = fresh.to(store.dtype)
            else:
                row = packing.row(k.shape[0])
                # padding goes where the last token does
                store[row, view.start[row] + packing.place] = packing.repeat_last(fresh.to(store.dtype))
        self.written(view, new)
        return view

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns the result of attention before its projection, [R, N, H * D]. Override it to read some of the keys, or to drop some."""
        view, q, packing = call.view, call.q, call.tokens.packing
        keys, values = view.keys.narrow(1, 0, view.end), view.values.narrow(1, 0, view.end)
        few = call.captured and q.shape[0] * q.shape[1] <= MAX_FEW_QUERIES
        if call.mask is not None or not (few or packing or view.lengths is not None):
            return attend(q, keys, values, call.mask, call.scale)
        return attend_rows(
            q, keys, values, view.lengths, call.scale, packing=packing, captured=call.captured, few=few, e4m3_scale=call.e4m3_scale
        )

    def reserve(self, rows: int, new: int, tokens: Tokens, *, finite_tails: bool = True) -> CacheView:
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
        view = CacheView(keys, values, self.length, end)
        view = self._ragged(view, new, tokens, in_workspace, finite_tails)
        if final:
            self._pair, self._spent = None, True
        else:
            self.length = end
        return view

    def written(self, view: CacheView, new: int) -> None:
        """The `new` entries per row of the view that was reserved last are there."""

    def _read(self, keys: Tensor, values: Tensor) -> Pair:
        """What is held goes to the beginning of these."""
        for target, source in ((keys, self.keys), (values, self.values)):
            copy_wide(target.narrow(1, 0, self.length), source.narrow(1, 0, self.length))
        return keys, values

    def _ragged(self, view: CacheView, new: int, tokens: Tokens, in_workspace: bool, finite_tails: bool) -> CacheView:
        """Lets every row continue at its own end once they differ, so that the next stage overwrites this one's padding."""
        if self.lengths is None and tokens.count is None:
            return view
        rows, device = view.keys.shape[0], view.keys.device
        if self.lengths is None:
            self.lengths = torch.full((rows,), self.length, dtype=torch.int32, device=device)
            self._finite_tails = finite_tails
            if finite_tails:
                self._clear_tail()
        assert self._finite_tails or not finite_tails, "tails that an earlier stage has not cleared"
        if in_workspace and finite_tails:
            for store in (view.keys, view.values):
                store.narrow(1, self.length, new).zero_()
        start = self.lengths
        self.lengths = (start + (new if tokens.count is None else tokens.prefix + tokens.count)).int()
        return view._replace(start=start, lengths=self.lengths)

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


class NoCache(LayerCache):
    """The cache of blocks that read nothing of earlier stages (STAR's refiner)."""

    def __init__(self) -> None:
        """Holds nothing."""

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> CacheView:
        keys, values = tokens.unpack(k.to(v.dtype)), tokens.unpack(v)
        lengths = None if tokens.count is None else (tokens.prefix + tokens.count).int()
        return CacheView(keys, values, 0, keys.shape[1], lengths)

    def keep_rows(self, rows: Rows) -> None:
        """Keeps nothing."""


def row_count(rows: Rows, of: int) -> int:
    """How many of a number of rows these are."""
    return len(range(*rows.indices(of))) if isinstance(rows, slice) else rows.shape[0]
