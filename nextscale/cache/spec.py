"""Sizes of one request's keys and values."""

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
        held = self._held_bytes(rows, sum(per_layer(self._kept_while(rows))))
        return held + (self._workspace_bytes(stage) if workspace else 0)

    def freed_bytes(self, layers: int) -> int:
        """Bytes that are free again once this number of layers of the last stage have read what they had kept."""
        rows = self._rows_at(self.final)
        return self._held_bytes(rows, sum(per_layer(self._kept_while(rows))[:layers]))

    def _rows_at(self, stage: int) -> int:
        return next(known.rows for known in self.stages if known.stage == stage)

    def workspace_entries(self, rows: int) -> int:
        """Tokens over all rows for which the workspace has room, when this number of rows is the first to need it."""
        return rows * self.tokens

    def _workspace_bytes(self, stage: int) -> int:
        """Bytes of the workspace while the stage runs: the last one alone reads from it."""
        return self._pair_bytes(self._rows_at(stage), self.tokens) if stage == self.final else 0

    def _held_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of what layers hold for later stages."""
        return self._pair_bytes(rows, tokens)

    def _pair_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of keys and values as they are computed."""
        return 2 * rows * self.heads * self.head_dim * self.dtype.itemsize * tokens

    def allocate(self, tokens: int) -> tuple[Tensor, ...]:
        """What a layer holds of this number of tokens: keys and values [R, T, H, D]."""
        shape = (self.rows, tokens, self.heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device), torch.empty(shape, dtype=self.dtype, device=self.device)


def per_layer(stages: Sequence[StageKeys]) -> list[int]:
    """Tokens of a row over all these stages, for every layer."""
    return [sum(tokens) for tokens in zip(*(stage.tokens for stage in stages), strict=True)]


@dataclass(frozen=True)
class CompressedSpec(CacheSpec):
    """Sizes where layers keep a part of their tokens after some stages (`StageKeys.kept`)."""

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
        """Returns the most bytes of a stage: layers are compressed one after another, so some are still as they were before it."""
        number = next(place for place, known in enumerate(self.stages) if known.stage == stage)
        before, after = self.held[number], self.held[number + 1]
        most = max(accumulate((new - old for old, new in zip(before, after, strict=True)), initial=sum(before)))
        shared = self._pair_bytes(self.stages[0].rows, self.tokens) if workspace else 0
        return self._pair_bytes(self.stages[number].rows, most) + shared

    def freed_bytes(self, layers: int) -> int:
        return self._pair_bytes(self._rows_at(self.final), sum(self.held[len(self.stages) - 1][:layers]))
