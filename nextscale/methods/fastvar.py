"""FastVAR (Guo et al., 2025): late stages run only the salient tokens, and the others reuse outputs of an earlier stage."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from .. import kernels
from ..errors import SettingError
from ..models.blocks import run_sublayers
from ..models.context import ForwardContext
from ..stage import Schedule, Tokens, repeat_tail
from ..validation import block_range, blocks_of, is_fraction, is_int, require, require_flags, require_stages, sorted_pairs
from .method import Method, Plans, Span, StagePlan
from .token_ops import distance_from_mean, pick, put_, require_separate_sublayers, share_of, top_share

if TYPE_CHECKING:
    from ..models.base import NextScaleModel
    from ..models.blocks import Block

Ratios = tuple[tuple[int, float], ...]

INFINITY = {9: 0.4, 10: 0.5, 11: 1.0, 12: 1.0}
LARGER = {9: 0.4, 10: 0.5, 11: 0.6, 12: 0.75, 13: 0.85, 14: 0.9}
HART = {12: 0.5, 13: 0.75}
RATIOS = {
    **{("infinity", count): {s: r for s, r in (INFINITY if count < 14 else LARGER).items() if s < count} for count in range(10, 16)},
    ("hart", 14): HART,
    ("star", 14): HART,
}
"""Ratios by family and number of stages. Infinity's trained schedules (10 to 13 stages) and HART's have the published ratios, the others
ours.
"""
OTHER_RATIOS = (0.4, 0.5)  # of the last two stages; ours
RELEASED = ("infinity", "hart")  # families that the reference implementation runs
LAYERS, DEPTH = range(3, 28), 32  # that Infinity's reference implementation prunes, of how many


@dataclass(frozen=True)
class FastVAR(Method):
    """Late stages run each sublayer on the salient tokens only, those that differ most from the mean of their row (eq. 4 and 5).

    The others reuse the update of an earlier stage, area-resized (eq. 6), and leave no keys and values in the cache. Every sublayer of
    every block, and every row, chooses its own tokens. The head still sees all tokens.

    ratios: {stage index: share of its tokens that is not run}; 1.0 skips the stage. The paper found 0.4 to 0.75 a good range for late
        stages. None is the published choice, for Infinity {9: 0.4, 10: 0.5, 11: 1.0, 12: 1.0} as far as the schedule goes, for HART
        {12: 0.5, 13: 0.75}. Ours are HART's ratios for STAR, 0.4 to 0.9 without a skipped stage for Infinity with 14 and 15 stages, and 0.4
        and 0.5 in the last two stages of every other model or number of stages.
    cache_stage: the stage whose sublayer outputs are kept. None is the last one that runs before the first pruned one, which the paper
        found best (table A.4).
    layers: (first, last + 1) or a single block: the blocks that are pruned. None is all blocks, but for Infinity (3, 28) of 32 as in the
        reference implementation, and the same share of other depths: (1, 7) of 8, (4, 35) of 40.
    as_released: prunes blocks 3 to 27 of Infinity whatever its depth, as the reference implementation does, which exists for Infinity and
        HART. It fixes all other settings.
    """

    ratios: Mapping[int, float] | Ratios | None = None
    cache_stage: int | None = None
    layers: tuple[int, int] | None = None
    as_released: bool = False

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        if self.as_released and (self.ratios, self.cache_stage, self.layers) != (None, None, None):
            raise SettingError("as_released fixes ratios, cache_stage and layers: leave them out, or as_released.")
        if self.ratios is not None:
            ratios = sorted_pairs("ratios", self.ratios, "number from 0 to 1 (1 skips the stage)", is_fraction)
            require(not dict(ratios).get(0), "ratios", "0 for stage 0, the single token that everything starts from", self.ratios)
            object.__setattr__(self, "ratios", ratios)
        require(self.cache_stage is None or is_int(self.cache_stage), "cache_stage", "a stage index from 0", self.cache_stage)
        if self.layers is not None:
            object.__setattr__(self, "layers", block_range("layers", self.layers))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        ratios, layers, cached = self.stage_ratios(model, schedule), self.pruned_layers(model), self.cache_stage
        pruned = [
            stage.index
            for stage in schedule
            if layers and 0 < ratios.get(stage.index, 0) < 1 and share_of(stage.cells, ratios[stage.index])
        ]
        if pruned:
            require_separate_sublayers(model, "FastVAR")
            run = [stage for stage in range(pruned[0]) if ratios.get(stage) != 1]
            require(cached is None or cached in run, "cache_stage", f"one of {run}, which run before the first pruned stage", cached)
            cached = run[-1] if cached is None else cached

        def plan(stage: int) -> StagePlan:
            if stage in pruned:
                return StagePlan(spans=(PrunedBlocks(layers, ratios[stage]),))
            caches = pruned and stage == cached
            return StagePlan(skip=ratios.get(stage) == 1, spans=(CachedBlocks(layers, model.stack[0].num_sublayers),) if caches else ())

        return tuple(map(plan, range(len(schedule))))

    def stage_ratios(self, model: NextScaleModel, schedule: Schedule) -> Mapping[int, float]:
        stages = len(schedule)
        if self.ratios is None:
            last = range(stages - len(OTHER_RATIOS), stages)
            other = {stage: ratio for stage, ratio in zip(last, OTHER_RATIOS, strict=True) if stage > 0}
            return RATIOS.get((model.family, stages), other)
        require_stages("ratios", dict(self.ratios), stages)
        return dict(self.ratios)

    def pruned_layers(self, model: NextScaleModel) -> range:
        depth = len(model.blocks)
        require(not self.as_released or model.family in RELEASED, "as_released", f"left out except for {', '.join(RELEASED)}", model.family)
        if self.layers is not None:
            return blocks_of("layers", self.layers, depth)
        if model.family != "infinity":
            return range(depth)
        if self.as_released:
            return LAYERS[: max(depth - LAYERS.start, 0)]
        return range(*(round(edge * depth / DEPTH) for edge in (LAYERS.start, LAYERS.stop)))


# --- spans


def memory_key(layer: int, sublayer: int) -> Hashable:
    """Returns the key in `ctx.memory` of a sublayer's update."""
    return "fastvar", layer, sublayer


