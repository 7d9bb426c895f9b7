"""The low-rank variants that the StageVAR paper compares with its own: singular vectors and least squares (table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...models.blocks import Block, run_in_order
from ...models.env import Env
from ...stage import Tokens, repeat_tail
from .groups import LowRank, first_tokens, normal_noise, sublayers_in
from .lowrank import (
    Energy,
    approximation,
    energy_ranks,
    factors,
    least_squares_weights,
    project,
    projection,
    same_direction,
    singular_energies,
    zero_tail,
)


class LeastSquaresRows(LowRank):
    """Random projection, undone by least squares; what the blocks have changed is made up for with the previous stage's solution."""

    def own_macs(self, tokens: int, dim: int) -> int:
        return 5 * super().own_macs(tokens, dim)  # project and solve, for input and previous output; restore

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        rank, ranks = self.ranks(x, tokens, env)
        normal = normal_noise(x, tokens, env, self.rank.columns(tokens.stage.cells))[..., :rank]
        q = projection(normal, rank if ranks is None else ranks)
        rows = zero_tail(project(zero_tail(x, tokens.count), q), ranks)
        previous = self.remembered(tokens, env)
        previous_rows = zero_tail(project(zero_tail(previous, tokens.count), q), ranks)
        y = run_in_order(blocks, repeat_tail(rows, ranks), first_tokens(tokens, rows, ranks), env)
        self.report_rows(blocks, x, tokens, env, rank, ranks)
        weights = least_squares_weights(rows, x) + least_squares_weights(previous_rows, previous)
        return weights @ y.float()  # which are 0 beyond the ranks


class SingularRows(LowRank):
    """The leading singular directions; their left vectors and those of the previous stage's output restore the tokens."""

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        rank, ranks = self.ranks(x, tokens, env)
        u, rows = factors(zero_tail(x, tokens.count), rank)
        previous, _ = factors(zero_tail(self.remembered(tokens, env), tokens.count), rank)
        y = run_in_order(blocks, repeat_tail(rows, ranks).to(x.dtype), first_tokens(tokens, rows, ranks), env)
        self.report_rows(blocks, x, tokens, env, rank, ranks)
        return (u + same_direction(previous, u)) @ zero_tail(y.float(), ranks)


class ApproximatedRows(LowRank):
    """All tokens run, but their input is replaced by its nearest matrix of low rank."""

    restores_from_memory: ClassVar[bool] = False

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def own_macs(self, tokens: int, dim: int) -> int:
        return tokens * self.rank.rows(tokens) * dim

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        assert isinstance(self.rank, Energy)
        ranks = energy_ranks(singular_energies(x, tokens.count), self.rank.alpha)
        near = repeat_tail(approximation(zero_tail(x, tokens.count), ranks).to(x.dtype), tokens.count)
        if env.computed is not None:
            env.computed.add(tokens, x, sublayers_in(blocks))
        return run_in_order(blocks, near, tokens, env)
