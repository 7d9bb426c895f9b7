"""Variants of StageVAR for study: its table 2 with singular vectors and least squares, and ranks measured during generation.

They take longer than they save, and the report counts measured ranks as forecast.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from nextscale.methods.method import Plans, Span
from nextscale.methods.stagevar import LowRankGroup, StageVAR, first_tokens, noise_of, project, zero_tail
from nextscale.methods.stagevar_ranks import energy_ranks
from nextscale.models.base import NextScaleModel
from nextscale.models.blocks import Block, run_in_order
from nextscale.models.context import ForwardContext
from nextscale.stage import Schedule, Stage, Tokens, repeat_tail
from nextscale.validation import require, require_choice

Variant = Literal["vanilla", "svd_approximation", "svd", "svd_fixed", "least_squares", "representative"]
MEASURED = "measured"


@dataclass(frozen=True)
class StageVARVariants(StageVAR):
    """StageVAR with another way to run a stage at low rank.

    variant: in the order of the paper's table 2. "vanilla" runs these stages in full; "svd_approximation" runs all tokens of the best
        approximation; "svd" runs the leading singular directions, as many as the energy asks for, and "svd_fixed" as many as `ranks` says;
        "least_squares" runs random projections and solves for the tokens; "representative" is the method.
    ranks: as in StageVAR, or "measured": from singular values during generation. Every image has its own, and every group waits for the
        host.
    """

    variant: Variant = "representative"

    def __post_init__(self) -> None:
        require_choice("variant", self.variant, get_args(Variant))
        measured = isinstance(self.ranks, str) and self.ranks == MEASURED
        fixed = self.ranks is None or self.variant not in ("vanilla", "svd", "svd_approximation")
        require(fixed, "ranks", f"left out with variant {self.variant}, which finds ranks from alpha or has none", self.ranks)
        require(not measured or self.variant != "svd_fixed", "ranks", 'fixed with variant svd_fixed; measured is "svd"', self.ranks)
        require(not self.as_released or self.variant == "representative", "variant", "representative with as_released", self.variant)
        if measured:
            object.__setattr__(self, "ranks", None)
        super().__post_init__()
        if measured:
            object.__setattr__(self, "ranks", MEASURED)

    @property
    def measured(self) -> bool:
        return self.ranks == MEASURED or self.variant in ("svd", "svd_approximation")

    @property
    def capturable(self) -> bool:
        """True if the host reads nothing: it reads measured ranks, and solvers report to it whether they succeeded."""
        return self.variant in ("vanilla", "representative") and not self.measured

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        """`kept` is the assumed share of the largest possible rank where ranks are measured."""
        plans = super().forecast(model, schedule, guided, kept)
        if self.variant == "svd_approximation":  # needs nothing of the stage before
            spans = [tuple(replace(span, store=False) for span in plan.spans if isinstance(span, StudiedGroup)) for plan in plans]
            plans = tuple(replace(plan, spans=own) for plan, own in zip(plans, spans, strict=True))
        if not self.measured:
            return plans
        assumed = [tuple(replace(span, assumed=kept) if isinstance(span, StudiedGroup) else span for span in plan.spans) for plan in plans]
        return tuple(replace(plan, spans=own) for plan, own in zip(plans, assumed, strict=True))

    def stage_alphas(self, model: NextScaleModel, schedule: Schedule) -> dict[int, float]:
        alphas = super().stage_alphas(model, schedule)
        return {stage: alpha for stage, alpha in alphas.items() if self.variant != "vanilla" or alpha in (0, 1)}

    def low_rank_groups(self, model: NextScaleModel, stage: Stage, alpha: float, layers: Sequence[range], store: bool) -> Sequence[Span]:
        dim, kind = model.block_config.dim, SPANS[self.variant]
        if self.measured:
            return [kind(blocks, group, 1.0, dim, store, alpha=alpha) for group, blocks in enumerate(layers)]
        if self.variant == "representative":
            return super().low_rank_groups(model, stage, alpha, layers, store)
        ratios = self.ratios(model, stage, alpha, len(layers))
        return [kind(blocks, group, ratio, dim, store) for group, (blocks, ratio) in enumerate(zip(layers, ratios, strict=True))]


# --- spans


@dataclass(frozen=True)
class StudiedGroup(LowRankGroup):
    """Runs random projections at a given or measured rank. Subclasses run other rows."""

    alpha: float | None = None  # the rank holds this share of the energy; None: given by `ratio`
    assumed: float = 1.0  # share of the largest possible rank that a forecast assumes

    def num_tokens(self, tokens: int) -> int:
        if self.alpha is not None:
            return max(1, round(self.assumed * min(tokens, self.channels or tokens)))
        return super().num_tokens(tokens)

    def ranks(self, x: Tensor, tokens: Tokens) -> tuple[int, Tensor | None]:
        if self.alpha is None:
            return super().ranks(x, tokens)
        return self.measured_ranks(torch.linalg.svdvals(zero_tail(x.float(), tokens.count)), tokens)

    def measured_ranks(self, values: Tensor, tokens: Tokens) -> tuple[int, Tensor | None]:
        """Returns what `ranks` does, from singular values [R, n]. The host waits for them."""
        assert self.alpha is not None
        own = energy_ranks(values.square(), self.alpha)
        fewest, most = torch.stack([own.min(), own.max()]).tolist()
        return most, None if fewest == most and tokens.count is None else own

    def projection(self, x: Tensor, tokens: Tokens, ctx: ForwardContext, rank: int, ranks: Tensor | None) -> Tensor:
        if self.alpha is None:
            return super().projection(x, tokens, ctx, rank, ranks)
        normal = noise_of(ctx.method_rng.normal, x, tokens, ctx, min(tokens.stage.cells, x.shape[2]))[..., :rank]
        return normal / (rank**0.5 if ranks is None else ranks.sqrt()[:, None, None])

    def report_rows(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext, rank: int, ranks: Tensor | None) -> None:
        """Reports that every token had the same part in the rows that the blocks computed."""
        if ctx.computed is None:
            return
        rows = torch.full((x.shape[0],), rank, device=x.device) if ranks is None else ranks
        share = rows / (x.shape[1] if tokens.count is None else tokens.count)
        ctx.computed.add(tokens, x, sum(block.num_sublayers for block in blocks), share)


class LeastSquaresRows(StudiedGroup):
    """Runs random projections and restores the tokens by least squares, with the previous stage's solution added."""

    def own_macs(self, tokens: int, dim: int) -> int:
        return 5 * super().own_macs(tokens, dim)  # project and solve, for input and previous output; restore

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        rank, ranks = self.ranks(x, tokens)
        q = self.projection(x, tokens, ctx, rank, ranks)
        previous = self.restored(tokens, ctx)
        rows, previous_rows = (zero_tail(project(one, q, tokens.count), ranks) for one in (x, previous))
        y = run_in_order(blocks, repeat_tail(rows, ranks), first_tokens(tokens, rows, ranks), ctx)
        self.report_rows(blocks, x, tokens, ctx, rank, ranks)
        weights = least_squares_weights(rows, x) + least_squares_weights(previous_rows, previous)
        return weights @ y.float()  # weights are 0 beyond a row's rank


