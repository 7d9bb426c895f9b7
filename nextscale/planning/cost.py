"""What a request costs in MACs, counted from its plans: nothing is run, and the model may be on the meta device.

Counted is every matrix product between a stage's input and its codes: embedding, blocks, logits, HART's diffusion, STAR's refiner.
Not counted are the text encoder, what is made of the prompt once per request, the canvas, decoding, and everything that is no matrix
product. What a method itself computes counts only where its spans report it (`Span.own_macs`), as those of StageVAR and ToMe do. SparseVAR
has no spans: its comparison of cells with anchors, cells x anchors x logits MACs per image in a reduced stage, is not counted, nor
are decompositions (StageVAR's study variants) or images decoded on the way. Keys are those of the dense cache without what plans drop.
Where rows are padded, padding counts; where they are packed, every image counts with its own tokens. Texts are as long as the longest,
whatever attention reads.
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
    """What of a request its cost depends on, whatever the method."""

    schedule: Schedule
    images: int = 1
    guided: bool = True  # two rows per image
    text_tokens: int = 0  # that cross-attention reads, padding included; 0 where there is none
    refine: Refinement | None = None  # STAR: how late stages are sampled in rounds
    given: int = 0  # first stages whose codes are given: they have no head
    residual_guided: bool = True  # False: HART's diffusion runs one cfg branch, as it does at a guidance scale of exactly 2


@dataclass(frozen=True, slots=True)
class StageCost:
    """MACs of one stage over all rows, and what it leaves in the cache. A skipped stage has no rows and no tokens."""

    stage: Stage
    rows: int = 0
    tokens: float = 0  # of a row, text not included, that enter the first block; the mean where rows are packed
    computed: float = 0.0  # of a row, text not included: what a sublayer computes, mean over all sublayers of all blocks
    linear: int = 0  # embedding and blocks
    attention: int = 0  # queries with keys, and weights with values: of earlier stages, this one, and the text
    head: int = 0  # from the last hidden states to codes
    keys: float = 0  # of a row, over all layers, that the stage adds; the last stage's are not kept
    held: float = 0  # of a row, over all layers, that are kept for later stages when the stage has run

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
        """Most keys, over all rows and layers, that are kept for later stages at a time. There are as many values."""
        return round(max((stage.rows * stage.held for stage in self.stages), default=0))

    def share(self, dense: RequestCost) -> float:
        return self.total / dense.total


def request_cost(
    model: NextScaleModel,
    workload: Workload,
    plans: Sequence[StagePlan] | None = None,
    counts: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> RequestCost:
    """MACs of a request whose stages follow `plans`: a method's forecast, or what was run (`as_run`). None is dense generation.

    counts: by stage index, the tokens of every image where rows are packed; they are equal where nothing is known.
    """
    schedule, images = workload.schedule, workload.images
    if plans is not None and len(plans) != len(schedule):
        raise ValueError(f"{len(plans)} plans for the {len(schedule)} stages of {schedule}")
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
        entered = Entered.of(stage, plan, images, branches, counts.get(stage.index))
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
class Entered:
    """What enters the blocks of a stage: rows of tokens, one per image and cfg branch, or per cfg branch where rows are packed."""

    images: int
    branches: int
    tokens: int  # of what counts as a row
    counts: Sequence[int] | None  # of every image, where rows are packed

    @classmethod
    def of(cls, stage: Stage, plan: StagePlan, images: int, branches: int, counts: Sequence[int] | None) -> Entered:
        if plan.packed is None:
            return cls(images, branches, stage.cells if plan.num_tokens is None else plan.num_tokens, None)
        return cls(images, branches, plan.packed, counts or evenly(plan.packed, images))

    @property
    def rows_of_branch(self) -> int:
        return self.images if self.counts is None else 1

    @property
    def rows(self) -> int:
        return self.branches * self.rows_of_branch

    def per_row(self, tokens: float) -> float:
        """Of what counts as a row to the mean of an image's."""
        return tokens if self.counts is None else tokens / self.images