@dataclass(frozen=True)
class CachedBlocks(Span):
    """Runs all tokens and stores the update of every sublayer."""

    whole_stage = True
    layers: range
    sublayers: int  # of each block

    def num_tokens(self, tokens: int) -> int:
        return tokens

    @property
    def stores(self) -> frozenset[Hashable]:
        return frozenset(memory_key(layer, number) for layer in self.layers for number in range(self.sublayers))

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        keyed = [(memory_key(block.layer, i), sublayer) for block in blocks for i, sublayer in enumerate(block.sublayers(ctx))]
        sublayers = [sublayer for _, sublayer in keyed]
        return run_sublayers(sublayers, x, tokens, ctx, lambda number, update: ctx.memory.store(keyed[number][0], update, tokens))


@dataclass(frozen=True)
class PrunedBlocks(Span):
    """Runs every sublayer on the salient tokens, and adds the stored updates of an earlier stage to the others."""

    layers: range
    ratio: float  # share of the tokens that do not run

    def num_tokens(self, tokens: int) -> int:
        return tokens - share_of(tokens, self.ratio)

    @property
    def needs(self) -> frozenset[Hashable]:
        return frozenset(memory_key(layer, 0) for layer in self.layers)

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        for block in blocks:
            for number, sublayer in enumerate(block.sublayers(ctx)):
                selection, kept = top_share(tokens, distance_from_mean(x, tokens), self.ratio)
                if ctx.computed is not None:
                    ctx.computed.add(kept, selection, 1)
                update, gate = sublayer.update(x, kept, ctx, selection)
                x = restored(x, update, gate, selection, memory_key(block.layer, number), tokens, ctx)
        return repeat_tail(x, tokens.count)


def restored(
    x: Tensor, update: Tensor, gate: Tensor | None, selection: Tensor, key: Hashable, tokens: Tokens, ctx: ForwardContext
) -> Tensor:
    """Returns x [R, N, C] with the update [R, K, C] added at the selected tokens, and the stored one at the others."""
    if kernels.available(x):
        memory, size = ctx.memory.stored(key)
        return kernels.restore_tokens(memory, size, tokens.stage.size, update, selection, base=x, gate=gate, cells=tokens.index)
    return put_(x + ctx.memory.fill(key, tokens), selection, pick(x, selection) + update)
