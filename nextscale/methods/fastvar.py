"""FastVAR (Guo et al., 2025): late stages run only the salient tokens, and the others take what an earlier stage computed there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from .. import kernels
from ..errors import SettingError
from ..models.blocks import Sublayer, run_sublayers
from ..models.context import ForwardContext
from ..stage import Schedule, Tokens, repeat_tail
from ..validation import is_fraction, is_int, require_flags
from .method import DENSE, Method, Plans, Span, StagePlan
from .token_ops import distance_from_mean, pick, put_, require_separate_sublayers, share_of, top_share

if TYPE_CHECKING:
    from ..models.base import NextScaleModel
    from ..models.blocks import Block

T = TypeVar("T")
Ratios = tuple[tuple[int, float], ...]

OTHER_RATIOS = (0.4, 0.5)  # of the last two stages; ours


@dataclass(frozen=True)
class Published:
    """What the paper and its reference implementation do for one family."""

    ratios: Mapping[int, Mapping[int, float]]  # by number of stages, then by stage index
    layers: range | None = None  # of `depth` blocks; None: all blocks
    depth: int = 0  # of the model that they were published for
    sides: Mapping[int, float] | None = None  # ratios by the stage's side, as in the reference implementation; None: there is none
    cached_side: int = 0  # side of the stage whose outputs it keeps


def up_to(stages: int, ratios: Mapping[int, float]) -> dict[int, float]:
    """The ratios of the stages that a schedule of `stages` stages has."""
    return {stage: ratio for stage, ratio in ratios.items() if stage < stages}


INFINITY = {9: 0.4, 10: 0.5, 11: 1.0, 12: 1.0}
LARGER = {9: 0.4, 10: 0.5, 11: 0.6, 12: 0.75, 13: 0.85, 14: 0.9}
HART = {12: 0.5, 13: 0.75}
PUBLISHED: Mapping[str, Published] = {
    "infinity": Published(
        {**{stages: up_to(stages, INFINITY) for stages in range(10, 14)}, **{stages: up_to(stages, LARGER) for stages in (14, 15)}},
        layers=range(3, 28),
        depth=32,
        sides={32: 0.4, 40: 0.5, 48: 1.0, 64: 1.0},
        cached_side=24,
    ),
    "hart": Published({14: HART}, sides={48: 0.5, 64: 0.75}, cached_side=36),
    "star": Published({14: HART}),  # ours
}
"""The settings of Infinity as trained (10 to 13 stages) and of HART are published; those of STAR and of larger Infinity are ours."""


@dataclass(frozen=True)
class FastVAR(Method):
    """Late stages run each sublayer on the salient tokens only, those that differ most from the mean of their row (eq. 4 and 5).

    What the sublayer would have added to the others is taken from an earlier stage, area-resized (eq. 6). Tokens that are not run leave no
    keys and values in the cache. Every sublayer of every block, and every row, chooses anew. The head still sees all tokens.

    The knobs that matter:
    ratios: {stage index: share of its tokens that is not run}; 1.0 skips the stage. Late stages bear more: the paper found 0.4 to 0.75
        a good range. None is the published choice: for Infinity {9: 0.4, 10: 0.5, 11: 1.0, 12: 1.0}, as far as the schedule goes; for
        HART {12: 0.5, 13: 0.75}. The following are ours: STAR has the ratios of HART, Infinity with 14 and 15 stages has ratios that grow
        from 0.4 to 0.9 and skips no stage, and every other model or number of stages has 0.4 and 0.5 in the last two stages.

    To tinker with:
    cache_stage: the stage whose sublayer outputs are kept. None is the last one that runs before the first thinned one, which the paper
        found best (table A.4).
    layers: (first, last + 1), the blocks that are thinned; the others always run all tokens. None is all blocks, but for Infinity
        (3, 28) of 32 as in the reference implementation, and the same share of other depths: (1, 7) of 8, (4, 35) of 40.
    as_released: does what the reference implementation does, which finds stages by their side, on square images of Infinity and HART.
        Nothing else can be set then.
    """

    ratios: Mapping[int, float] | Ratios | None = None
    cache_stage: int | None = None
    layers: tuple[int, int] | None = None
    as_released: bool = False

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        if self.as_released and (self.ratios, self.cache_stage, self.layers) != (None, None, None):
            raise SettingError("as_released fixes ratios, cache_stage and layers: leave them out, or as_released")
        if self.ratios is not None:
            object.__setattr__(self, "ratios", normalised(self.ratios))
        if self.cache_stage is not None and not is_int(self.cache_stage):
            raise SettingError(f"cache_stage is the index of a stage, 0 or more; got {self.cache_stage!r}")
        if self.layers is not None:
            object.__setattr__(self, "layers", block_range(self.layers))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        ratios, cache = self._stages(model, schedule)
        layers = self._layers(model)
        plans = [StagePlan(skip=True) if ratios.get(stage.index) == 1 else DENSE for stage in schedule]
        thinned = {s: ratio for s, ratio in ratios.items() if ratio < 1 and share_of(schedule[s].cells, ratio) > 0} if layers else {}
        for stage, ratio in thinned.items():
            plans[stage] = StagePlan(spans=(ThinnedBlocks(layers, f"fastvar {ratio}", ratio),))
        if thinned:
            require_separate_sublayers(model, "FastVAR")
            plans[cache_stage(cache, min(thinned), ratios)] = StagePlan(spans=(RememberedBlocks(layers),))
        return tuple(plans)

    def _stages(self, model: NextScaleModel, schedule: Schedule) -> tuple[Mapping[int, float], int | None]:
        """Returns ratios by stage index, and the stage whose outputs to keep if that is settled; raises SettingError for absent stages."""
        if self.as_released:
            return released_stages(model, schedule)
        if self.ratios is None:
            return default_ratios(model, len(schedule)), self.cache_stage
        ratios = dict(self.ratios)
        absent = [stage for stage in ratios if stage >= len(schedule)]
        if absent:
            raise SettingError(f"FastVAR: ratios name stage {absent[0]}; this schedule has stages 0 to {len(schedule) - 1}")
        return ratios, self.cache_stage

    def _layers(self, model: NextScaleModel) -> range:
        """Returns the blocks that are thinned, none where the reference implementation has none."""
        depth = len(model.blocks)
        if self.layers is not None:
            if self.layers[1] > depth:
                raise SettingError(f"FastVAR: layers {self.layers} ends after the last block; this model has {depth}: at most (0, {depth})")
            return range(*self.layers)
        published = PUBLISHED.get(model.family)
        if published is None or published.layers is None:
            return range(depth)
        if self.as_released:  # which has these numbers for every depth
            return published.layers[: max(depth - published.layers.start, 0)]
        return range(*(round(edge * depth / published.depth) for edge in (published.layers.start, published.layers.stop)))


def cache_stage(given: int | None, first: int, ratios: Mapping[int, float]) -> int:
    """Returns the stage whose outputs are kept for the thinned stages, the first of which is `first`."""
    run = [stage for stage in range(first) if ratios.get(stage) != 1]
    if given is not None and given not in run:
        raise SettingError(f"FastVAR: cache_stage {given} must be run before stage {first}, the first that is thinned: choose one of {run}")
    return run[-1] if given is None else given


def normalised(ratios: Mapping[int, float] | Iterable[Sequence[float]]) -> Ratios:
    """Returns checked pairs of stage index and share, ordered by stage."""
    expected = "ratios are {stage index: share}, with indices from 1 and shares from 0 to 1 (1: the stage is skipped)"
    try:
        pairs = [(stage, share) for stage, share in (ratios.items() if isinstance(ratios, Mapping) else ratios)]
    except (TypeError, ValueError):
        raise SettingError(f"{expected}; got {ratios!r}") from None
    for stage, share in pairs:
        if not is_int(stage) or not is_fraction(share):
            raise SettingError(f"{expected}; got {stage!r}: {share!r}")
        if stage == 0 and share > 0:
            raise SettingError(f"{expected}; stage 0 is a single token that everything starts from")
    if len({stage for stage, _ in pairs}) < len(pairs):
        raise SettingError(f"{expected}; got a stage twice in {ratios!r}")
    return tuple(sorted((int(stage), float(share)) for stage, share in pairs))


def block_range(layers: Sequence[int]) -> tuple[int, int]:
    """Returns a checked pair of the first block and the one after the last."""
    pair = tuple(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else ()
    if len(pair) != 2 or not all(is_int(layer) for layer in pair) or pair[0] >= pair[1]:
        raise SettingError(f"layers is (first block, last block + 1), such as (3, 28); got {layers!r}")
    return int(pair[0]), int(pair[1])


def default_ratios(model: NextScaleModel, stages: int) -> Mapping[int, float]:
    """Returns ratios by stage index for schedules of `stages` stages."""
    published = PUBLISHED.get(model.family)
    if published is not None and stages in published.ratios:
        return published.ratios[stages]
    last_two = range(stages - len(OTHER_RATIOS), stages)
    return {stage: ratio for stage, ratio in zip(last_two, OTHER_RATIOS, strict=True) if stage > 0}


# --- the reference implementation


def released_stages(model: NextScaleModel, schedule: Schedule) -> tuple[dict[int, float], int | None]:
    """Returns ratios by stage index and the stage whose outputs are kept.

    Raises SettingError where the reference implementation fails, or would not do what it is for.
    """
    published = PUBLISHED.get(model.family)
    if published is None or published.sides is None:
        raise SettingError(
            f"FastVAR as_released: the reference implementation knows Infinity and HART, not {type(model).__name__}; leave it out"
        )
    if any(stage.height != stage.width for stage in schedule):
        raise SettingError(f"FastVAR as_released: the reference implementation needs stages that are all square; got {schedule}")
    ratios = {stage.index: published.sides[stage.width] for stage in schedule if stage.width in published.sides}
    thinned = [stage for stage, ratio in ratios.items() if ratio < 1]
    cached = [stage.index for stage in schedule if stage.width == published.cached_side and thinned and stage.index < thinned[0]]
    if thinned and not cached:
        raise SettingError(
            f"FastVAR as_released: stage {thinned[0]}, {schedule[thinned[0]].width} wide, takes outputs from an earlier one that is"
            f" {published.cached_side} wide, and the reference implementation fails without; got {schedule}"
        )
    skipped = [stage for stage, ratio in ratios.items() if ratio == 1]
    if skipped and skipped != list(range(skipped[0], len(schedule))):
        raise SettingError(
            f"FastVAR as_released: stage {skipped[0]}, {schedule[skipped[0]].width} wide, is skipped and a later one is not, where the"
            f" reference implementation fails; got {schedule}"
        )
    return ratios, cached[-1] if cached else None


# --- running


def memory_key(block: Block, sublayer: int) -> Hashable:
    """The key in `ctx.memory` of what a sublayer has added."""
    return "fastvar", block.layer, sublayer


def memory_names(layers: range) -> frozenset[Hashable]:
    """The names by which plans know what is kept of these blocks, one for all sublayers of a block."""
    return frozenset(("fastvar", layer) for layer in layers)


@dataclass(frozen=True)
class RememberedBlocks(Span):
    """Runs all tokens and keeps what every sublayer has added.

    Where the kernels run it is kept before the sublayer's gain, which they apply as they restore tokens; in torch it includes the gain.
    """

    whole_stage = True
    layers: range
    key: Hashable = "fastvar cache"

    def num_tokens(self, tokens: int) -> int:
        return tokens

    @property
    def stores(self) -> frozenset[Hashable]:
        return memory_names(self.layers)

    def stored_maps(self, blocks: Sequence[Block]) -> dict[Hashable, int]:
        return {name: block.num_sublayers for block in blocks for name in memory_names(range(block.layer, block.layer + 1))}

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        if tokens.index is not None:
            raise SettingError(
                f"FastVAR keeps what stage {tokens.stage.index} computes at all of its {tokens.stage.cells} cells, and another method runs"
                f" {tokens.num_tokens} tokens there: choose a cache_stage that the other method leaves whole"
            )
        if kernels.available(x):
            chain = [remembering(block, i, one) for block in blocks for i, one in enumerate(block.sublayers(ctx))]
            return run_sublayers(chain, x, tokens, ctx)
        for block in blocks:
            for number, sublayer in enumerate(block.sublayers(ctx)):
                update = sublayer(x, tokens, ctx)
                ctx.memory.store(memory_key(block, number), update, tokens)
                x = x + update
        return x


def remembering(block: Block, number: int, sublayer: Sublayer) -> Sublayer:
    """Returns the sublayer, changed so that it keeps what it computes before the gain."""

    def run(y: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        update = sublayer.run(y, tokens, ctx)
        ctx.memory.store(memory_key(block, number), update, tokens)
        return update

    return sublayer._replace(run=run)


@dataclass(frozen=True)
class ThinnedBlocks(Span):
    """Runs every sublayer on the salient tokens, and adds to the others what an earlier stage has kept."""

    layers: range
    key: Hashable
    ratio: float  # share of the tokens that are not run

    def num_tokens(self, tokens: int) -> int:
        return tokens - share_of(tokens, self.ratio)

    @property
    def needs(self) -> frozenset[Hashable]:
        return memory_names(self.layers)

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        for block in blocks:
            for number, sublayer in enumerate(block.sublayers(ctx)):
                selection, kept = top_share(tokens, distance_from_mean(x, tokens), self.ratio)
                if ctx.computed is not None:
                    ctx.computed.add(kept, selection, 1)
                update, gate = sublayer.update(x, kept, ctx, selection)
                x = restored(x, update, gate, selection, memory_key(block, number), tokens, ctx)
        return repeat_tail(x, tokens.count)


def restored(
    x: Tensor, update: Tensor, gate: Tensor | None, selection: Tensor, key: Hashable, tokens: Tokens, ctx: ForwardContext
) -> Tensor:
    """x [R, N, C] with the update [R, K, C] added at the selected tokens, and what an earlier stage has kept at the others."""
    if kernels.available(x):
        memory, size = remembered(ctx.memory.stored, key, tokens)
        return kernels.restore_tokens(memory, size, tokens.stage.size, update, selection, base=x, gate=gate, cells=tokens.index)
    filled = remembered(partial(ctx.memory.fill, tokens=tokens), key, tokens)
    return put_(x + filled, selection, pick(x, selection) + update)


def remembered(read: Callable[[Hashable], T], key: Hashable, tokens: Tokens) -> T:
    """Returns what `read` finds of a sublayer; raises SettingError if no stage has kept it."""
    try:
        return read(key)
    except KeyError:
        raise SettingError(
            f"FastVAR: stage {tokens.stage.index} takes outputs from a stage that another method has skipped: choose another cache_stage"
        ) from None
