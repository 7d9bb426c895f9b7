"""Selecting and merging tokens: tensors in, tensors out, without reading back from the device."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..errors import SettingError
from ..models.base import NextScaleModel
from ..stage import Stage, Tokens, to_double
from .method import StagePlan, TokenCounts


def require_separate_sublayers(model: NextScaleModel, method: str) -> None:
    """Raises SettingError if the sublayers of the model's blocks cannot run one by one, on different tokens in every row."""
    if any(block.changes_input for block in model.stack):
        raise SettingError(f"{method} runs sublayers one by one, and level_every_chunk adds the level between them: switch it off.")
    if model.rows_share_text:
        raise SettingError(f"{method} chooses tokens by row, and with as_released STAR's text attention reads the first: load it without.")


def require_own_text(model: NextScaleModel, batch: int, what: str) -> None:
    """Raises SettingError if the images of a batch cannot run different tokens, because they share the first row's text attention."""
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


# --- cells that the host counts


def with_counts(planned: StagePlan, stage: Stage, counts: TokenCounts | None) -> StagePlan:
    """Returns the plan of a data-dependent stage for the counted tokens; dense if every image keeps all cells."""
    return replace(planned, num_tokens=None if counts is None or counts.fewest == stage.cells else counts.most)


def marked_tokens(stage: Stage, kept: Tensor, room: TokenCounts) -> Tokens:
    """Returns the cells that `kept` [B, cells] marks, in raster order, padded to the most of an image."""
    # Buckets that are too small are captured too, from images that need more, and never replayed.
    keep = kept.sum(dim=1).clamp(max=room.most) if room.fewest < room.most else room.most
    return Tokens(stage).top(kept.float(), keep, room.most)[1]


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
