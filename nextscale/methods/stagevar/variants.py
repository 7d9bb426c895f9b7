"""The low-rank variants of StageVAR's table 2: random projections at representative tokens, which is the method itself, least squares,
and singular vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...models.blocks import Block, run_in_order
from ...models.context import ForwardContext
from ...stage import Tokens, repeat_tail
from .groups import LowRank, first_tokens, normal_noise, race_noise, sublayers_in
from .lowrank import (
    Energy,
    approximation,
    energy_ranks,
    factors,
    least_squares_weights,
    project,
    projection,
    representatives,
    same_direction,
    singular_energies,
    squared_norms,
    zero_tail,
)
from .settings import Variant


class RepresentativeRows(LowRank):
    """Runs random projections, whose outputs take the places of representative tokens (equation 8): the method itself."""

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        rank, ranks = self.ranks(x, tokens, ctx)
        chosen = repeat_tail(representatives(squared_norms(x), race_noise(x, tokens, ctx), rank, tokens.count), ranks)  # [R, r]
        normal = normal_noise(x, tokens, ctx, self.rank.columns(tokens.stage.cells))[..., :rank]
        q = projection(normal, rank if ranks is None else ranks)
        rows = repeat_tail(project(zero_tail(x, tokens.count), q), ranks)
        places = tokens.take(chosen, ranks)
        y = run_in_order(blocks, rows, first_tokens(tokens, rows, ranks) if self.first_positions else places, ctx)
        if ctx.computed is not None:
            ctx.computed.add(places, rows, sublayers_in(blocks))
        return self.remembered(tokens, ctx).scatter(1, chosen[..., None].expand_as(y), repeat_tail(y, ranks))


class LeastSquaresRows(LowRank):
    """Runs random projections and restores the tokens by least squares, with the previous stage's solution added."""

    def own_macs(self, tokens: int, dim: int) -> int:
        return 5 * super().own_macs(tokens, dim)  # project and solve, for input and previous output; restore

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        rank, ranks = self.ranks(x, tokens, ctx)
        normal = normal_noise(x, tokens, ctx, self.rank.columns(tokens.stage.cells))[..., :rank]
        q = projection(normal, rank if ranks is None else ranks)
        rows = zero_tail(project(zero_tail(x, tokens.count), q), ranks)
        previous = self.remembered(tokens, ctx)
        previous_rows = zero_tail(project(zero_tail(previous, tokens.count), q), ranks)
        y = run_in_order(blocks, repeat_tail(rows, ranks), first_tokens(tokens, rows, ranks), ctx)
        self.report_rows(blocks, x, tokens, ctx, rank, ranks)
        weights = least_squares_weights(rows, x) + least_squares_weights(previous_rows, previous)
        return weights @ y.float()  # weights are 0 beyond a row's rank


class SingularRows(LowRank):
    """Runs the leading singular directions. Their left vectors and those of the previous stage's output restore the tokens."""

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        rank, ranks = self.ranks(x, tokens, ctx)
        u, rows = factors(zero_tail(x, tokens.count), rank)
        previous, _ = factors(zero_tail(self.remembered(tokens, ctx), tokens.count), rank)
        y = run_in_order(blocks, repeat_tail(rows, ranks).to(x.dtype), first_tokens(tokens, rows, ranks), ctx)
        self.report_rows(blocks, x, tokens, ctx, rank, ranks)
        return (u + same_direction(previous, u)) @ zero_tail(y.float(), ranks)


class ApproximatedRows(LowRank):
    """Runs all tokens of the nearest matrix of low rank in place of the input."""

    restores_from_memory: ClassVar[bool] = False

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def own_macs(self, tokens: int, dim: int) -> int:
        """MACs to put the factors together, in which directions beyond the rank are zeros."""
        return tokens * self.rank.columns(tokens) * dim

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        assert isinstance(self.rank, Energy)
        ranks = energy_ranks(singular_energies(x, tokens.count), self.rank.alpha)
        near = repeat_tail(approximation(zero_tail(x, tokens.count), ranks).to(x.dtype), tokens.count)
        if ctx.computed is not None:
            ctx.computed.add(tokens, x, sublayers_in(blocks))
        return run_in_order(blocks, near, tokens, ctx)


SPANS: dict[Variant, type[LowRank]] = {
    "svd_approximation": ApproximatedRows,
    "svd": SingularRows,
    "svd_fixed": SingularRows,
    "least_squares": LeastSquaresRows,
    "representative": RepresentativeRows,
}
