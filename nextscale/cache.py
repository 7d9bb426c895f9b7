"""What a request remembers: keys and values per layer, and outputs of earlier stages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .stage import Rows, Schedule, Stage, Tokens


@dataclass(frozen=True)
class StageKeys:
    """What a stage that runs adds to the caches."""

    stage: int
    rows: int
    tokens: tuple[int, ...]  # of a row, per layer; a text prefix included
    kept: tuple[int, ...] | None = None  # of a row, per layer, that are left of all stages so far when it has run; None: all

    def layer(self, number: int) -> StageKeys:
        """What it adds to the cache of one layer."""
        kept = None if self.kept is None else (self.kept[number],)
        return StageKeys(self.stage, self.rows, (self.tokens[number],), kept)


@dataclass(frozen=True)
class CacheSpec:
    """Sizes of one request's keys and values, as far as they are known before it starts.

    Nothing reads the keys of the last stage that runs after their layer, so that they are not kept, and those that a layer has kept
    for it are freed as soon as it has read them.
    """

    layers: int
    rows: int
    heads: int
    head_dim: int
    schedule: Schedule
    dtype: torch.dtype
    device: torch.device
    prefix: int = 0  # tokens before the first stage's
    planned: tuple[StageKeys, ...] | None = None  # the stages that are going to run; None: all of them, with all tokens and rows

    @cached_property
    def stages(self) -> tuple[StageKeys, ...]:
        if self.planned is not None:
            return self.planned
        first = (self.prefix + self.schedule[0].cells,) * self.layers
        later = (StageKeys(stage.index, self.rows, (stage.cells,) * self.layers) for stage in self.schedule.stages[1:])
        return (StageKeys(0, self.rows, first), *later)

    @cached_property
    def final(self) -> int:
        """Index of the last stage that runs."""
        return self.stages[-1].stage if self.stages else -1

    @property
    def tokens(self) -> int:
        """Tokens of a row over all stages, in the layer with most of them."""
        return max(per_layer(self.stages), default=0)

    def room(self, rows: int, after: int = -1) -> int:
        """Tokens of a row that are kept while at least `rows` run, in the layer with most of them; `after`: of later stages than this."""
        return max(per_layer(self._kept_while(rows, after)), default=0)

    def _kept_while(self, rows: int, after: int = -1) -> list[StageKeys]:
        return [stage for stage in self.stages[:-1] if stage.rows >= rows and stage.stage > after]

    def layer(self, number: int) -> CacheSpec:
        """The sizes of one layer alone."""
        planned = None if self.planned is None else tuple(stage.layer(number) for stage in self.planned)
        return replace(self, layers=1, planned=planned)

    @property
    def bytes(self) -> int:
        """The most bytes allocated at a time: the kept tokens of every layer, and at the last stage a workspace that the layers share.

        From the first layer of that stage on it is less: see `freed_bytes`.
        """
        return max((self.bytes_at(stage.stage) for stage in self.stages), default=0)

    @property
    def kept_bytes(self) -> int:
        """The most bytes kept for later stages at a time."""
        return max((self.bytes_at(stage.stage, workspace=False) for stage in self.stages), default=0)

    def bytes_at(self, stage: int, workspace: bool = True) -> int:
        """Bytes allocated while the stage with this index runs."""
        rows = self._rows_at(stage)
        return self._pair_bytes(rows, sum(per_layer(self._kept_while(rows))) + (self.tokens if workspace and stage == self.final else 0))

    def freed_bytes(self, layers: int) -> int:
        """Bytes that are free again once this number of layers of the last stage have read what they had kept."""
        rows = self._rows_at(self.final)
        return self._pair_bytes(rows, sum(per_layer(self._kept_while(rows))[:layers]))

    def _rows_at(self, stage: int) -> int:
        return next(known.rows for known in self.stages if known.stage == stage)

    def _pair_bytes(self, rows: int, tokens: int) -> int:
        return 2 * rows * self.heads * self.head_dim * self.dtype.itemsize * tokens

    def allocate(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, T, H, D]."""
        shape = (self.rows, tokens, self.heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device), torch.empty(shape, dtype=self.dtype, device=self.device)