def evenly(total: int, images: int) -> list[int]:
    return [total // images + (image < total % images) for image in range(images)]


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """Keys of the rows of a cfg branch: those that all images have, and those of stages whose rows were packed."""

    common: Sequence[int]  # of a row, per layer
    images: int
    own: Sequence[int] = ()  # per image, in every layer; empty until a stage packs its rows

    @property
    def of_row(self) -> float:
        """Of a row over all layers, the mean of all images."""
        more = len(self.common) * sum(self.own)
        return sum(self.common) + (more / self.images if more else 0)

    def with_stage(self, layers: Sequence[SublayerTokens], counts: Sequence[int] | None) -> CachedKeys:
        """These and those of a stage."""
        if counts is None:
            return replace(self, common=[before + layer.attention for before, layer in zip(self.common, layers, strict=True)])
        own = self.own or (0,) * self.images
        return replace(self, own=[before + count for before, count in zip(own, counts, strict=True)])

    def limited(self, most: Sequence[int] | None) -> CachedKeys:
        """These, of which every layer keeps so many of a row; None: all."""
        return self if most is None else replace(self, common=list(map(min, self.common, most)))

    def pairs(self, layers: Sequence[SublayerTokens], counts: Sequence[int] | None, attended: Sequence[float] | None) -> int:
        """Pairs of a query of a stage with a key, its own included, over all images and layers; `attended`: the share that is computed."""
        read, shares = self.with_stage(layers, counts), attended or (1,) * len(layers)
        if counts is None:
            queries = [share * layer.attention for share, layer in zip(shares, layers, strict=True)]
            shared = sum(round(query * keys) for query, keys in zip(queries, read.common, strict=True))
            return self.images * shared + round(sum(self.own) * sum(queries))
        every, depth = sum(share * keys for share, keys in zip(shares, self.common, strict=True)), sum(shares)
        return round(sum(count * (every + depth * keys) for count, keys in zip(counts, read.own, strict=True)))


def as_run(model: NextScaleModel, stage: Stage, plan: StagePlan, num_tokens: float) -> StagePlan:
    """The plan with the number of tokens that really ran: `num_tokens` of a row went through the blocks, text included."""
    if plan.packed is not None:
        return plan
    cells = int(num_tokens) - (model.text_prefix if stage.index == 0 else 0)
    return plan if plan.skip or (plan.num_tokens is None and cells == stage.cells) else replace(plan, num_tokens=cells)


@dataclass(frozen=True, slots=True)
class BlockMacs:
    """MACs of one block, for one token of one row, by sublayer. All blocks of a model are alike."""

    dim: int
    attention: int
    text: int
    feed_forward: int
    text_tokens: int
    shared_text: bool  # the first row alone runs attention to the text

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
        """MACs of attention for the given pairs of a query and a key of the image in all rows, and queries of a row to the text."""
        return 2 * self.dim * (pairs + self._text_rows(rows) * text_queries * self.text_tokens)

    def _text_rows(self, rows: int) -> int:
        return 1 if self.shared_text else rows


def tokens_per_layer(spans: Sequence[Span], tokens: int, prefix: int, depth: int) -> list[SublayerTokens]:
    """Tokens of a row that every layer computes; `prefix` text tokens run through all of them."""
    layers = [SublayerTokens.same(prefix + tokens)] * depth
    for span in spans:
        with_text = SublayerTokens.same(prefix) + span.sublayer_tokens(tokens)
        layers[span.layers.start : span.layers.stop] = [with_text] * len(span.layers)
    return layers


def mean_tokens(ran: SublayerTokens, layers: int, has_text: bool) -> float:
    """Mean over all sublayers of this number of blocks, each with the same weight; `ran` is the total of all blocks."""
    total = ran.attention + ran.feed_forward + (ran.text if has_text else 0)
    return total / (layers * (3 if has_text else 2))


def head_macs(model: NextScaleModel, stage: Stage, workload: Workload, entered: Entered, propagates: int | None) -> int:
    """MACs from the last hidden states to codes, HART's residual and STAR's refinement included.

    residual_tokens: of a row, for which HART's diffusion runs; None: those that enter.
    """
    branch, tokens = entered.rows_of_branch, entered.tokens
    macs = model.logits_macs(entered.rows, tokens)
    if stage.last and propagates is None:
        macs += model.residual_macs(branch, entered.rows if workload.residual_guided else branch, tokens)
    elif stage.last and propagates is not None:
        rows = entered.branches * workload.images if workload.residual_guided else workload.images
        macs += model.residual_macs(workload.images, rows, propagates)
    if workload.refine is not None:
        # In packed rows, too, an image attends to itself alone.
        for count in [tokens] if entered.counts is None else entered.counts:
            macs += model.refinement_macs(workload.refine, stage, branch, entered.rows, count)
    return macs
