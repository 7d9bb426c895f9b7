"""MACs of a request, computed from its plans. The model does not run and may be on the meta device.

Counted are all matrix multiplications between a stage's input and its codes: embedding, blocks, logits, HART's diffusion, STAR's refiner.
Not counted are the text encoder, the condition, the canvas and decoding. Work of a method itself is counted if its spans report it
(`Span.own_macs`), as StageVAR's and ToMe's do; SparseVAR's comparison of cells with anchors (cells x anchors x logits MACs per image and
reduced stage) is not. Padding of padded rows is counted; packed images count with their own tokens. All texts count with the length of the
longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..methods.method import DENSE, Span, StagePlan
from ..models.base import NextScaleModel
from ..models.macs import SublayerTokens, macs_per_token
from ..sampling import Refinement
from ..stage import Schedule, Stage


@dataclass(frozen=True, slots=True)
class Workload:
    """Properties of a request that determine its cost, apart from the method."""

    schedule: Schedule
    images: int = 1
    guided: bool = True  # two rows per image (CFG)
    text_tokens: int = 0  # read by cross-attention, including padding
    refine: Refinement | None = None  # STAR's refiner
    given: int = 0  # number of first stages whose codes are given, so that their head does not run
    residual_guided: bool = True  # False: HART's diffusion runs one CFG branch, as at a guidance scale of exactly 2


@dataclass(frozen=True, slots=True)
class StageCost:
    """MACs of one stage over all rows, and the keys that it adds. A skipped stage has no rows and no tokens."""

    stage: Stage
    rows: int = 0
    tokens: float = 0  # per row, without text, at the first block; the mean of all images if rows are packed
    computed: float = 0.0  # per row, without text: mean over all sublayers of all blocks
    linear: int = 0  # embedding and blocks
    attention: int = 0  # queries times keys and weights times values, including text
    head: int = 0  # from the last hidden states to codes
    keys: float = 0  # per row, over all layers, added by the stage; the last stage's are not kept
    held: float = 0  # per row, over all layers, kept for later stages

    @property
    def skipped(self) -> bool:
        return self.rows == 0

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.head

    def share(self, dense: StageCost) -> float:
        return self.total / dense.total


@dataclass(frozen=True, slots=True)
class RequestCost:
    """MACs of a request."""

    stages: tuple[StageCost, ...]

    @property
    def linear(self) -> int:
        return sum(stage.linear for stage in self.stages)

    @property
    def attention(self) -> int:
        return sum(stage.attention for stage in self.stages)

    @property
    def head(self) -> int:
        return sum(stage.head for stage in self.stages)

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.head

    @property
    def held(self) -> int:
        """Peak number of keys kept for later stages, over all rows and layers. The number of values is the same."""
        return round(max((stage.rows * stage.held for stage in self.stages), default=0))

    def share(self, dense: RequestCost) -> float:
        return self.total / dense.total


def request_cost(
    model: NextScaleModel,
    workload: Workload,
    plans: Sequence[StagePlan] | None = None,
    counts: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> RequestCost:
    """Returns the MACs of a request.

    Args:
        plans: a method's forecast, or the plans that ran (`as_run`). None: dense generation.
        counts: tokens of every image, by stage index, for stages with packed rows; by default equal.
    """
    schedule, images = workload.schedule, workload.images
    if plans is not None and len(plans) != len(schedule):
        raise ValueError(f"plans must have one entry for each of the {len(schedule)} stages of {schedule}; got {len(plans)}.")
    block = BlockMacs.of(model, workload)
    cached = CachedKeys([0] * len(model.blocks), images)
    branches = 2 if workload.guided else 1
    costs = []
    for stage, plan in zip(schedule, plans or (DENSE,) * len(schedule), strict=True):
        if plan.skip:
            costs.append(StageCost(stage, held=cached.of_row))
            continue
        if plan.cfg_branches != "both":
            branches = 1
        entered = StageInput.of(stage, plan, images, branches, counts.get(stage.index))
        prefix = model.text_prefix if stage.index == 0 else 0
        own = sum(span.own_macs(entered.tokens, model.block_config.dim) for span in plan.spans)
        layers = tokens_per_layer(plan.spans, entered.tokens, prefix, len(model.blocks))
        ran = SublayerTokens.total(layers)
        read = cached.with_stage(layers, entered.counts)
        pairs = branches * cached.pairs(layers, entered.counts, plan.attended)
        linear = model.embedding_macs(stage, images) + entered.rows * own + block.linear(ran, entered.rows)
        attention = block.products(pairs, ran.text, entered.rows)
        added = read.of_row - cached.of_row
        cached = cached if stage.last else read.limited(plan.kept_keys)
        head = head_macs(model, stage, workload, entered, plan.propagates) if stage.index >= workload.given else 0
        computed = entered.per_row(mean_tokens(ran, len(layers), block.text > 0)) - prefix
        tokens = entered.per_row(entered.tokens)
        costs.append(StageCost(stage, branches * images, tokens, computed, linear, attention, head, added, cached.of_row))
    return RequestCost(tuple(costs))


@dataclass(frozen=True, slots=True)
class StageInput:
    """Input of the blocks of a stage: one row per image and CFG branch, or one row per CFG branch if rows are packed."""

    images: int
    branches: int
    tokens: int  # per row
    counts: Sequence[int] | None  # per image, if rows are packed

    @classmethod
    def of(cls, stage: Stage, plan: StagePlan, images: int, branches: int, counts: Sequence[int] | None) -> StageInput:
        if plan.packed is None:
            return cls(images, branches, stage.cells if plan.num_tokens is None else plan.num_tokens, None)
        return cls(images, branches, plan.packed, counts or split_evenly(plan.packed, images))

    @property
    def rows_of_branch(self) -> int:
        return self.images if self.counts is None else 1

    @property
    def rows(self) -> int:
        return self.branches * self.rows_of_branch

    def per_row(self, tokens: float) -> float:
        """Converts tokens per row to the mean tokens per image."""
        return tokens if self.counts is None else tokens / self.images


def split_evenly(total: int, images: int) -> list[int]:
    return [total // images + (image < total % images) for image in range(images)]


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """Number of cached keys per image of a CFG branch: common to all images, plus those of stages with packed rows."""

    common: Sequence[int]  # per row, for each layer
    images: int
    own: Sequence[int] = ()  # per image, in every layer; empty until a stage packs its rows

    @property
    def of_row(self) -> float:
        """Keys per row over all layers, averaged over the images."""
        more = len(self.common) * sum(self.own)
        return sum(self.common) + (more / self.images if more else 0)

    def with_stage(self, layers: Sequence[SublayerTokens], counts: Sequence[int] | None) -> CachedKeys:
        """Adds the keys of a stage."""
        if counts is None:
            return replace(self, common=[before + layer.attention for before, layer in zip(self.common, layers, strict=True)])
        own = self.own or (0,) * self.images
        return replace(self, own=[before + count for before, count in zip(own, counts, strict=True)])

    def limited(self, most: Sequence[int] | None) -> CachedKeys:
        """Limits the keys per row of each layer; None: no limit."""
        return self if most is None else replace(self, common=list(map(min, self.common, most)))

    def pairs(self, layers: Sequence[SublayerTokens], counts: Sequence[int] | None, attended: Sequence[float] | None) -> int:
        """Returns the number of query-key pairs of a stage over all images and layers; `attended`: computed share of each layer."""
        read, shares = self.with_stage(layers, counts), attended or (1,) * len(layers)
        if counts is None:
            queries = [share * layer.attention for share, layer in zip(shares, layers, strict=True)]
            shared = sum(round(query * keys) for query, keys in zip(queries, read.common, strict=True))
            return self.images * shared + round(sum(self.own) * sum(queries))
        every, depth = sum(share * keys for share, keys in zip(shares, self.common, strict=True)), sum(shares)
        return round(sum(count * (every + depth * keys) for count, keys in zip(counts, read.own, strict=True)))


def as_run(model: NextScaleModel, stage: Stage, plan: StagePlan, num_tokens: float) -> StagePlan:
    """Returns the plan with the number of tokens that ran: `num_tokens` per row, including text."""
    if plan.packed is not None:
        return plan
    cells = int(num_tokens) - (model.text_prefix if stage.index == 0 else 0)
    return plan if plan.skip or (plan.num_tokens is None and cells == stage.cells) else replace(plan, num_tokens=cells)


@dataclass(frozen=True, slots=True)
class BlockMacs:
    """MACs of each sublayer of one block per token. All blocks of a model have the same sizes."""

    dim: int
    attention: int
    text: int
    feed_forward: int
    text_tokens: int
    shared_text: bool  # only the first row runs attention to the text

    @classmethod
    def of(cls, model: NextScaleModel, workload: Workload) -> BlockMacs:
        block = model.stack[0]
        return cls(
            model.block_config.dim,
            macs_per_token(block.attention),
            macs_per_token(block.text_attention.q, block.text_attention.proj) if block.has_text else 0,
            macs_per_token(block.feed_forward),
            workload.text_tokens if block.has_text else 0,
            model.rows_share_text,
        )

    def linear(self, tokens: SublayerTokens, rows: int) -> int:
        own = tokens.attention * self.attention + tokens.feed_forward * self.feed_forward
        return rows * own + self._text_rows(rows) * tokens.text * self.text

    def products(self, pairs: int, text_queries: int, rows: int) -> int:
        """Returns the MACs of attention for `pairs` query-key pairs in all rows and `text_queries` queries per row to the text."""
        return 2 * self.dim * (pairs + self._text_rows(rows) * text_queries * self.text_tokens)

    def _text_rows(self, rows: int) -> int:
        return 1 if self.shared_text else rows


def tokens_per_layer(spans: Sequence[Span], tokens: int, prefix: int, depth: int) -> list[SublayerTokens]:
    """Returns the tokens per row that each layer computes; `prefix` text tokens run through all layers."""
    layers = [SublayerTokens.same(prefix + tokens)] * depth
    for span in spans:
        with_text = SublayerTokens.same(prefix) + span.sublayer_tokens(tokens)
        layers[span.layers.start : span.layers.stop] = [with_text] * len(span.layers)
    return layers


def mean_tokens(ran: SublayerTokens, layers: int, has_text: bool) -> float:
    """Returns the mean tokens per sublayer of `layers` blocks; `ran` is their total."""
    total = ran.attention + ran.feed_forward + (ran.text if has_text else 0)
    return total / (layers * (3 if has_text else 2))


def head_macs(model: NextScaleModel, stage: Stage, workload: Workload, entered: StageInput, propagates: int | None) -> int:
    """Returns the MACs from the last hidden states to codes, including HART's residual and STAR's refinement.

    propagates: tokens per row for which HART's diffusion runs; None: those that enter.
    """
    branch, tokens = entered.rows_of_branch, entered.tokens
    macs = model.logits_macs(entered.rows, tokens)
    if stage.last and propagates is None:
        macs += model.residual_macs(branch, entered.rows if workload.residual_guided else branch, tokens)
    elif stage.last and propagates is not None:
        rows = entered.branches * workload.images if workload.residual_guided else workload.images
        macs += model.residual_macs(workload.images, rows, propagates)
    if workload.refine is not None:
        # Packed images attend only to themselves.
        for count in [tokens] if entered.counts is None else entered.counts:
            macs += model.refinement_macs(workload.refine, stage, branch, entered.rows, count)
    return macs
