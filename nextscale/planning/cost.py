"""What a request costs in MACs, counted from its plans: nothing is run, and the model may be on the meta device.

Counted is every matrix product between a stage's input and its codes: embedding, blocks, logits, HART's diffusion, STAR's refiner.
Not counted are the text encoder, what is made of the prompt once per request, the canvas, decoding, and everything that is no matrix
product. What a method itself computes counts only where its spans tell (`CountsItself`), as those of StageVAR and ToMe do. SparseVAR has
no spans: its comparison of cells with anchors, cells x anchors x logits MACs per image in a reduced stage, is not counted, nor
are decompositions (StageVAR's study variants) or images decoded on the way. Keys are those of the dense cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import nn

from ..accel.method import DENSE, Span, StagePlan
from ..models.hart import Hart
from ..models.star import Star

if TYPE_CHECKING:
    from ..models.base import NextScaleModel
    from ..models.blocks import Block
    from ..models.refiner import Refiner
    from ..models.residual_head import ResidualHead
    from ..sampling import Refinement
    from ..stage import Schedule, Stage


@dataclass(frozen=True, slots=True)
class SublayerTokens:
    """How many tokens of a row each part of a block computes. Those of `attention` leave their keys in the cache."""

    attention: int
    text: int
    feed_forward: int

    @classmethod
    def together(cls, layers: Sequence[SublayerTokens]) -> SublayerTokens:
        """Of all these layers."""
        return cls(
            sum(parts.attention for parts in layers),
            sum(parts.text for parts in layers),
            sum(parts.feed_forward for parts in layers),
        )


@runtime_checkable
class CountsSublayers(Protocol):
    """A span that does not run all parts of its blocks on `width(tokens)` tokens, such as one that merges for attention alone."""

    def sublayer_tokens(self, tokens: int) -> SublayerTokens: ...


@runtime_checkable
class CountsItself(Protocol):
    """A span with matrix products of its own, such as a projection to fewer tokens."""

    def own_macs(self, tokens: int, channels: int) -> int:
        """MACs for one row of which so many tokens enter."""
        ...


@dataclass(frozen=True, slots=True)
class Workload:
    """What of a request its cost depends on, whatever the method."""

    schedule: Schedule
    images: int = 1
    guided: bool = True  # two rows per image
    text_tokens: int = 0  # that cross-attention reads, padding included; 0 where there is none
    refine: Refinement | None = None  # STAR: how late stages are drawn in rounds
    residual_guided: bool = True  # False: HART's diffusion runs one branch, as it does at a guidance scale of exactly 2


@dataclass(frozen=True, slots=True)
class StageCost:
    """MACs of one stage over all rows, and what it leaves in the cache. A skipped stage has no rows and no tokens."""

    stage: Stage
    rows: int = 0
    tokens: int = 0  # of a row, text not included, that enter the first block
    computed: float = 0.0  # of a row, text not included: what a block's part computes, mean of all parts of all blocks
    linear: int = 0  # embedding and blocks
    attention: int = 0  # queries with keys, and weights with values: of earlier stages, this one, and the text
    head: int = 0  # from the last hidden states to codes
    keys: int = 0  # of a row, over all layers, that the stage adds; the last stage's are not kept
    held: int = 0  # of a row, over all layers, that are kept for later stages when the stage has run

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
        """Keys over all rows and layers when most are kept for later stages. There are as many values."""
        return max((stage.rows * stage.held for stage in self.stages), default=0)

    def share(self, dense: RequestCost) -> float:
        return self.total / dense.total


def request_cost(model: NextScaleModel, workload: Workload, plans: Sequence[StagePlan] | None = None) -> RequestCost:
    """The cost of a request whose stages follow `plans`: a method's forecast, or what was run (`as_run`). None is dense generation."""
    schedule = workload.schedule
    if plans is not None and len(plans) != len(schedule):
        raise ValueError(f"{len(plans)} plans for the {len(schedule)} stages of {schedule}")
    block = BlockMacs.of(model, workload)
    cached = [0] * len(model.blocks)  # keys of a row, per layer
    rows = workload.images * (2 if workload.guided else 1)
    costs = []
    for stage, plan in zip(schedule, plans or (DENSE,) * len(schedule), strict=True):
        if plan.skip:
            costs.append(StageCost(stage, held=sum(cached)))
            continue
        if plan.cfg_branches != "both":
            rows = workload.images
        tokens = stage.cells if plan.num_tokens is None else plan.num_tokens
        prefix = model.text_prefix if stage.index == 0 else 0
        linear = embedding_macs(model, stage, workload.images) + rows * spans_own_macs(plan.spans, tokens, model)
        layers = tokens_per_layer(plan.spans, tokens, prefix, len(cached))
        ran = SublayerTokens.together(layers)
        read = [before + parts.attention for before, parts in zip(cached, layers, strict=True)]
        pairs = sum(parts.attention * keys for parts, keys in zip(layers, read, strict=True))
        linear += block.linear(ran, rows)
        attention = block.products(pairs, ran.text, rows)
        cached = cached if stage.last else read
        head = head_macs(model, stage, workload, rows, tokens)
        computed = mean_tokens(ran, len(layers), block.text > 0) - prefix
        costs.append(StageCost(stage, rows, tokens, computed, linear, attention, head, ran.attention, sum(cached)))
    return RequestCost(tuple(costs))