class SingularRows(StudiedGroup):
    """Runs the leading singular directions. Their left vectors and the left vectors of the previous stage's output restore the tokens.

    With a given rank no more directions are computed; the energy rule needs all of the input's.
    """

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        given = zero_tail(x, tokens.count)
        if self.alpha is None:
            rank, ranks = self.ranks(x, tokens)
            q = self.projection(x, tokens, ctx, rank, ranks)
            u, rows = leading_factors(given, q, ranks)
        else:
            u, s, rows = factors(given)
            rank, ranks = self.measured_ranks(s, tokens)
            u, rows = u[..., :rank], rows[:, :rank]
            q = self.projection(x, tokens, ctx, rank, ranks)
        previous, _ = leading_factors(zero_tail(self.restored(tokens, ctx), tokens.count), q, ranks)
        y = run_in_order(blocks, repeat_tail(rows, ranks).to(x.dtype), first_tokens(tokens, rows, ranks), ctx)
        self.report_rows(blocks, x, tokens, ctx, rank, ranks)
        return (u + same_direction(previous, u)) @ zero_tail(y.float(), ranks)


class ApproximatedRows(StudiedGroup):
    """Runs all tokens of the nearest matrix of low rank in place of the input."""

    @property
    def needs(self) -> frozenset[Hashable]:
        return frozenset()

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def own_macs(self, tokens: int, dim: int) -> int:
        """MACs to put the factors together, in which directions beyond the rank are zeros, and of the two products around `eigh`."""
        least = min(tokens, dim)
        return tokens * least * dim + 2 * least**2 * max(tokens, dim)

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        assert self.alpha is not None
        u, s, rows = factors(zero_tail(x, tokens.count))
        near = repeat_tail((u @ zero_tail(rows, energy_ranks(s.square(), self.alpha))).to(x.dtype), tokens.count)
        if ctx.computed is not None:
            ctx.computed.add(tokens, x, sum(block.num_sublayers for block in blocks))
        return run_in_order(blocks, near, tokens, ctx)


