"""SparseViT (Chen et al., 2023): the tokens with the largest activations run, and the others pass unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.methods.method import DENSE, Method, Plans, Span, StagePlan
from nextscale.methods.skip import stage_indices
from nextscale.methods.token_ops import pick, put_, real_tokens, require_separate_sublayers, share_of, top_share
from nextscale.models.blocks import run_in_order
from nextscale.models.context import ForwardContext
from nextscale.stage import Schedule, Stage, Tokens, repeat_tail
from nextscale.validation import is_fraction, is_int

from .stages import late_stages

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel
    from nextscale.models.blocks import Block


@dataclass(frozen=True)
class SparseViT(Method):
    """Ranks the tokens of a late stage once, by the mean size of their channels, and runs all blocks on the highest.

    Published for detectors whose attention stays inside windows, so that no other token reads the missing ones, and after fine-tuning with
    random shares. Here tokens that are left out leave no keys either, which global attention does miss: it is the comparison that
    SparseVAR's appendix makes.

    The knobs that matter:
    ratio: share of the tokens that is not run.
    stages: indices of the stages; None is from stage 10 on, at least the last three.

    To tinker with:
    window: side of square windows of cells that are ranked as one, by the root of the sum of their squared sizes; the last one that
        runs may be cut. 1 ranks single cells.
    """

    ratio: float = 0.5
    stages: tuple[int, ...] | None = None
    window: int = 1

    def __post_init__(self) -> None:
        if not is_fraction(self.ratio) or self.ratio == 1:
            raise SettingError(f"ratio is a share of the tokens from 0 to below 1; got {self.ratio!r}")
        if not is_int(self.window, 1):
            raise SettingError(f"window is the side of a window in cells, 1 or more; got {self.window!r}")
        if self.stages is not None:
            object.__setattr__(self, "stages", stage_indices(self.stages))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        plans = [DENSE] * len(schedule)
        span = ActiveBlocks(range(len(model.blocks)), self.ratio, self.window)
        for stage in late_stages(self.stages, schedule):
            if share_of(schedule[stage].cells, self.ratio) > 0:
                require_separate_sublayers(model, "SparseViT")
                plans[stage] = StagePlan(spans=(span,))
        return tuple(plans)


@dataclass(frozen=True)
class ActiveBlocks(Span):
    """Runs its blocks on the tokens with the largest activations of its input."""

    layers: range
    ratio: float  # share of the tokens that are not run
    window: int = 1

    def num_tokens(self, tokens: int) -> int:
        return tokens - share_of(tokens, self.ratio)

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        selection, kept = top_share(tokens, window_scores(x.float().abs().mean(dim=-1), tokens, self.window), self.ratio)
        if ctx.computed is not None:
            ctx.computed.add(kept, selection, sum(block.num_sublayers for block in blocks))
        run = run_in_order(blocks, pick(x, selection), kept, ctx)
        return repeat_tail(put_(x.clone(), selection, run), tokens.count)


def window_scores(size: Tensor, tokens: Tokens, window: int) -> Tensor:
    """Returns the norm [R, N] of tokens, or of the window of cells around each: the root of the sum of squares."""
    if window == 1:
        return size
    stage = tokens.stage
    number = tokens.gather(window_numbers(stage, window, size.device)[None, :, None].expand(size.shape[0], -1, -1))[..., 0]
    windows = -(-stage.height // window) * -(-stage.width // window)
    squares, real = size.square(), real_tokens(tokens, size.shape[1])
    if real is not None:
        squares = squares * real
    member = (number[:, None] == torch.arange(windows, device=size.device)[:, None]).float()  # [R, W, N]
    return (member @ squares[..., None])[..., 0].sqrt().gather(1, number)


def window_numbers(stage: Stage, window: int, device: torch.device) -> Tensor:
    """Returns the window of each cell of a stage, [cells], in raster order."""
    down, across = (torch.arange(side, device=device) // window for side in stage.size)
    return (down[:, None] * -(-stage.width // window) + across).flatten()
