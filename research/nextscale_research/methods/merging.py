"""Merging similar tokens: tensors in, tensors out, and nothing is read back from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.methods.token_ops import most_similar, pick, put_, real_tokens, share_of
from nextscale.stage import Stage, Tokens, repeat_tail


def block_count(stage: Stage) -> int:
    """Returns the number of 2x2 blocks that cover the grid; those at an odd edge are cut."""
    return -(-stage.height // 2) * -(-stage.width // 2)


def merged_count(tokens: int, ratio: float, blocks: int) -> int:
    """Returns the tokens that are left when the share `ratio` is merged away and one token of every block must stay."""
    return max(tokens - share_of(tokens, ratio), min(tokens, blocks))


@dataclass(frozen=True, slots=True)
class Destinations:
    """The tokens that others are merged into: one of the tokens in each 2x2 block of the grid."""

    mask: Tensor  # [R, N]
    positions: Tensor  # [R, D], ascending; a row with fewer repeats its last
    count: Tensor | None  # [R] of different ones; None: D in every row

    @classmethod
    def lowest(cls, tokens: Tokens, priority: Tensor) -> Destinations:
        """Takes the token of every block with the lowest `priority` [R, cells], a different number for every cell of the stage."""
        stage = tokens.stage
        cells = torch.arange(stage.cells, device=priority.device).expand(priority.shape)
        cells, priority = (tokens.gather(of_cell[..., None])[..., 0] for of_cell in (cells, priority))  # [R, N] each
        block = cells // stage.width // 2 * -(-stage.width // 2) + cells % stage.width // 2
        blocks = block_count(stage)
        first = priority.new_full((priority.shape[0], blocks), stage.cells).scatter_reduce(1, block, priority, "amin")
        mask = first.gather(1, block) == priority
        real = real_tokens(tokens, mask.shape[1])
        if real is not None:
            mask = mask & real
        if tokens.index is None:
            positions, _ = tokens.top(mask.float(), blocks)
            return cls(mask, positions, None)
        count = mask.sum(dim=1)
        positions, _ = tokens.top(mask.float(), count, min(tokens.num_tokens, blocks))
        return cls(mask, positions, count)


@dataclass(frozen=True, slots=True)
class Merge:
    """Replaces tokens by fewer: destinations, each the mean of its merged tokens, and the tokens that were not merged."""

    tokens: Tokens  # the K tokens that are left, at their own cells
    selection: Tensor  # [R, K], their positions among all N
    source: Tensor  # [R, N], from which of these K each of the N takes its output
    destinations: Tensor  # [R, D], positions
    weights: Tensor  # [R, D, N], the weight of every token in every destination

    @classmethod
    def closest(cls, x: Tensor, tokens: Tokens, into: Destinations, ratio: float) -> Merge:
        """Merges the share `ratio` of x [R, N, C] that is most similar to a destination, by their cosine, into that destination."""
        similarity, destination = most_similar(x, into.positions)
        novelty = (-similarity).masked_fill(into.mask, float("inf"))
        num_tokens = merged_count(tokens.num_tokens, ratio, block_count(tokens.stage))
        keep: int | Tensor = num_tokens
        if into.count is not None:
            count = torch.full_like(into.count, tokens.num_tokens) if tokens.count is None else tokens.count
            keep = torch.maximum(count - share_of(count, ratio), into.count)
        selection, kept = tokens.top(novelty, keep, num_tokens)
        stays = torch.zeros_like(into.mask).scatter(1, selection, True)
        own = torch.arange(x.shape[1], device=x.device)
        target = torch.where(stays, own, into.positions.gather(1, destination))  # [R, N], among all N
        members = into.positions[..., None] == target[:, None]
        real = real_tokens(tokens, x.shape[1])
        if real is not None:
            members = members & real[:, None]
        source = torch.searchsorted(selection, repeat_tail(target, tokens.count))
        weights = members / members.sum(dim=-1, keepdim=True)
        return cls(kept, selection, source, into.positions, weights.to(x.dtype))

    def merge(self, x: Tensor) -> Tensor:
        """Returns x [R, N, C] at the tokens that are left, [R, K, C].

        Means are a product with the weights, since sums by scattering depend on the order of the device's threads.
        """
        means = self.weights @ x  # [R, D, C]
        return pick(put_(x.clone(), self.destinations, means), self.selection)

    def unmerge(self, y: Tensor) -> Tensor:
        """Returns y [R, K, C] at all tokens, [R, N, C]: every token takes the output of its destination."""
        return pick(y, self.source)


def real_counts(tokens: Tokens, x: Tensor) -> Tensor:
    """Counts the tokens of every row of x [R, N, ...] that are not padding, [R]."""
    return torch.full(x.shape[:1], x.shape[1], device=x.device) if tokens.count is None else tokens.count.long()
