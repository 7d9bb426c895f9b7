"""Choosing and merging tokens: tensors in, tensors out, and nothing is read back from the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..errors import SettingError
from ..models.base import NextScaleModel
from ..stage import Stage, Tokens, repeat_tail, to_double


def require_separate_sublayers(model: NextScaleModel, method: str) -> None:
    """Raises SettingError if the sublayers of the model's blocks cannot run one by one, on different tokens in every row."""
    if any(block.changes_input for block in model.stack):
        raise SettingError(f"{method} runs sublayers one by one, and level_every_chunk adds the level between them: switch it off.")
    if model.rows_share_text:
        raise SettingError(f"{method} chooses tokens by row, and with as_released STAR's text attention reads the first: load it without.")


def require_own_text(model: NextScaleModel, batch: int, what: str) -> None:
    """Raises SettingError if the images of a batch cannot run different tokens, since the first row's text attention stands for all."""
    if batch > 1 and model.rows_share_text:
        raise SettingError(
            f"{what} of every image, and with as_released STAR's text attention reads the first: load it without, or one image at a time."
        )


@overload
def share_of(count: int, ratio: float) -> int: ...
@overload
def share_of(count: Tensor, ratio: float) -> Tensor: ...
def share_of(count: int | Tensor, ratio: float) -> int | Tensor:
    """Returns the share `ratio` of `count` tokens, rounded down. Host and device use double precision: 0.29 of 100 is 28, not 29."""
    return int(count * ratio) if isinstance(count, int) else (to_double(count) * ratio).long()


def pick(x: Tensor, selection: Tensor) -> Tensor:
    """Returns entries of x [R, N, C] at the positions `selection` [R, K]: [R, K, C]."""
    return x.gather(1, selection[..., None].expand(-1, -1, x.shape[-1]))


def put_(x: Tensor, selection: Tensor, values: Tensor) -> Tensor:
    """Writes `values` [R, K, C] into x [R, N, C] at the positions `selection` [R, K]."""
    return x.scatter_(1, selection[..., None].expand(-1, -1, x.shape[-1]), values)


def real_tokens(tokens: Tokens, entries: int) -> Tensor | None:
    """Marks the `entries` of a row that are not padding, [R, N]; None if all are real."""
    return None if tokens.count is None else torch.arange(entries, device=tokens.count.device) < tokens.count[:, None]


def real_counts(tokens: Tokens, x: Tensor) -> Tensor:
    """Counts the tokens of every row of x [R, N, ...] that are not padding, [R]."""
    return torch.full(x.shape[:1], x.shape[1], device=x.device) if tokens.count is None else tokens.count.long()


# --- salient tokens


def row_mean(x: Tensor, tokens: Tokens) -> Tensor:
    """Returns the mean over the real tokens of every row of x [R, N, C]: [R, 1, C], float32."""
    real = real_tokens(tokens, x.shape[1])
    if real is None or tokens.count is None:
        return kernels.mean_over_tokens(x) if kernels.available(x) else x.mean(dim=1, keepdim=True, dtype=torch.float32)
    return x.masked_fill(~real[..., None], 0).sum(dim=1, keepdim=True, dtype=torch.float32) / tokens.count[:, None, None]


def distance_from_mean(x: Tensor, tokens: Tokens) -> Tensor:
    """Returns the distance of every token of x [R, N, C] from the mean of its row, [R, N], float32."""
    mean = row_mean(x, tokens)
    return kernels.distance_from_mean(x, mean) if kernels.available(x) else torch.linalg.vector_norm(x - mean, dim=-1)


def top_share(tokens: Tokens, score: Tensor, ratio: float) -> tuple[Tensor, Tokens]:
    """Keeps all but the lowest share `ratio` of every row by `score` [R, N]; returns their positions and tokens, in raster order."""
    keep = tokens.num_tokens - share_of(tokens.num_tokens, ratio)
    if tokens.count is None:
        return tokens.top(score, keep)
    return tokens.top(score, tokens.count - share_of(tokens.count, ratio), keep)


# --- merging similar tokens


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
    """Replaces tokens by fewer: destinations, each the mean of what was merged into it, and the tokens that were not merged."""

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


def most_similar(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest cosine of every token of x [R, N, C] with a token at `positions` [R, D], and its number in D: [R, N] each.

    Cosines are compared in float16, and of equal ones the first is taken. Equal tokens are common, and a matrix product rounds them
    differently in every batch; bfloat16, on the other hand, has no number between 0.996 and 1.
    """
    unit = F.normalize(x.float(), dim=-1)
    if x.dtype != torch.float32:
        unit = unit.half()
    similarity, place = (unit @ pick(unit, positions).mT).half().max(dim=-1)
    return similarity, place