SPANS: dict[str, type[StudiedGroup]] = {
    "svd_approximation": ApproximatedRows,
    "svd": SingularRows,
    "svd_fixed": SingularRows,
    "least_squares": LeastSquaresRows,
    "representative": StudiedGroup,
}


# --- singular vectors and least squares


def factors(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns U [R, N, n], Sigma [R, n] and Sigma V^T [R, n, C] of x [R, N, C] (equation 5), largest first, in float32.

    Of x as it is, as in equation 4. An image must not depend on free choices of a decomposition: the largest entry of every right vector
    is made positive, and directions that x does not have, as in a map resized from fewer tokens, are zero.
    """
    x = x.double()
    if x.shape[1] > x.shape[2]:
        s, vt = singular_basis(x.mT @ x)
        vt = vt.mT
        u = x @ vt.mT / s[:, None].clamp(min=torch.finfo(s.dtype).tiny)
    else:
        s, u = singular_basis(x @ x.mT)
        vt = u.mT @ x / s[..., None].clamp(min=torch.finfo(s.dtype).tiny)
    return signed(u, s, vt)


def leading_factors(x: Tensor, q: Tensor, ranks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns U [R, N, r] and Sigma V^T [R, r, C] of the r leading singular directions of x, from a random projection q [R, N, r].

    Subspace iteration: no product is larger than N x C x r, and the only decomposition is r x r. Beyond a row's rank all is zero.
    """
    x, basis = x.double(), q.double()
    for _ in range(ITERATIONS):
        rows = torch.linalg.qr(x.mT @ basis).Q.mT  # [R, min(r, C), C]
        basis = x @ zero_tail(rows, ranks).mT
    s, turn = singular_basis(basis.mT @ basis)
    rows = zero_tail(rows, ranks)
    u = basis @ turn / s[:, None].clamp(min=torch.finfo(s.dtype).tiny)
    u, _, leading = signed(u, s, turn.mT @ rows)
    return u, leading


ITERATIONS = 3


def singular_basis(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the roots of a Gram matrix's eigenvalues, largest first, and its eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(1).clamp(min=0).sqrt(), vectors.flip(2)


def signed(u: Tensor, s: Tensor, vt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns U, Sigma and Sigma V^T in float32, with signs that depend on V alone and zeros for directions that are not there."""
    sign = vt.gather(2, vt.abs().argmax(dim=2, keepdim=True)).sign()  # [R, n, 1]
    there = s > max(u.shape[1], vt.shape[2]) * torch.finfo(torch.float32).eps * s[:, :1]
    s = s.masked_fill(~there, 0.0)
    u = (u * sign.mT).masked_fill(~there[:, None], 0.0)
    return u.float(), s.float(), (s[..., None] * vt * sign).float()


def same_direction(u: Tensor, like: Tensor) -> Tensor:
    """Returns u [R, N, r], with columns that point away from the columns of `like` reversed."""
    return torch.where((u * like).sum(dim=1, keepdim=True) < 0, -u, u)


def least_squares_weights(rows: Tensor, x: Tensor) -> Tensor:
    """Returns W [R, N, r] for which W `rows` comes nearest to x (equation 6), for rows [R, r, C] and x [R, N, C], in float32.

    Solves the normal equations in float64, which decompose r x r. Rows of zeros get the weight 0.
    """
    rows = rows.double()
    smallest = (max(rows.shape[1:]) * torch.finfo(torch.float32).eps) ** 2  # of an eigenvalue, of the largest one
    return (x.double() @ rows.mT @ torch.linalg.pinv(rows @ rows.mT, rtol=smallest, hermitian=True)).float()