def per_layer(stages: Sequence[StageKeys]) -> list[int]:
    """Tokens of a row over all these stages, for every layer."""
    return [sum(tokens) for tokens in zip(*(stage.tokens for stage in stages), strict=True)]


def row_count(rows: Rows, of: int) -> int:
    """How many of a number of rows these are."""
    return len(range(*rows.indices(of))) if isinstance(rows, slice) else rows.shape[0]


def pair_bytes(pair: tuple[Tensor, Tensor] | None) -> int:
    return 0 if pair is None else sum(tensor.nbytes for tensor in pair)


class Workspace:
    """Keys and values of all stages for the last one. Nothing reads them after their layer, so all layers share one pair.

    It is allocated when it is needed: until then there may be more rows, whose caches need the memory.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._pair: tuple[Tensor, Tensor] | None = None

    def pair(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, T, H, D] with room for `tokens`."""
        if self._pair is None or self._pair[0].shape[0] < rows or self._pair[0].shape[1] < tokens:
            self._pair = None  # before the next one is made
            self._pair = replace(self.spec, rows=rows).allocate(max(tokens, self.spec.tokens))
        keys, values = self._pair
        return keys[:rows], values[:rows]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return pair_bytes(self._pair)


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


WIDEST = torch.complex128  # 16 bytes, the most that a thread of a GPU reads or writes at a time


def copy_wide(target: Tensor, source: Tensor) -> None:
    """Copies source to target, of the same dtype, in elements of 16 bytes where both consist of such.

    Rows that are not side by side torch copies element by element, and those of half precision have 2 bytes.
    """
    if all(map(in_widest, (target, source))):
        target, source = target.view(WIDEST), source.view(WIDEST)
    target.copy_(source)


def in_widest(x: Tensor) -> bool:
    """Whether a tensor can be viewed in elements of 16 bytes; memory that torch allocates begins at a multiple of that."""
    *outer, last = x.stride()
    together = WIDEST.itemsize // x.element_size()
    return last == 1 and not any(number % together for number in (x.shape[-1], x.storage_offset(), *outer))


class DenseLayerCache:
    """Every token of every stage, written in place into memory that is allocated when the first stage comes.

    What was planned is allocated at once; it grows where a method runs more than its forecast said. When rows leave, what the others
    have is copied to memory of their own size. The last stage reads everything from the workspace, and the layer's own memory is freed.
    """

    def __init__(self, spec: CacheSpec, workspace: Workspace) -> None:
        self.spec = spec
        self.workspace = workspace
        self.length = 0  # entries written so far, padding included: a bound that the host knows
        self.lengths: Tensor | None = None  # [R] real entries, once rows differ
        self._finite_tails = False  # whether what lies beyond them is finite
        self._rows = spec.rows
        self._pair: tuple[Tensor, Tensor] | None = None
        self._spent = False  # the last stage has run

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return pair_bytes(self._pair)

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
        return slot

    def reserve(self, rows: int, new: int, tokens: Tokens, *, finite_tails: bool = True) -> Slot:
        """Makes room for `new` entries per row, which the caller writes.

        finite_tails: what lies beyond a row's end is finite, as a mask needs it: zero times NaN is NaN. Attention that reads a row up
        to its length does without, then at all stages that follow.
        """
        end = self.length + new
        final = tokens.stage.index == self.spec.final
        if final and self._spent:
            raise ValueError(f"stage {tokens.stage.index} is the last one, and its keys are gone: a layer cannot run it again")
        if final:
            keys, values = self.workspace.pair(rows, end)
            for target, source in ((keys, self.keys), (values, self.values)):
                copy_wide(target.narrow(1, 0, self.length), source.narrow(1, 0, self.length))
        else:
            self._make_room(end, tokens.stage)
            keys, values = self._held()
        slot = Slot(keys, values, self.length, end)
        if self.lengths is not None or tokens.count is not None:
            added = tokens.prefix + tokens.count if tokens.count is not None and tokens.prefix else tokens.count
            slot = self._ragged(slot, new, added, final, finite_tails)
        if final:
            self._pair, self._spent = None, True
        else:
            self.length = end
        return slot

    def _ragged(self, slot: Slot, new: int, added: Tensor | None, final: bool, finite_tails: bool) -> Slot:
        """Rows of different length: each row continues at its own end, so the next stage overwrites this one's padding."""
        rows, device = slot.keys.shape[0], slot.keys.device
        if self.lengths is None:
            self.lengths = torch.full((rows,), self.length, dtype=torch.int32, device=device)
            self._finite_tails = finite_tails
            if finite_tails:
                self._clear_tail()
        assert self._finite_tails or not finite_tails, "tails that an earlier stage has not cleared"
        if final and finite_tails:
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

    def _held(self) -> tuple[Tensor, Tensor]:
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


