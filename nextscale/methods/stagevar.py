"""StageVAR (arXiv 2512.16483): late stages only refine, so they run without the prompt and on few projected rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import SettingError
from ..guidance import CfgBranch
from ..io import expanded
from ..models.base import NextScaleModel
from ..models.blocks import Block, run_in_order
from ..models.context import ForwardContext
from ..sampling import Noise, cell_noise
from ..stage import Schedule, Stage, Tokens, repeat_tail, to_double
from ..validation import is_fraction, is_int, is_positive_fraction, require, require_choice, require_flags, require_stages, sorted_pairs
from .method import Method, MethodRun, Plans, RunSetup, Span, StagePlan
from .stagevar_ranks import RankTable, group_layers, read_rank_table, require_groups, table_for
from .token_ops import require_own_text

Alphas = tuple[tuple[int, float], ...]
StageRatios = tuple[tuple[int, tuple[float, ...]], ...]

ALPHA = 0.96
DEFAULTS: dict[tuple[str, int], tuple[int, Mapping[int, float]]] = {
    ("infinity", 13): (10, {10: ALPHA, 11: 0.0, 12: 0.0}),
    ("star", 14): (12, {13: ALPHA}),
    ("hart", 14): (12, {13: ALPHA}),
}
"""First stage without guidance, and alphas, of the paper and its reference implementation, by family and number of stages."""
RELEASED = ("infinity", "star", "hart")


@dataclass(frozen=True)
class StageVAR(Method):
    """Runs late stages without guidance, on few projected rows per group of blocks, or not at all.

    `StageVAR()` is the published combination, `StageVAR(guidance_off=99, alphas=())` dense generation. Every low-rank stage needs the whole
    grid of the stage before it: a method that reduces or skips that stage is refused.

    guidance_off: from this stage on only the rows of one cfg branch run. None is the published stage (Infinity 10 of 13, STAR and HART 12
        of 14), elsewhere the last but one. The number of stages, or any larger number, never drops guidance. A request without
        guidance keeps its conditional rows.
    kept_rows: the branch that continues. "uncond" is as published: late stages are generated from the empty prompt, or from the negative
        one. "cond" is a guidance scale of 1 and costs the same; on nano it is nearer to dense images (LPIPS 0.032 against 0.044 from
        stage 11 on).
    alphas: {stage index: alpha}. 0 skips the stage, 1 runs it in full, and in between it runs at the rank that holds this share of its
        energy. None is as published (Infinity {10: 0.96, 11: 0, 12: 0}, STAR and HART {13: 0.96}), elsewhere the last stage at 0.96.
    ranks: the ranks of an alpha. None is the table of the model, the one beside its weights (`nextscale calibrate stagevar`) or published
        one (Infinity-2B, STAR-1024, HART), at the stage with the nearest number of cells. The name of a .json file works too. A
        number is the same ratio for all groups, a tuple has one per group, a mapping a tuple per stage. A ratio is a share of the
        largest possible rank (equation 4): it makes int(ratio * min(tokens, channels)) + 1 rows.
    groups: blocks per group. None is as published (Infinity an eighth of the depth, STAR and HART 1), elsewhere an eighth of the depth.
    as_released: as in the reference implementation, which exists for Infinity, STAR and HART: Infinity's projected rows take the first
        positions of the stage and its ratios multiply all tokens, every model of a family has the published table, and Infinity with
        fewer groups its first ratios.

    Noise comes from the request's rng for methods. Every group of a low-rank stage takes first exponential noise [B, cells], whose smallest
    ratios to the squared norms of the tokens choose the representatives, in this order; then normal noise [B, cells, rank], which is Q
    times sqrt(rank). To replay stored noise give `seed=` an object with these two methods.
    """

    guidance_off: int | None = None
    alphas: Mapping[int, float] | Alphas | None = None
    ranks: float | tuple[float, ...] | Mapping[int, Sequence[float]] | StageRatios | RankTable | str | None = None
    groups: int | None = None
    as_released: bool = False
    kept_rows: CfgBranch = "uncond"

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        require(self.guidance_off is None or is_int(self.guidance_off), "guidance_off", "a stage index from 0", self.guidance_off)
        require(self.groups is None or is_int(self.groups, 1), "groups", "a number of blocks from 1", self.groups)
        if self.alphas is not None:
            object.__setattr__(self, "alphas", sorted_pairs("alphas", self.alphas, "number from 0 to 1", is_fraction))
        if self.ranks is not None:
            object.__setattr__(self, "ranks", checked_ranks(self.ranks))
        require_choice("kept_rows", self.kept_rows, get_args(CfgBranch))
        require(not self.as_released or self.kept_rows == "uncond", "kept_rows", '"uncond" with as_released', self.kept_rows)

    def start(self, setup: RunSetup) -> MethodRun:
        if any(isinstance(span, LowRankGroup) for plan in setup.plans for span in plan.spans):
            require_own_text(setup.model, setup.batch, "StageVAR runs other rows")
        return MethodRun()

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        guidance_off, alphas = self.first_unguided(model, schedule), self.stage_alphas(model, schedule)
        require(not self.as_released or model.family in RELEASED, "as_released", f"left out except for {', '.join(RELEASED)}", model.family)
        layers = group_layers(model, self.groups)
        run = [stage for stage in schedule if alphas.get(stage.index) != 0]
        low = {stage: alpha for stage, alpha in alphas.items() if 0 < alpha < 1}
        if run and run[0].index in low:
            raise SettingError(f"alphas: stage {run[0].index} cannot run at low rank, since no stage runs before it.")
        stored = {before.index for before, stage in pairwise(run) if stage.index in low}

        def plan(stage: Stage) -> StagePlan:
            if alphas.get(stage.index) == 0:
                return StagePlan(skip=True)
            spans: Sequence[Span] = ()
            if stage.index in low:
                spans = self.low_rank_groups(model, stage, low[stage.index], layers, stage.index in stored)
            elif stage.index in stored:
                spans = [StoredGroup(blocks, group) for group, blocks in enumerate(layers)]
            return StagePlan(cfg_branches=self.kept_rows if guided and stage.index >= guidance_off else "both", spans=tuple(spans))

        return tuple(map(plan, schedule))

    def first_unguided(self, model: NextScaleModel, schedule: Schedule) -> int:
        """Returns the index of the first stage that runs the rows of one cfg branch alone."""
        return published(model, schedule)[0] if self.guidance_off is None else self.guidance_off

    def stage_alphas(self, model: NextScaleModel, schedule: Schedule) -> Mapping[int, float]:
        """Returns alphas by stage index; stages without one run in full."""
        alphas = published(model, schedule)[1] if self.alphas is None else dict(self.alphas)
        require_stages("alphas", alphas, len(schedule))
        return alphas

    def low_rank_groups(self, model: NextScaleModel, stage: Stage, alpha: float, layers: Sequence[range], store: bool) -> Sequence[Span]:
        """Returns the spans of a low-rank stage, one per group of blocks."""
        released, ratios = self.as_released and model.family == "infinity", self.ratios(model, stage, alpha, len(layers))
        return [
            LowRankGroup(blocks, group, ratio, None if released else model.block_config.dim, store, first_positions=released)
            for group, (blocks, ratio) in enumerate(zip(layers, ratios, strict=True))
        ]

    def ratios(self, model: NextScaleModel, stage: Stage, alpha: float, groups: int) -> tuple[float, ...]:
        """Returns the ratio of each group, from a table or as given."""
        if self.ranks is None:
            return table_for(model, groups, self.as_released).ratios(alpha, stage.cells)[:groups]
        if isinstance(self.ranks, RankTable):
            require(self.ranks.belongs_to(model), "ranks", f"a table of this {model.family} with {len(model.blocks)} blocks", self.ranks)
            return require_groups(self.ranks, groups).ratios(alpha, stage.cells)
        ratios: Any = self.ranks
        if isinstance(ratios, float):
            return (ratios,) * groups
        if isinstance(ratios[0], tuple):
            require(stage.index in dict(ratios), "ranks", f"given for stage {stage.index}, which runs at low rank too", self.ranks)
            ratios = dict(ratios)[stage.index]
        require(len(ratios) == groups, "ranks", f"{groups} ratios at stage {stage.index}, one per group of blocks", ratios)
        return tuple(ratios)


def published(model: NextScaleModel, schedule: Schedule) -> tuple[int, Mapping[int, float]]:
    """Returns the first stage without guidance and the alphas, with defaults."""
    last = len(schedule) - 1
    return DEFAULTS.get((model.family, len(schedule)), (max(1, last - 1), {last: ALPHA} if last else {}))


def checked_ranks(given: Any) -> float | tuple[float, ...] | StageRatios | RankTable:
    if is_positive_fraction(given):
        return float(given)
    if isinstance(given, RankTable):
        return given
    if isinstance(given, str | Path) and str(given).endswith(".json"):
        return read_rank_table(expanded(given))
    if is_ratios(given):
        return tuple(map(float, given))
    expected = "a ratio above 0 and up to 1, a tuple of one per group, the .json file of a table, or such tuples by stage"
    pairs = sorted_pairs("ranks", given, expected, is_ratios, lambda ratios: tuple(map(float, ratios)))
    require(pairs, "ranks", expected, given)
    return pairs


def is_ratios(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and bool(given) and all(map(is_positive_fraction, given))


# --- groups of blocks


def memory_name(group: int) -> Hashable:
    return "stagevar", group


@dataclass(frozen=True)
class StoredGroup(Span):
    """Runs a group of blocks in full and stores its output for the next stage."""

    whole_stage = True

    layers: range
    group: int

    @property
    def stores(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)})

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        x = run_in_order(blocks, x, tokens, ctx)
        ctx.memory.store(memory_name(self.group), x, tokens)
        return x


@dataclass(frozen=True)
class LowRankGroup(Span):
    """Runs a group of blocks on random projections of its tokens, whose outputs replace representative tokens (equation 8).

    Shapes: R rows of the batch, N tokens of C channels, r projected rows. Where rows of the batch differ, `ranks` [R] are the numbers of
    their real projected rows; the others repeat the last real one.
    """

    layers: range
    group: int
    ratio: float
    channels: int | None = None  # maximum of the rank; `ratio` multiplies at most as many tokens
    store: bool = False  # the next stage is restored from this one
    first_positions: bool = False  # the rows take the first positions of the stage instead of their representatives'

    @property
    def whole_stage(self) -> bool:  # type: ignore[override]
        return self.store

    @property
    def stores(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)} if self.store else ())

    @property
    def needs(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)})

    def num_tokens(self, tokens: int) -> int:
        largest = min(tokens, self.channels or tokens)
        return min(int(self.ratio * largest) + 1, largest)

    def own_macs(self, tokens: int, dim: int) -> int:
        return tokens * self.num_tokens(tokens) * dim

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        out = repeat_tail(self.replaced(blocks, x, tokens, ctx).to(x.dtype), tokens.count)
        if self.store:
            ctx.memory.store(memory_name(self.group), out, tokens)
        return out

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Returns the group's output [R, N, C] for its input x. Entries beyond the count of a row may be anything."""
        rank, ranks = self.ranks(x, tokens)
        noise = noise_of(ctx.method_rng.exponential, x, tokens, ctx)
        chosen = repeat_tail(representatives(squared_norms(x), noise, rank, tokens.count), ranks)  # [R, r]
        rows = repeat_tail(project(x, self.projection(x, tokens, ctx, rank, ranks), tokens.count), ranks)
        places = tokens.take(chosen, ranks)
        y = run_in_order(blocks, rows, first_tokens(tokens, rows, ranks) if self.first_positions else places, ctx)
        if ctx.computed is not None:
            ctx.computed.add(places, rows, sum(block.num_sublayers for block in blocks))
        return self.restored(tokens, ctx).scatter(1, chosen[..., None].expand_as(y), repeat_tail(y, ranks))

    def ranks(self, x: Tensor, tokens: Tokens) -> tuple[int, Tensor | None]:
        """Returns the rank of x [R, N, C]: the largest of the batch, and if they differ, the rank of each row [R]."""
        rows = self.num_tokens(x.shape[1])
        if tokens.count is None:
            return rows, None
        largest = tokens.count.clamp(max=self.channels or x.shape[1])
        return rows, torch.minimum((self.ratio * to_double(largest)).long() + 1, largest).clamp(max=rows)

    def projection(self, x: Tensor, tokens: Tokens, ctx: ForwardContext, rank: int, ranks: Tensor | None) -> Tensor:
        """Returns Q [R, N, r] with entries N(0, 1/r). Noise is drawn for all cells of the stage, so it does not depend on the tokens that
        run.
        """
        normal = noise_of(ctx.method_rng.normal, x, tokens, ctx, self.num_tokens(tokens.stage.cells))[..., :rank]
        return normal / (rank**0.5 if ranks is None else ranks.sqrt()[:, None, None])

    def restored(self, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Returns the same group's output at the previous stage that ran, resized to these tokens (equation 7)."""
        return ctx.memory.fill(memory_name(self.group), tokens)


def noise_of(noise: Noise, x: Tensor, tokens: Tokens, ctx: ForwardContext, *columns: int) -> Tensor:
    """Returns noise [R, N, ...] for all tokens of x, the same for both rows of a guided pair."""
    numbers = cell_noise(noise, tokens.rows(slice(0, ctx.batch)), (ctx.batch, x.shape[1], *columns), x.device)
    return numbers.repeat(x.shape[0] // ctx.batch, *[1] * (numbers.ndim - 1))


def squared_norms(x: Tensor) -> Tensor:
    """Returns squared lengths of the tokens of x [R, N, C], in float32: [R, N]."""
    return x.float().square().sum(dim=-1)


def representatives(weight: Tensor, noise: Tensor, rank: int, count: Tensor | None = None) -> Tensor:
    """Samples `rank` of N tokens without replacement, with probability proportional to `weight` [R, N]: [R, rank], in this order.

    The largest ratios of weight to unit exponential `noise` win, as in torch.multinomial, which gives the same result for the same noise.
    """
    ratio = weight / noise
    if count is not None:
        ratio = ratio.masked_fill(torch.arange(ratio.shape[1], device=ratio.device) >= count[:, None], -1.0)
    return ratio.topk(rank, dim=1).indices


def zero_tail(x: Tensor, count: Tensor | None) -> Tensor:
    """Returns x [R, N, C] with zeros beyond a row's `count`."""
    if count is None:
        return x
    return x.masked_fill(torch.arange(x.shape[1], device=x.device)[:, None] >= count[:, None, None], 0.0)


def project(x: Tensor, q: Tensor, count: Tensor | None = None) -> Tensor:
    """Returns Q^T F: x [R, N, C] and q [R, N, r] to [R, r, C]."""
    return q.to(x.dtype).transpose(1, 2) @ zero_tail(x, count)


def first_tokens(tokens: Tokens, rows: Tensor, count: Tensor | None) -> Tokens:
    """Returns the first of these tokens as positions for `rows` [R, r, C] that have no token of their own."""
    place = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[0], -1)
    return tokens.take(repeat_tail(place, count), count)
