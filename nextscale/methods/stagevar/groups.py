"""How a stage runs its groups of blocks: in full for the next stage to be restored from, or on few rows that stand for all tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...errors import SettingError
from ...models.blocks import run_in_order
from ...models.context import ForwardContext
from ...sampling import Noise, cell_noise
from ...stage import Tokens, repeat_tail
from ..method import Span
from .lowrank import Energy, Rank, Share

if TYPE_CHECKING:
    from ...models.blocks import Block


def race_noise(x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
    """Unit exponential numbers [R, N] for all tokens of x, the same for both rows of a guided pair."""
    return _noise(ctx.method_rng.exponential, x, tokens, ctx)


def normal_noise(x: Tensor, tokens: Tokens, ctx: ForwardContext, columns: int) -> Tensor:
    """Standard normal numbers [R, N, columns] for all tokens of x, the same for both rows of a guided pair."""
    return _noise(ctx.method_rng.normal, x, tokens, ctx, columns)


def _noise(noise: Noise, x: Tensor, tokens: Tokens, ctx: ForwardContext, *columns: int) -> Tensor:
    numbers = cell_noise(noise, tokens.rows(slice(0, ctx.batch)), (ctx.batch, x.shape[1], *columns), x.device)
    return numbers.repeat(x.shape[0] // ctx.batch, *[1] * (numbers.ndim - 1))


def sublayers_in(blocks: Sequence[Block]) -> int:
    return sum(block.num_sublayers for block in blocks)


def memory_name(group: int) -> Hashable:
    return "stagevar", group


@dataclass(frozen=True)
class Remember(Span):
    """Runs a group of blocks in full and keeps its output for the next stage."""

    whole_stage = True

    layers: range
    group: int

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return f"stagevar memory of group {self.group}"

    @property
    def stores(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)})

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        x = run_in_order(blocks, x, tokens, ctx)
        ctx.memory.store(memory_name(self.group), x, tokens)
        return x


@dataclass(frozen=True)
class LowRank(Span):
    """Runs a group of blocks on few rows that stand for all tokens. Subclasses say which rows, and how the tokens are restored."""

    restores_from_memory: ClassVar[bool] = True

    layers: range
    group: int
    rank: Rank
    remember: bool = False  # the next stage is restored from this one
    first_positions: bool = False  # the rows take the first positions of the stage instead of their representatives'

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return f"stagevar {type(self).__name__} of group {self.group}, {self.rank}"

    def num_tokens(self, tokens: int) -> int:
        return self.rank.rows(tokens)

    @property
    def whole_stage(self) -> bool:  # type: ignore[override]
        return self.remember

    @property
    def stores(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)} if self.remember else ())

    @property
    def needs(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)} if self.restores_from_memory else ())

    def own_macs(self, tokens: int, dim: int) -> int:
        """MACs of the projection of one row; decompositions do not count."""
        return tokens * self.num_tokens(tokens) * dim

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        out = repeat_tail(self.replaced(blocks, x, tokens, ctx).to(x.dtype), tokens.count)
        if self.remember:
            ctx.memory.store(memory_name(self.group), out, tokens)
        return out

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """The group's output [R, N, C] for its input x. Entries beyond the count of a row may be anything."""
        raise NotImplementedError

    def ranks(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> tuple[int, Tensor | None]:
        """The rank of x [R, N, C]: the largest of the batch, and where they differ, that of each row [R]."""
        rows, ranks = self.rank.of(x, tokens)
        if isinstance(self.rank, Energy):  # the forecast could only assume it
            ctx.measured[self.layers] = replace(self, rank=Share(1.0, most=rows))
        return rows, ranks

    def remembered(self, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """The same group's output at the previous stage that ran, resized to these tokens (equation 7)."""
        try:
            return ctx.memory.fill(memory_name(self.group), tokens)
        except KeyError:
            raise SettingError(
                f"stage {tokens.stage.index} cannot be restored: another method skipped the stage before it, whose outputs StageVAR"
                " needs. Skip stages with StageVAR's own alphas (0), which know what is skipped"
            ) from None

    def report_rows(
        self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext, computed: int, ranks: Tensor | None
    ) -> None:
        """Reports that every token had the same part in the rows that the blocks computed."""
        if ctx.computed is None:
            return
        rows = torch.full((x.shape[0],), computed, device=x.device) if ranks is None else ranks
        share = rows / (x.shape[1] if tokens.count is None else tokens.count)
        ctx.computed.add(tokens, x, sublayers_in(blocks), share)


def first_tokens(tokens: Tokens, rows: Tensor, count: Tensor | None) -> Tokens:
    """The first of these tokens, as positions for `rows` [R, r, C] that stand for no token in particular."""
    place = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[0], -1)
    return tokens.take(repeat_tail(place, count), count)