class StageMemory:
    """Outputs of earlier stages, kept on their full grid under a name of the method's choice."""

    def __init__(self) -> None:
        self._maps: dict[Hashable, tuple[Tensor, tuple[int, int]]] = {}

    def store(self, key: Hashable, y: Tensor, tokens: Tokens) -> None:
        if tokens.index is not None:
            raise ValueError(f"memory {key!r} needs the whole grid of stage {tokens.stage.index}, not {tokens.num_tokens} of its tokens")
        self._maps[key] = (tokens.on_grid(y)[0], tokens.stage.size)

    def stored(self, key: Hashable) -> tuple[Tensor, tuple[int, int]]:
        """What is stored under `key`, [R, h * w, C], and the size of its grid."""
        return self._maps[key]

    def fill(self, key: Hashable, tokens: Tokens) -> Tensor:
        """What is stored under `key`, area-resized to the stage of `tokens` and gathered there: [R, N, C]."""
        y, (height, width) = self._maps[key]
        grid = y.transpose(1, 2).unflatten(2, (height, width))
        resized = F.interpolate(grid, size=tokens.stage.size, mode="area")
        return tokens.gather(resized.flatten(2).transpose(1, 2))

    def copy(self) -> StageMemory:
        """Another memory with the same tensors."""
        memory = StageMemory()
        memory._maps = dict(self._maps)
        return memory

    def keep_rows(self, rows: Rows) -> None:
        """Keeps copies of these rows: views would keep the others alive."""
        self._maps = {key: (y[rows].clone(), size) for key, (y, size) in self._maps.items()}


class ComputedCells:
    """How many sublayers of the stage that runs were computed for every cell of every image."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.reported = False  # something was added since this was last set to False
        self._counts: Tensor | None = None  # [B, cells]

    def add(self, tokens: Tokens, rows: Tensor, sublayers: int, share: Tensor | None = None) -> None:
        """`sublayers` sublayers computed `rows` [R, N, C] for these tokens, in full or in a share [R]; the mean of both rows counts."""
        whole = tokens.unpack(torch.ones(*rows.shape[:2], 1, device=rows.device))
        values, tokens = tokens.on_grid(whole if share is None else whole * share[:, None, None])
        grid = tokens.scatter(values, values.new_zeros(whole.shape[0], tokens.stage.cells, 1))
        counts = sublayers * grid.view(-1, self.batch, tokens.stage.cells).mean(dim=0)
        self._counts = counts if self._counts is None else self._counts + counts
        self.reported = True

    def take(self, sublayers: int) -> Tensor | None:
        """The share of `sublayers` that was computed for every cell of the stage, [B, cells]; the next stage starts at zero."""
        counts, self._counts = self._counts, None
        return None if counts is None else counts / sublayers