def as_run(model: NextScaleModel, stage: Stage, plan: StagePlan, num_tokens: int) -> StagePlan:
    """The plan with the number of tokens that really ran, of which `width` went through the blocks, text included."""
    cells = num_tokens - (model.text_prefix if stage.index == 0 else 0)
    return plan if plan.skip or (plan.num_tokens is None and cells == stage.cells) else replace(plan, num_tokens=cells)


@dataclass(frozen=True, slots=True)
class BlockMacs:
    """MACs of one block, for one token of one row, by part. All blocks of a model are alike."""

    dim: int
    attention: int
    text: int
    feed_forward: int
    text_tokens: int
    one_text: bool  # a single row runs the text part and speaks for all

    @classmethod
    def of(cls, model: NextScaleModel, workload: Workload) -> BlockMacs:
        block = model.stack[0]
        text = weights(block.text_attention.q, block.text_attention.proj) if block.has_text else 0
        one_text = isinstance(model, Star) and model.config.as_released
        text_tokens = workload.text_tokens if block.has_text else 0
        return cls(model.block_config.dim, weights(block.attention), text, weights(block.feed_forward), text_tokens, one_text)

    def linear(self, parts: SublayerTokens, rows: int) -> int:
        own = parts.attention * self.attention + parts.feed_forward * self.feed_forward
        return rows * own + self._text_rows(rows) * parts.text * self.text

    def products(self, pairs: int, text_queries: int, rows: int) -> int:
        """For so many pairs of a query and a key of the image in a row, and so many queries to the text."""
        return 2 * self.dim * (rows * pairs + self._text_rows(rows) * text_queries * self.text_tokens)

    def _text_rows(self, rows: int) -> int:
        return 1 if self.one_text else rows


def weights(*modules: nn.Module) -> int:
    """Entries of all matrices: what one token costs."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear))
    return sum(layer.in_features * layer.out_features for layer in layers)


def tokens_per_layer(spans: Sequence[Span], tokens: int, prefix: int, depth: int) -> list[SublayerTokens]:
    """Of every layer; `prefix` text tokens run through all of them."""
    layers = [SublayerTokens(prefix + tokens, prefix + tokens, prefix + tokens)] * depth
    for span in spans:
        parts = span.sublayer_tokens(tokens) if isinstance(span, CountsSublayers) else SublayerTokens(*(span.num_tokens(tokens),) * 3)
        with_text = SublayerTokens(prefix + parts.attention, prefix + parts.text, prefix + parts.feed_forward)
        layers[span.layers.start : span.layers.stop] = [with_text] * len(span.layers)
    return layers


def mean_tokens(ran: SublayerTokens, layers: int, has_text: bool) -> float:
    """Of all parts that so many blocks have, each with the same weight; `ran`: in all blocks together."""
    total = ran.attention + ran.feed_forward + (ran.text if has_text else 0)
    return total / (layers * (3 if has_text else 2))


def spans_own_macs(spans: Sequence[Span], tokens: int, model: NextScaleModel) -> int:
    """For one row."""
    return sum(span.own_macs(tokens, model.block_config.dim) for span in spans if isinstance(span, CountsItself))


def embedding_macs(model: NextScaleModel, stage: Stage, images: int) -> int:
    """All cells, before a method chooses among them, and once for both branches. The first stage starts from the condition."""
    number = weights(model.level_embed) if isinstance(model, Hart) else 0
    if stage.index == 0:
        return number * (2 if model.text_prefix else 1)  # the text's is computed by itself
    return number + images * stage.cells * weights(model.word_embed)


def head_macs(model: NextScaleModel, stage: Stage, workload: Workload, rows: int, tokens: int) -> int:
    work = rows * tokens * weights(model.head)
    images = workload.images
    if isinstance(model, Hart) and stage.last:
        told = images * tokens * weights(model.word_embed)
        work += told + diffusion_macs(model.residual_head, rows if workload.residual_guided else images, tokens)
    refine = workload.refine
    if isinstance(model, Star) and model.refiner is not None and refine is not None and stage.index >= refine.first_stage:
        rounds, drafted = refine.at(stage)
        work += max(rounds - drafted, 0) * refiner_macs(model.refiner, rows, images, tokens)
    return work


def diffusion_macs(head: ResidualHead, rows: int, tokens: int) -> int:
    """All steps of HART's residual diffusion. The number of a step is embedded once for all tokens."""
    per_token = weights(head.input_proj, head.blocks, head.final_modulation, head.final)
    return rows * tokens * (weights(head.condition_embed) + head.steps * per_token) + head.steps * weights(head.time_embed)


def refiner_macs(refiner: Refiner, rows: int, images: int, tokens: int) -> int:
    """One round of STAR's refiner. One token for the prompt stands before the cells, and nothing is cached."""
    width, entered = refiner.merge.out_features, tokens + 1
    blocks: tuple[Block, ...] = refiner.stack
    per_token = weights(refiner.merge) + sum(weights(block.attention, block.feed_forward) for block in blocks)
    products = 2 * width * len(blocks) * entered * entered
    return images * tokens * weights(refiner.word_embed) + rows * (entered * per_token + products + tokens * weights(refiner.head))
