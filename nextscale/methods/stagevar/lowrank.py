"""Few rows in place of many: projections, their inverses and how many rows are enough. Pure tensors in, tensors out.

Shapes: R rows of the batch, N tokens of C channels, r rows that stand for them. Where rows of the batch differ, `count` [R] is the
number of their real entries; the others repeat the last real one, or are zero where a function says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...stage import Tokens


def zero_tail(x: Tensor, count: Tensor | None) -> Tensor:
    """x [R, N, C] with zeros beyond a row's `count`."""
    if count is None:
        return x
    return x.masked_fill(torch.arange(x.shape[1], device=x.device)[:, None] >= count[:, None, None], 0.0)


# --- representatives and random projection


def squared_norms(x: Tensor) -> Tensor:
    """Squared lengths of the tokens of x [R, N, C], in float32: [R, N]."""
    return x.float().square().sum(dim=-1)


def representatives(weight: Tensor, noise: Tensor, rank: int, count: Tensor | None = None) -> Tensor:
    """Samples `rank` of N tokens without replacement, with probability proportional to `weight` [R, N]: [R, rank], in this order.

    The largest ratios of weight to unit exponential `noise` win, as in torch.multinomial, which makes the same of the same noise.
    """
    ratio = weight / noise
    if count is not None:
        ratio = ratio.masked_fill(torch.arange(ratio.shape[1], device=ratio.device) >= count[:, None], -1.0)
    return ratio.topk(rank, dim=1).indices


def projection(normal: Tensor, ranks: int | Tensor) -> Tensor:
    """Q with entries N(0, 1/r) from standard normal numbers [R, N, r]; the rows of the batch may have r of their own [R]."""
    return normal / (ranks**0.5 if isinstance(ranks, int) else ranks.sqrt()[:, None, None])


def project(x: Tensor, q: Tensor) -> Tensor:
    """Q^T F: x [R, N, C] and q [R, N, r] to [R, r, C]."""
    return q.to(x.dtype).transpose(1, 2) @ x


# --- how many rows are enough


def singular_energies(x: Tensor, count: Tensor | None = None) -> Tensor:
    """Squared singular values of x [R, N, C], largest first: [R, min(N, C)].

    Of x as it is, as in equation 4, and as the variants decompose it. The published tables were measured of mean-centred features, which
    lack the direction that all tokens share and so need more rows for the same alpha: on nano 3.0 % of the tokens in place of 1.6 % at
    40x40 and alpha 0.96.
    """
    return torch.linalg.svdvals(zero_tail(x.float(), count)).square()


def energy_ranks(energies: Tensor, alpha: float) -> Tensor:
    """The smallest number of leading `energies` [R, n] that holds `alpha` of their sum (equation 4): [R]."""
    held = energies.cumsum(dim=1)
    return ((held < alpha * held[:, -1:]).sum(dim=1) + 1).clamp(max=energies.shape[1])


@dataclass(frozen=True)
class Share:
    """A fixed share: int(ratio * tokens) + 1 rows."""

    ratio: float
    counted: int | None = None  # tokens beyond this number do not count: the dim, for all but Infinity
    most: int | None = None  # the largest possible rank

    def rows(self, tokens: int) -> int:
        counted = tokens if self.counted is None else min(tokens, self.counted)
        rows = min(int(self.ratio * counted) + 1, tokens)
        return rows if self.most is None else min(rows, self.most)

    def columns(self, cells: int) -> int:
        """Columns of Q for which a stage takes noise, however many of its cells run."""
        return self.rows(cells)

    def of(self, x: Tensor, tokens: Tokens) -> tuple[int, Tensor | None]:
        """The rank of x [R, N, C]: the largest of the batch, and where they differ, that of each row [R]."""
        rows = self.rows(x.shape[1])
        if tokens.count is None:
            return rows, None
        counted = tokens.count.double()
        if self.counted is not None:
            counted = counted.clamp(max=self.counted)
        own = torch.minimum((self.ratio * counted).long() + 1, tokens.count)
        return rows, own.clamp(max=rows)


@dataclass(frozen=True)
class Energy:
    """As many rows as singular directions that hold `alpha` of the energy. The host waits for a decomposition on the device."""

    alpha: float
    dim: int  # of the network
    assumed: float = 1.0  # share of the largest possible rank that a forecast assumes

    def rows(self, tokens: int) -> int:
        return max(1, round(self.assumed * self.columns(tokens)))

    def columns(self, cells: int) -> int:
        return min(cells, self.dim)

    def of(self, x: Tensor, tokens: Tokens) -> tuple[int, Tensor | None]:
        own = energy_ranks(singular_energies(x, tokens.count), self.alpha)
        fewest, most = torch.stack([own.min(), own.max()]).tolist()
        return most, None if fewest == most and tokens.count is None else own


Rank = Share | Energy


# --- singular vectors and least squares


def factors(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U [R, N, rank] and Sigma V^T [R, rank, C] of the leading singular directions of x (equation 5), in float32.

    An image must not depend on what a decomposition leaves open: the largest entry of every right vector is made positive, and
    directions that x does not have, as in a map resized from fewer tokens, are zero.
    """
    u, s, vt = torch.linalg.svd(x.float(), full_matrices=False)
    u, vt = u[..., :rank], vt[:, :rank]
    sign = vt.gather(2, vt.abs().argmax(dim=2, keepdim=True)).sign()  # [R, rank, 1]
    there = s > max(x.shape[1:]) * torch.finfo(s.dtype).eps * s[:, :1]
    u = (u * sign.transpose(1, 2)).masked_fill(~there[:, None, :rank], 0.0)
    return u, s[:, :rank, None] * vt * sign


def approximation(x: Tensor, ranks: Tensor) -> Tensor:
    """The nearest matrix of rank ranks[r] to each x[r] [N, C], in float32."""
    u, rows = factors(x, min(x.shape[1:]))
    return u @ zero_tail(rows, ranks)


def same_direction(u: Tensor, like: Tensor) -> Tensor:
    """u [R, N, r], with columns that point away from those of `like` turned round."""
    return torch.where((u * like).sum(dim=1, keepdim=True) < 0, -u, u)


def least_squares_weights(rows: Tensor, x: Tensor) -> Tensor:
    """W [R, N, r] for which W `rows` comes nearest to x (equation 6), for rows [R, r, C] and x [R, N, C], in float32.

    Rows of zeros get the weight 0.
    """
    return x.float() @ torch.linalg.pinv(rows.float())
