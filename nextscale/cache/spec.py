"""Sizes of a request's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..stage import Schedule


@dataclass(frozen=True)
class StageKeys:
    """Number of keys that a stage adds to the cache."""

    stage: int
    rows: int
    tokens: tuple[int, ...]  # per row, for each layer; includes a text prefix
    kept: tuple[int, ...] | None = None  # per row, for each layer: keys of all stages so far that are kept afterwards; None: all

    def layer(self, number: int) -> StageKeys:
        """Returns the keys of one layer."""
        kept = None if self.kept is None else (self.kept[number],)
        return StageKeys(self.stage, self.rows, (self.tokens[number],), kept)


@dataclass(frozen=True)
class CacheSpec:
    """Sizes of a request's KV cache, as known before it starts.

    Keys of the last stage are not kept, since only their own layer reads them. Keys that a layer has kept are freed once it has read them
    at the last stage.
    """

    layers: int
    rows: int
    heads: int
    head_dim: int
    schedule: Schedule
    dtype: torch.dtype
    device: torch.device
    prefix: int = 0  # text tokens before the first stage's
    planned: tuple[StageKeys, ...] | None = None  # stages that run; None: all, with all tokens and rows

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
        """Tokens per row over all stages, in the largest layer."""
        return max(per_layer(self.stages), default=0)

    def room(self, rows: int, after: int = -1) -> int:
        """Returns the tokens per row, in the largest layer, of stages later than `after` that run at least `rows` and keep their keys."""
        return max(per_layer(self._kept_while(rows, after)), default=0)

    def _kept_while(self, rows: int, after: int = -1) -> list[StageKeys]:
        return [stage for stage in self.stages[:-1] if stage.rows >= rows and stage.stage > after]

    def layer(self, number: int) -> CacheSpec:
        """Returns the sizes of one layer."""
        planned = None if self.planned is None else tuple(stage.layer(number) for stage in self.planned)
        return replace(self, layers=1, planned=planned)

    @property
    def bytes(self) -> int:
        """Peak size in bytes: kept tokens of all layers, plus the shared workspace at the last stage.

        At the last stage, memory is freed layer by layer: see `freed_bytes`.
        """
        return max((self.bytes_at(stage.stage) for stage in self.stages), default=0)

    @property
    def kept_bytes(self) -> int:
        """Peak size in bytes of the keys and values kept for later stages."""
        return max((self.bytes_at(stage.stage, workspace=False) for stage in self.stages), default=0)

    def bytes_at(self, stage: int, workspace: bool = True) -> int:
        """Returns the bytes allocated while this stage runs."""
        rows = self._rows_at(stage)
        held = self._held_bytes(rows, sum(per_layer(self._kept_while(rows))))
        return held + (self._workspace_bytes(stage) if workspace else 0)

    def freed_bytes(self, layers: int) -> int:
        """Returns the bytes freed after this number of layers of the last stage have run."""
        rows = self._rows_at(self.final)
        return self._held_bytes(rows, sum(per_layer(self._kept_while(rows))[:layers]))

    def _rows_at(self, stage: int) -> int:
        return next(known.rows for known in self.stages if known.stage == stage)

    def workspace_entries(self, rows: int) -> int:
        """Returns the number of tokens, over all rows, of a workspace that is first needed with this number of rows."""
        return rows * self.tokens

    def _workspace_bytes(self, stage: int) -> int:
        """Returns the bytes of the workspace while this stage runs; only the last stage uses it."""
        return self._pair_bytes(self._rows_at(stage), self.tokens) if stage == self.final else 0

    def _held_bytes(self, rows: int, tokens: int) -> int:
        """Returns the bytes that layers hold for later stages."""
        return self._pair_bytes(rows, tokens)

    def _pair_bytes(self, rows: int, tokens: int) -> int:
        """Returns the bytes of keys and values in the model's dtype."""
        return 2 * rows * self.heads * self.head_dim * self.dtype.itemsize * tokens

    def allocate(self, tokens: int) -> tuple[Tensor, ...]:
        """Allocates keys and values [R, T, H, D]."""
        shape = (self.rows, tokens, self.heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device), torch.empty(shape, dtype=self.dtype, device=self.device)


def per_layer(stages: Sequence[StageKeys]) -> list[int]:
    """Returns the tokens per row over these stages, for each layer."""
    return [sum(tokens) for tokens in zip(*(stage.tokens for stage in stages), strict=True)]


@dataclass(frozen=True)
class CompressedSpec(CacheSpec):
    """Sizes of a KV cache whose layers keep only part of their tokens after some stages (`StageKeys.kept`)."""

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Tokens per row that each layer holds before each stage, and zeros after the last."""
        held = [(0,) * self.layers]
        for stage in self.stages:
            seen = [before + new for before, new in zip(held[-1], stage.tokens, strict=True)]
            held.append(tuple(seen if stage.kept is None else map(min, seen, stage.kept)))
        return (*held[:-1], (0,) * self.layers)

    @property
    def tokens(self) -> int:
        """Maximum number of tokens per row that a layer reads at a stage."""
        sizes = zip(self.held, self.stages, strict=False)
        return max((before + new for held, stage in sizes for before, new in zip(held, stage.tokens, strict=True)), default=0)

    def bytes_at(self, stage: int, workspace: bool = True) -> int:
        """Returns the peak of a stage in bytes; layers are compressed one after another."""
        number = next(place for place, known in enumerate(self.stages) if known.stage == stage)
        before, after = self.held[number], self.held[number + 1]
        most = max(accumulate((new - old for old, new in zip(before, after, strict=True)), initial=sum(before)))
        shared = self._pair_bytes(self.stages[0].rows, self.tokens) if workspace else 0
        return self._pair_bytes(self.stages[number].rows, most) + shared

    def freed_bytes(self, layers: int) -> int:
        return self._pair_bytes(self._rows_at(self.final), sum(self.held[len(self.stages) - 1][:layers]))
