"""KV cache of one layer."""

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
    """Keys and values of all tokens of one layer, in memory that is allocated at the first stage.

    The planned size is allocated at once, and grows if a method runs more tokens than forecast. When rows are dropped, the others are
    copied to smaller memory. The last stage reads everything from the workspace, and the layer's own memory is freed.
    """

    reads_workspace: ClassVar[bool] = False  # True if all stages read from the workspace, not only the last

    def __init__(self, spec: CacheSpec, workspace: Workspace) -> None:
        self.spec = spec
        self.workspace = workspace
        self.length = 0  # entries written so far, including padding: an upper bound known on the host
        self.lengths: Tensor | None = None  # [R] real entries, once rows have different lengths
        self._finite_tails = False  # entries after a row's end are finite
        self._rows = spec.rows
        self._pair: tuple[Tensor, ...] | None = None  # memory held for later stages
        self._spent = False  # the last stage has run

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return total_bytes(self._pair)

    @property
    def keys(self) -> Tensor:
        return self._held()[0]

    @property
    def values(self) -> Tensor:
        return self._held()[1]

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> CacheView:
        """Appends k, v [R, N, H, D] of `tokens`, or packed [F, T, H, D], at the end of each row."""
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
                # padding is written to the same entry as the last token
                store[row, view.start[row] + packing.place] = packing.repeat_last(fresh.to(store.dtype))
        self.written(view, new)
        return view

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns the attention before the output projection, [R, N, H * D]. Override it to read or keep only some of the keys."""
        view, q, packing = call.view, call.q, call.tokens.packing
        keys, values = view.keys.narrow(1, 0, view.end), view.values.narrow(1, 0, view.end)
        few = call.captured and q.shape[0] * q.shape[1] <= MAX_FEW_QUERIES
        if call.mask is not None or not (few or packing or view.lengths is not None):
            return attend(q, keys, values, call.mask, call.scale)
        return attend_rows(
            q, keys, values, view.lengths, call.scale, packing=packing, captured=call.captured, few=few, e4m3_scale=call.e4m3_scale
        )

    def reserve(self, rows: int, new: int, tokens: Tokens, *, finite_tails: bool = True) -> CacheView:
        """Reserves `new` entries per row. The caller writes them and then calls `written`.

        finite_tails: clear the entries after each row's end, because attention with a mask multiplies them by zero, and 0 * NaN is NaN. Not
        needed for attention that reads only up to a row's length; then later stages must not need it either.
        """
        end = self.length + new
        final = tokens.stage.index == self.spec.final
        if final and self._spent:
            raise ValueError(f"stage must not be {tokens.stage.index} again: it was the last one, and its keys were dropped.")
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
        """Called after the `new` entries per row of the last reserved view have been written."""

    def _read(self, keys: Tensor, values: Tensor) -> Pair:
        """Copies the held entries to the beginning of keys and values."""
        for target, source in ((keys, self.keys), (values, self.values)):
            copy_wide(target.narrow(1, 0, self.length), source.narrow(1, 0, self.length))
        return keys, values

    def _ragged(self, view: CacheView, new: int, tokens: Tokens, in_workspace: bool, finite_tails: bool) -> CacheView:
        """Starts each row at its own end once lengths differ, so that a stage overwrites the padding of the previous one."""
        if self.lengths is None and tokens.count is None:
            return view
        rows, device = view.keys.shape[0], view.keys.device
        if self.lengths is None:
            self.lengths = torch.full((rows,), self.length, dtype=torch.int32, device=device)
            self._finite_tails = finite_tails
            if finite_tails:
                self._clear_tail()
        assert self._finite_tails or not finite_tails, "an earlier stage did not clear the tails"
        if in_workspace and finite_tails:
            for store in (view.keys, view.values):
                store.narrow(1, self.length, new).zero_()
        start = self.lengths
        self.lengths = (start + (new if tokens.count is None else tokens.prefix + tokens.count)).int()
        return view._replace(start=start, lengths=self.lengths)

    def keep_rows(self, rows: Rows) -> None:
        self._rows = row_count(rows, self._rows)
        if self._pair is not None:
            self._move(max(self.spec.room(self._rows), self.length), rows)  # copies, because a view would keep all rows in memory
        if self.lengths is not None:
            self.lengths = self.lengths[rows]

    def _held(self) -> tuple[Tensor, ...]:
        if self._pair is None:
            self._pair = replace(self.spec, rows=self._rows).allocate(self.spec.room(self._rows))
        return self._pair

    def _make_room(self, end: int, stage: Stage) -> None:
        """Grows to `end` tokens, plus those planned after `stage`, if `end` exceeds the allocated size."""
        if stage.index > self.spec.final:
            raise ValueError(
                f"stage {stage.index} must not run after stage {self.spec.final}, the last one planned. A method's forecast may only skip"
                " stages that its runs skip."
            )
        if self.keys.shape[1] < end:
            self._move(end + self.spec.room(self._rows, after=stage.index), slice(None))

    def _move(self, tokens: int, rows: Rows) -> None:
        """Copies these rows to memory with room for `tokens`."""
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
    """KV cache of blocks that do not read earlier stages (STAR's refiner)."""

    def __init__(self) -> None:
        """Allocates nothing."""

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> CacheView:
        keys, values = tokens.unpack(k.to(v.dtype)), tokens.unpack(v)
        lengths = None if tokens.count is None else (tokens.prefix + tokens.count).int()
        return CacheView(keys, values, 0, keys.shape[1], lengths)

    def keep_rows(self, rows: Rows) -> None:
        """Does nothing."""


def row_count(rows: Rows, of: int) -> int:
    """Returns the number of selected rows out of `of`."""
    return len(range(*rows.indices(of))) if isinstance(rows, slice) else rows.shape[0]
