"""ToMe (Bolya and Hoffman, 2023): similar tokens are merged before a sublayer, and all of them take the output of the merged one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from nextscale.methods.method import DENSE, Method, Plans, Span, StagePlan
from nextscale.methods.skip import present_stages, stage_indices
from nextscale.methods.token_ops import require_separate_sublayers
from nextscale.models.context import ForwardContext
from nextscale.models.macs import SublayerTokens
from nextscale.stage import Schedule, Stage, Tokens
from nextscale.validation import is_fraction, require, require_flags

from .merging import Destinations, Merge, block_count, merged_count
from .stages import LAST_STAGES

if TYPE_CHECKING:
    from nextscale.models.base import NextScaleModel
    from nextscale.models.blocks import Block

SublayerName = Literal["attention", "cross_attention", "feed_forward"]


@dataclass(frozen=True)
class ToMe(Method):
    """Merges tokens before a sublayer and gives all of them its output, as published for diffusion models.

    One token of every 2x2 block of the grid is a destination. Of the others, those most similar to a destination, by the cosine of their
    residual streams at the start of the transformer block, are averaged into it. Keys and values of the merged tokens enter the cache.
    Every transformer block and every row merges its own tokens.

    ratio: share of the tokens that is merged into others. Destinations stay, so that more than 0.75 merges no more.
    stages: indices of the stages where tokens are merged; None is the last three.
    sublayers: those that run on merged tokens: "attention", "cross_attention" (for models that have it), "feed_forward".
    random: takes a random token of every 2x2 block as its destination, for every image and stage, instead of the one at the top left.
    """

    ratio: float = 0.5
    stages: tuple[int, ...] | None = None
    sublayers: tuple[SublayerName, ...] = ("attention", "feed_forward")
    random: bool = False

    def __post_init__(self) -> None:
        require_flags(self, "random")
        require(is_fraction(self.ratio), "ratio", "a number from 0 to 1", self.ratio)
        if self.stages is not None:
            object.__setattr__(self, "stages", stage_indices(self.stages))
        object.__setattr__(self, "sublayers", sublayer_names(self.sublayers))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        text = "cross_attention" not in self.sublayers or all(block.has_text for block in model.stack)
        require(text, "sublayers", f"attention and feed_forward for {type(model).__name__}, which has no cross_attention", self.sublayers)
        stages = present_stages(range(len(schedule))[-LAST_STAGES:] if self.stages is None else self.stages, schedule)
        plans = [DENSE] * len(schedule)
        for stage in (schedule[index] for index in stages):
            span = MergedBlocks(range(len(model.blocks)), self.ratio, self.sublayers, block_count(stage), self.random)
            if self.sublayers and span.num_tokens(stage.cells) < stage.cells:
                require_separate_sublayers(model, "ToMe")
                plans[stage.index] = StagePlan(spans=(span,))
        return tuple(plans)


def sublayer_names(sublayers: Sequence[str] | str) -> tuple[str, ...]:
    """Returns checked names of sublayers, in the order in which a block runs them."""
    names = (sublayers,) if isinstance(sublayers, str) else sublayers
    good = isinstance(names, Sequence) and all(name in get_args(SublayerName) for name in names)
    require(good, "sublayers", f"a tuple of {', '.join(get_args(SublayerName))}", sublayers)
    return tuple(name for name in get_args(SublayerName) if name in names)


def sublayers_of(block: Block) -> tuple[str, ...]:
    """Returns the names of a block's sublayers, in order."""
    return tuple(name for name in get_args(SublayerName) if name != "cross_attention" or block.has_text)


@dataclass(frozen=True)
class MergedBlocks(Span):
    """Runs some sublayers of its blocks on merged tokens."""

    layers: range
    ratio: float
    sublayers: tuple[SublayerName, ...]
    destinations: int  # in the whole stage
    random: bool = False

    def num_tokens(self, tokens: int) -> int:
        return merged_count(tokens, self.ratio, self.destinations)

    def sublayer_tokens(self, tokens: int) -> SublayerTokens:
        attention, text, feed_forward = (self.num_tokens(tokens) if name in self.sublayers else tokens for name in get_args(SublayerName))
        return SublayerTokens(attention, text, feed_forward)

    def own_macs(self, tokens: int, dim: int) -> int:
        """MACs of one row: one product compares tokens with destinations, and one for every sublayer makes the means."""
        return len(self.layers) * (1 + len(self.sublayers)) * tokens * min(tokens, self.destinations) * dim

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        merging = self.merging(x, tokens, ctx)
        for block in blocks:
            merge = merging(block, x)
            for name, sublayer in zip(sublayers_of(block), block.sublayers(ctx), strict=True):
                merged = name in self.sublayers
                x = x + (merge.unmerge(sublayer(merge.merge(x), merge.tokens, ctx)) if merged else sublayer(x, tokens, ctx))
            if ctx.computed is not None:
                ctx.computed.add(merge.tokens, merge.selection, len(self.sublayers))
                ctx.computed.add(tokens, x, block.num_sublayers - len(self.sublayers))
        return x

    def merging(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Callable[[Block, Tensor], Merge]:
        """Returns the function with which a block merges its input, for a stage that begins with x."""
        into = Destinations.lowest(tokens, self._priority(x.shape[0], tokens.stage, x.device, ctx))
        return lambda block, x: Merge.closest(x, tokens, into, self.ratio)

    def _priority(self, rows: int, stage: Stage, device: torch.device, ctx: ForwardContext) -> Tensor:
        """Returns an order of the cells [R, cells], by which the first of every 2x2 block is its destination.

        Both rows of a guided pair have the same.
        """
        if not self.random:
            return torch.arange(stage.cells, device=device).expand(rows, -1)
        noise = ctx.method_rng.uniform((ctx.batch, stage.cells), device)
        return noise.argsort(dim=1).argsort(dim=1).repeat(rows // ctx.batch, 1)  # also where the noise is equal
