"""What a request remembers: keys and values per layer, outputs of earlier stages, and the rows that are still running."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .stage import Schedule, Tokens

if TYPE_CHECKING:
    from .models.base import Conditioning

Branches = Literal["both", "cond", "uncond"]


@dataclass(frozen=True)
class CacheSpec:
    """Sizes of one request's keys and values, all known before it starts."""

    layers: int
    rows: int
    heads: int
    head_dim: int
    schedule: Schedule
    dtype: torch.dtype
    device: torch.device
    prefix: int = 0  # tokens before the first stage's

    @property
    def tokens(self) -> int:
        return self.prefix + self.schedule.tokens

    @property
    def kept_tokens(self) -> int:
        """Tokens that a later stage reads again: all but the last stage's."""
        return self.prefix + self.schedule[-1].start

    @property
    def bytes(self) -> int:
        """Dense need: the kept tokens of every layer, and one full-length workspace that the layers share at the last stage."""
        per_token = 2 * self.rows * self.heads * self.head_dim * self.dtype.itemsize
        return per_token * (self.layers * self.kept_tokens + self.tokens)

    def allocate(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, T, H, D]."""
        shape = (self.rows, tokens, self.heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device), torch.empty(shape, dtype=self.dtype, device=self.device)


class Workspace:
    """Full-length keys and values for the last stage. Nothing reads them after their layer, so all layers share one pair."""

    def __init__(self, spec: CacheSpec) -> None:
        self.keys, self.values = spec.allocate(spec.tokens)


class LayerCache(Protocol):
    """Keys and values of one layer: dense here, compressed in a method's own class."""

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds k, v [R, N, H, D] of `tokens`; returns all keys and values [R, T, H, D] and a mask [R, 1, 1, T] or None."""
        ...

    def keep_rows(self, rows: slice) -> None: ...


class DenseLayerCache:
    """Every token of every stage, written in place into memory allocated once."""

    def __init__(self, spec: CacheSpec, workspace: Workspace) -> None:
        self.keys, self.values = spec.allocate(spec.kept_tokens)
        self.workspace = workspace
        self.width = 0  # entries written so far, padding included: a bound that the host knows
        self.lengths: Tensor | None = None  # [R] real entries, once rows differ

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, new = k.shape[:2]
        keys, values = self.keys, self.values
        if tokens.stage.last:
            keys, values = self.workspace.keys[:rows], self.workspace.values[:rows]
            keys.narrow(1, 0, self.width).copy_(self.keys.narrow(1, 0, self.width))
            values.narrow(1, 0, self.width).copy_(self.values.narrow(1, 0, self.width))
        end = self.width + new
        mask = None
        if self.lengths is None and tokens.count is None:
            keys.narrow(1, self.width, new).copy_(k)
            values.narrow(1, self.width, new).copy_(v)
        else:
            added = None if tokens.count is None else tokens.prefix + tokens.count
            mask = self._append_ragged(keys, values, k, v, added, end)
        if not tokens.stage.last:
            self.width = end
        return keys.narrow(1, 0, end), values.narrow(1, 0, end), mask

    def _append_ragged(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, added: Tensor | None, end: int) -> Tensor:
        """Rows of different length: each row continues at its own end, so the next stage overwrites this one's padding.

        What lies beyond a row's end is masked, but must be finite all the same: zero times NaN is NaN.
        """
        rows, new = k.shape[:2]
        if self.lengths is None:
            self.lengths = torch.full((rows,), self.width, device=k.device)
            for store in (self.keys, self.values):
                store.narrow(1, self.width, store.shape[1] - self.width).zero_()
        if keys is not self.keys:
            for store in (keys, values):
                store.narrow(1, self.width, new).zero_()
        row = torch.arange(rows, device=k.device)[:, None]
        place = self.lengths[:, None] + torch.arange(new, device=k.device)
        keys[row, place] = k.to(keys.dtype)
        values[row, place] = v.to(values.dtype)
        self.lengths = self.lengths + (new if added is None else added)
        return (torch.arange(end, device=k.device) < self.lengths[:, None])[:, None, None, :]

    def keep_rows(self, rows: slice) -> None:
        self.keys, self.values = self.keys[rows].clone(), self.values[rows].clone()  # copies: a view would keep the others alive
        if self.lengths is not None:
            self.lengths = self.lengths[rows]


class NoCache:
    """Every stage for itself: blocks that read nothing of earlier stages (STAR's refiner)."""

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        mask = None
        if tokens.count is not None:
            mask = (torch.arange(k.shape[1], device=k.device) < tokens.prefix + tokens.count[:, None])[:, None, None, :]
        return k.to(v.dtype), v, mask

    def keep_rows(self, rows: slice) -> None:
        """Nothing is kept."""


class StageMemory:
    """Outputs of earlier stages, kept on their full grid under a name of the method's choice."""

    def __init__(self) -> None:
        self._maps: dict[Hashable, tuple[Tensor, tuple[int, int]]] = {}

    def store(self, key: Hashable, y: Tensor, tokens: Tokens) -> None:
        if tokens.index is not None:
            raise ValueError(f"memory {key!r} needs the whole grid of stage {tokens.stage.index}, not {tokens.width} of its tokens")
        self._maps[key] = (tokens.on_grid(y)[0], tokens.stage.size)

    def fill(self, key: Hashable, tokens: Tokens) -> Tensor:
        """What is stored under `key`, area-resized to the stage of `tokens` and gathered there: [R, N, C]."""
        y, (height, width) = self._maps[key]
        grid = y.transpose(1, 2).unflatten(2, (height, width))
        resized = F.interpolate(grid, size=tokens.stage.size, mode="area")
        return tokens.gather(resized.flatten(2).transpose(1, 2))

    def keep_rows(self, rows: slice) -> None:
        self._maps = {key: (y[rows], size) for key, (y, size) in self._maps.items()}


@dataclass(slots=True)
class Env:
    """Everything that has one entry per running row: the guided half first, then the unconditional half while it runs."""

    batch: int
    cond: Conditioning
    cache: Sequence[LayerCache]
    memory: StageMemory
    branches: Branches

    def keep(self, branches: Branches) -> None:
        """Drops the other branch's rows. Rows leave and never return; "both" means those that still run."""
        if branches in ("both", self.branches):
            return
        if self.branches != "both":
            raise ValueError(f"the {branches} rows do not run any more: only {self.branches} rows are left")
        rows = slice(0, self.batch) if branches == "cond" else slice(self.batch, None)
        self.cond.keep_rows(rows)
        for cache in self.cache:
            cache.keep_rows(rows)
        self.memory.keep_rows(rows)
        self.branches = branches
