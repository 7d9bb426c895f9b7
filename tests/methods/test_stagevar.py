"""StageVAR: its arithmetic on toys, its ranks against the published ones, and what every method must keep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale.cache import CacheView, ComputedCells, LayerCache, StageMemory
from nextscale.errors import SettingError
from nextscale.eval.calibrate_ranks import measure_ranks, measure_table
from nextscale.guidance import StageGuidance
from nextscale.loading.artifacts import local_weights, rank_table_of
from nextscale.loading.presets import MODELS, build_model
from nextscale.methods import DENSE, Method, RunSetup, SkipStages, StagePlan
from nextscale.methods.combine import Combined
from nextscale.methods.method import MethodRun, Plans, Restored
from nextscale.methods.registry import parse_method
from nextscale.methods.stagevar import LowRankGroup, StageVAR, StoredGroup, project, representatives, squared_norms, zero_tail
from nextscale.methods.stagevar_ranks import (
    RankRow,
    RankTable,
    energy_ranks,
    published_tables,
    rank_file,
    read_rank_table,
    write_rank_table,
)
from nextscale.models import Hart, HartConfig, Infinity, InfinityConfig, NextScaleModel, Star, StarConfig, Var, VarConfig
from nextscale.models.blocks import Block
from nextscale.models.context import ForwardContext
from nextscale.pipeline import Output
from nextscale.sampling import ImageRng, Rng
from nextscale.schedules import HART_1024, INFINITY_SIZES
from nextscale.stage import Schedule, Stage, Tokens, repeat_tail
from nextscale_research.quality.format_errors import generate_seen
from tests.helpers import tiny
from tests.helpers.tiny import infinity_schedule
from tests.helpers.toy_methods import STAGES, HeldRepresentatives, Planned, RunBlocks, SkipUnannounced, counts_of, top_tokens

OFF = StageVAR(guidance_off=99, alphas=())
PUBLISHED = StageVAR()
BATCH_TOLERANCE = 1e-4  # of pixels; the largest difference seen is 1.4e-5, HART's included
INTEGER_CODES = {"hart": {"smooth": False}}


def generated(family: str, images: int = 2, method: Any = None, **settings: Any) -> Output:
    settings = INTEGER_CODES.get(family, {}) | settings
    return tiny.shared_pipeline(family)(tiny.prompts(family, images), seed=11, method=method, **settings)


def alone(family: str, image: int, method: Method, **settings: Any) -> Output:
    settings = INTEGER_CODES.get(family, {}) | settings
    return tiny.shared_pipeline(family)(tiny.one_prompt(family, image), seed=11 + image, method=method, **settings)


def assert_same_bits(ours: Output, theirs: Output) -> None:
    assert_same_codes(ours, theirs)
    assert torch.equal(ours.pixels, theirs.pixels)


def assert_same_codes(ours: Output, theirs: Output) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours.codes, theirs.codes, strict=True))


def last_stage(family: str) -> int:
    return STAGES[family] - 1


# --- representatives


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def exponential(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.empty(rows, columns).exponential_(generator=torch.Generator().manual_seed(seed))


def test_pairs_of_representatives_have_the_probabilities_of_sampling_one_after_the_other() -> None:
    trials = 60_000
    pairs = representatives(WEIGHTS.expand(trials, -1), exponential(trials, 4), 2)
    p = WEIGHTS / WEIGHTS.sum()
    for first in range(4):
        for second in range(4):
            seen = float(((pairs[:, 0] == first) & (pairs[:, 1] == second)).float().mean())
            expected = 0.0 if first == second else float(p[first] * p[second] / (1 - p[first]))
            assert abs(seen - expected) < 4 * (expected * (1 - expected) / trials) ** 0.5 + 1e-9, (first, second)


def test_representatives_are_those_of_multinomial() -> None:
    weight = torch.rand(3, 50, generator=torch.Generator().manual_seed(5))
    theirs = torch.multinomial(weight, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(representatives(weight, exponential(3, 50, seed=1), 20), theirs)


@pytest.mark.parametrize("rank", [1, 5, 9])
def test_representatives_are_sampled_without_replacement(rank: int) -> None:
    chosen = representatives(torch.rand(40, 9), exponential(40, 9), rank)
    assert chosen.shape == (40, rank)
    assert all(len(set(row.tolist())) == rank for row in chosen)


def test_tokens_of_length_zero_come_last_and_padding_never() -> None:
    weight = torch.tensor([[0.0, 1.0, 0.0, 1.0, 5.0]]).repeat(50, 1)
    chosen = representatives(weight, exponential(50, 5), 4, count=torch.full((50,), 4))
    assert all(set(row.tolist()) == {1, 3} for row in chosen[:, :2])
    assert all(set(row.tolist()) == {0, 2} for row in chosen[:, 2:])


def test_squared_norms_are_float32() -> None:
    x = torch.tensor([[[300.0, 400.0]]], dtype=torch.float16)
    assert squared_norms(x).tolist() == [[250_000.0]]


def test_projections_keep_lengths_on_average() -> None:
    """Entries have the variance 1 / r, also where rows of the batch have r of their own."""
    tokens, rng = Tokens(Stage(1, 20, 20, start=1, last=False)), ImageRng((3, 4), torch.device("cpu"))
    ctx = toy_env(torch.zeros(2, 1, 2), rng=rng)
    q = LowRankGroup(range(1), 0, 299 / 400).projection(torch.zeros(2, 400, 2), tokens, ctx, 300, None)
    x = torch.randn(1, 400, 16, generator=torch.Generator().manual_seed(0))
    assert q.shape == (2, 400, 300)
    assert float(project(x, q[:1]).square().sum() / x.square().sum()) == pytest.approx(1, rel=0.1)
    assert float(q.var()) == pytest.approx(1 / 300, rel=0.02)
    ctx = toy_env(torch.zeros(2, 1, 2), rng=ImageRng((3, 4), torch.device("cpu")))
    per_row = LowRankGroup(range(1), 0, 299 / 400).projection(torch.zeros(2, 400, 2), tokens, ctx, 300, torch.tensor([300, 75]))
    assert torch.allclose(per_row[0], q[0]) and torch.allclose(per_row[1], 2 * q[1])


# --- tails of rows with different counts


def test_tails_repeat_or_vanish() -> None:
    x = torch.arange(8.0).view(2, 4, 1)
    count = torch.tensor([4, 2])
    assert repeat_tail(x, count)[..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 5, 5]]
    assert repeat_tail(x[..., 0], count).tolist() == [[0, 1, 2, 3], [4, 5, 5, 5]]
    assert zero_tail(x, count)[..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert repeat_tail(x, None) is x
    assert zero_tail(x, None) is x


# --- energy


def test_ranks_of_nothing_and_of_everything() -> None:
    assert energy_ranks(torch.zeros(2, 5), 0.9).tolist() == [1, 1]
    assert energy_ranks(torch.ones(1, 5), 1.0).tolist() == [5]


# --- toys: four tokens of two channels


class Given:
    """Noise as written down."""

    def __init__(self, race: Sequence[float], normal: Sequence[Sequence[float]]) -> None:
        self.race, self.table = torch.tensor([race]), torch.tensor([normal])

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        assert tuple(shape) == tuple(self.race.shape)
        return self.race

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        assert tuple(shape) == tuple(self.table.shape)
        return self.table

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        raise AssertionError("not needed")


class Doubling:
    """A block."""

    layer = 0
    num_sublayers = 1
    changes_input = False

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tokens]] = []

    def __call__(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        self.seen.append((x, tokens))
        return 2 * x


FOUR = Tokens(Stage(1, 2, 2, start=1, last=False))
X = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 4.0]]])  # squared norms 1, 4, 9, 16
NORMAL = [[2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [4.0, 0.0]]  # Q is this over sqrt(2)


def toy_span(kind: type[LowRankGroup] = LowRankGroup, **settings: Any) -> LowRankGroup:
    """Two rows of four tokens."""
    return kind(range(1), 0, 0.25, **settings)


RACE = (0.1, 8.0, 1.0, 8.0)  # ratios of the squared norms of X to it are 10, 0.5, 9, 2
ONE_CELL = Tokens(Stage(0, 1, 1, start=0, last=False))


def toy_env(previous: Tensor, at: Tokens = ONE_CELL, race: Sequence[float] = RACE, rng: Rng | None = None) -> ForwardContext:
    """After a stage whose group had the output `previous`."""
    batch = len(previous)
    rng = Given(race, NORMAL) if rng is None else rng
    ctx = ForwardContext(batch, None, (), StageMemory(), "both", rng, ComputedCells(batch))  # type: ignore[arg-type]
    ctx.memory.store(("stagevar", 0), previous, at)
    return ctx


def test_projection_by_hand() -> None:
    """Columns of Q over sqrt(2): (2, 0, 2, 4) and (0, 2, 2, 0)."""
    q = torch.tensor([NORMAL]) / 2
    assert project(X, q).tolist() == [[[(2 * 1 + 2 * 3) / 2, 4 * 4 / 2], [2 * 3 / 2, 2 * 2 / 2]]]


def test_projected_rows_go_to_their_representatives_and_the_rest_is_filled_from_the_previous_stage() -> None:
    block, ctx = Doubling(), toy_env(torch.tensor([[[-1.0, -2.0]]]))
    out = toy_span(store=True)([block], X, FOUR, ctx)  # type: ignore[list-item]
    half = 2**-0.5
    rows = torch.tensor([[8.0, 16.0], [6.0, 4.0]]) * half
    (entered, tokens), *rest = block.seen
    assert not rest
    assert torch.allclose(entered[0], rows)
    assert tokens.index.tolist() == [[0, 2]]  # in the order of being sampled, at the positions of the representatives
    expected = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [0.0, 0.0], [-1.0, -2.0]])
    expected[0], expected[2] = 2 * rows[0], 2 * rows[1]
    assert torch.allclose(out[0], expected)
    assert torch.equal(ctx.memory.fill(("stagevar", 0), FOUR), out)


def test_the_order_of_sampling_decides_which_row_goes_where() -> None:
    block, ctx = Doubling(), toy_env(torch.zeros(1, 1, 2), race=(8.0, 8.0, 9.0, 1.0))
    out = toy_span()([block], X, FOUR, ctx)  # type: ignore[list-item]
    assert block.seen[0][1].index.tolist() == [[3, 2]]
    assert torch.allclose(out[0, 3], torch.tensor([16.0, 32.0]) / 2**0.5)
    assert torch.allclose(out[0, 2], torch.tensor([12.0, 8.0]) / 2**0.5)


def test_as_released_the_rows_take_the_first_positions() -> None:
    block, ctx = Doubling(), toy_env(torch.zeros(1, 1, 2), race=(8.0, 8.0, 9.0, 1.0))
    out = toy_span(first_positions=True)([block], X, FOUR, ctx)  # type: ignore[list-item]
    assert block.seen[0][1].index.tolist() == [[0, 1]]
    assert torch.allclose(out[0, 3], torch.tensor([16.0, 32.0]) / 2**0.5)


def test_rows_of_a_batch_with_different_counts_are_those_rows_alone() -> None:
    """Half of four tokens and half of two, padded by two."""
    short = Tokens(FOUR.stage, torch.tensor([[0, 1, 2, 3], [1, 3, 3, 3]]), torch.tensor([4, 2]))
    x = torch.cat([X, X[:, [1, 3, 3, 3]]])
    results = []
    for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
        tokens, entered = short.rows(rows), x[rows]
        if rows == slice(1, 2):
            tokens, entered = Tokens(FOUR.stage, tokens.index[:, :2]), entered[:, :2]
        ctx = toy_env(torch.full((len(entered), 1, 2), -7.0), rng=ImageRng((1, 2)[rows], torch.device("cpu")))
        results.append(LowRankGroup(range(1), 0, 0.5)([Doubling()], entered, tokens, ctx))  # type: ignore[list-item]
    together, first, second = results
    assert torch.allclose(together[0], first[0])
    assert torch.allclose(together[1, :2], second[0])
    assert torch.equal(together[1, 2:], together[1, 1:2].expand(2, -1))  # the tail repeats the last real token
    assert (together[0] == -7).any(dim=1).sum() == 1


# --- ranks


def on_meta(model: type[NextScaleModel], config: Any) -> NextScaleModel:
    with torch.device("meta"):
        return model(config)


@cache
def infinity(depth: int = 32, dim: int = 2048) -> NextScaleModel:
    config = InfinityConfig(depth, dim, dim // 16, 8, bits_per_token=4, text_channels=128, longest_text=16)
    return on_meta(Infinity, config)


def ranks_of(plan: StagePlan, stage: Stage) -> list[int]:
    return [span.num_tokens(stage.cells) for span in plan.spans]


ONE_MEGAPIXEL = infinity_schedule(1.0, "1M")
RANKS_40 = [11, 30, 48, 60, 67, 58, 64, 80]  # as the reference implementation ran them at alpha 0.70
RANKS_48 = [13, 37, 58, 68, 80, 72, 80, 102]


def test_ranks_of_the_reference_implementation() -> None:
    plans = StageVAR(alphas={10: 0.7, 11: 0, 12: 0}).forecast(infinity(), ONE_MEGAPIXEL)
    assert ranks_of(plans[10], ONE_MEGAPIXEL[10]) == RANKS_40
    assert [plan.skip for plan in plans] == [False] * 11 + [True] * 2
    smaller = infinity_schedule(1.0, "0.60M")
    plans = StageVAR(guidance_off=10, alphas={10: 0.7, 11: 0.7}, as_released=True).forecast(infinity(), smaller)
    assert [ranks_of(plans[stage], smaller[stage]) for stage in (10, 11)] == [RANKS_40, RANKS_48]


def test_cache_lengths_of_the_reference_implementation() -> None:
    """Keys per layer after the 40 and 48 stages: 2521 of the dense stages, and one per projected row."""
    plans = StageVAR(guidance_off=10, alphas={10: 0.7, 11: 0.7}, as_released=True).forecast(infinity(), infinity_schedule(1.0, "0.60M"))
    lengths = [2521 + r40 + r48 for r40, r48 in zip(RANKS_40, RANKS_48, strict=True) for _ in range(4)]
    assert lengths[:8] == [2545] * 4 + [2588] * 4
    seen = [0] * 32
    for plan, stage in zip(plans, ONE_MEGAPIXEL, strict=False):
        own = {layer: span.num_tokens(stage.cells) for span in plan.spans for layer in span.layers}
        seen = [length + own.get(layer, stage.cells) for layer, length in enumerate(seen)]
    assert seen == lengths


def test_the_published_setting_of_infinity() -> None:
    plans = StageVAR().forecast(infinity(), ONE_MEGAPIXEL)
    assert [plan.cfg_branches for plan in plans] == ["both"] * 10 + ["uncond"] + ["both"] * 2
    assert [plan.skip for plan in plans] == [False] * 11 + [True] * 2
    assert [span.layers for span in plans[10].spans] == [range(first, first + 4) for first in range(0, 32, 4)]
    assert plans[9].spans == tuple(StoredGroup(range(first, first + 4), first // 4) for first in range(0, 32, 4))
    assert all(plan == DENSE for plan in plans[:9])
    kept = sum(ranks_of(plans[10], ONE_MEGAPIXEL[10])) / 8 / 1600
    assert kept == pytest.approx(0.177, abs=5e-4)


@pytest.mark.parametrize(("depth", "dim", "blocks"), [(40, 3584, 5), (16, 2048, 2), (32, 48, 4), (8, 320, 1)])
def test_no_model_takes_the_ranks_of_another(depth: int, dim: int, blocks: int) -> None:
    """Not even with as many groups; given ranks of its own it runs them. The reference implementation has one table for all."""
    model = infinity(depth, dim)
    with pytest.raises(
        SettingError, match=f"no ranks for infinity with {depth} blocks of {dim} .*nextscale calibrate stagevar.*as_released=true"
    ):
        StageVAR().forecast(model, ONE_MEGAPIXEL)
    plans = StageVAR(ranks=0.02).forecast(model, ONE_MEGAPIXEL)
    assert [(len(span.layers), span.ratio) for span in plans[10].spans] == [(blocks, 0.02)] * 8
    assert StageVAR(as_released=True).forecast(model, ONE_MEGAPIXEL)[10].spans[1].ratio == 0.136483
    StageVAR(alphas=()).forecast(model, ONE_MEGAPIXEL)


def test_a_table_has_the_groups_that_it_has() -> None:
    plans = StageVAR().forecast(infinity(), infinity_schedule(1.0, "0.25M"))
    assert plans[9].spans[1].ratio == 0.136483  # of side 40, the nearest to 32
    with pytest.raises(SettingError, match="groups.*ranks of infinity with 32 blocks of 2048 channels, 8 groups; got 7"):
        StageVAR(groups=5).forecast(infinity(), ONE_MEGAPIXEL)
    plans = StageVAR(groups=5, ranks=0.1).forecast(infinity(), ONE_MEGAPIXEL)
    assert [len(span.layers) for span in plans[10].spans] == [5] * 6 + [2]


@pytest.mark.parametrize("template", INFINITY_SIZES)
def test_all_aspect_ratios_take_the_side_with_the_nearest_number_of_tokens(template: float) -> None:
    schedule = infinity_schedule(template, "1M")
    plans = StageVAR(alphas={10: 0.96, 11: 0.96, 12: 0.96}).forecast(infinity(), schedule)
    sides = {row.cells: row.ratios for row in published_tables()["infinity"].rows if row.alpha == 0.96}
    for index in (10, 11, 12):
        nearest = min((1600, 2304, 4096), key=lambda cells: abs(cells - schedule[index].cells))
        assert [span.ratio for span in plans[index].spans] == list(sides[nearest])
        largest = min(schedule[index].cells, 2048)
        assert ranks_of(plans[index], schedule[index]) == [int(ratio * largest) + 1 for ratio in sides[nearest]]


@pytest.mark.parametrize(
    ("side", "largest", "rows"), [(40, 1600, 283.625), (48, 2048, 322.25), (64, 2048, 101.0), (84, 2048, 101.0), (128, 2048, 101.0)]
)
def test_ratios_are_shares_of_the_largest_possible_rank(side: int, largest: int, rows: float) -> None:
    """At 40x40 as the reference implementation counts, bit for bit; at 64x64 half as many rows, at 128x128 an eighth."""
    schedule = Schedule((1, 2, side))
    last = len(schedule) - 1
    ours, released = (
        StageVAR(guidance_off=last, alphas={last: 0.96}, as_released=flag).forecast(infinity(), schedule)[last] for flag in (False, True)
    )
    ratios = published_tables()["infinity"].ratios(0.96, schedule[last].cells)
    assert ranks_of(ours, schedule[last]) == [int(ratio * largest) + 1 for ratio in ratios]
    assert ranks_of(released, schedule[last]) == [int(ratio * side * side) + 1 for ratio in ratios]
    assert sum(ranks_of(ours, schedule[last])) / 8 == rows
    everything = StageVAR(guidance_off=last, alphas={last: 0.96}, ranks=1.0).forecast(infinity(), schedule)[last]
    assert ranks_of(everything, schedule[last]) == [largest] * 8


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        (on_meta(Star, StarConfig(30, 1920, 30, HART_1024, 40, 8, 256)), 30),
        (on_meta(Hart, HartConfig(24, 1536, 24, HART_1024, 40, 8, 256, residual_dim=32, residual_depth=1)), 24),
    ],
    ids=["star", "hart"],
)
def test_the_published_setting_of_star_and_hart(model: NextScaleModel, groups: int) -> None:
    schedule = Schedule(HART_1024)
    plans = StageVAR().forecast(model, schedule)
    assert [plan.cfg_branches for plan in plans] == ["both"] * 12 + ["uncond"] * 2
    assert not any(plan.skip for plan in plans)
    assert [span.layers for span in plans[13].spans] == [range(layer, layer + 1) for layer in range(groups)]
    ratios = published_tables()[model.family].ratios(0.96, 4096)
    assert ranks_of(plans[13], schedule[13]) == [int(ratio * model.block_config.dim) + 1 for ratio in ratios]  # of min(4096, dim)
    assert len(plans[12].spans) == groups
    assert StageVAR(as_released=True).forecast(model, schedule) == plans


def test_star_at_the_largest_alpha_of_the_paper() -> None:
    """Table 11 has 59.5 % at alpha 0.999, of which no ratios by block are published."""
    model, schedule = on_meta(Star, StarConfig(30, 1920, 30, HART_1024, 40, 8, 256)), Schedule(HART_1024)
    assert ranks_of(StageVAR(alphas={13: 0.999}).forecast(model, schedule)[13], schedule[13]) == [int(0.595 * 1920) + 1] * 30


def test_shares_follow_the_tokens_that_are_there() -> None:
    span = toy_span()
    span = replace(span, ratio=0.3, channels=10)
    assert [span.num_tokens(tokens) for tokens in (1, 2, 4, 10, 50)] == [1, 1, 2, 4, 4]
    assert replace(span, ratio=1.0).num_tokens(50) == 10
    assert replace(span, ratio=1.0).num_tokens(7) == 7
    ragged = Tokens(FOUR.stage, torch.zeros(3, 50, dtype=torch.long), torch.tensor([50, 4, 1]))
    largest, ranks = span.ranks(torch.zeros(3, 50, 2), ragged)
    assert ranks is not None and (largest, ranks.tolist()) == (4, [4, 2, 1])
    assert span.ranks(torch.zeros(3, 50, 2), Tokens(FOUR.stage)) == (4, None)


def test_shares_on_the_device_are_those_of_the_host() -> None:
    """Where ratio * tokens is a whole number rounding decides; both must round alike."""
    for ratio in (0.1, 0.29, 0.57, 0.7):
        for channels in (None, 150):
            span = replace(toy_span(), ratio=ratio, channels=channels)
            counts = torch.arange(1, 401)
            ragged = Tokens(FOUR.stage, torch.zeros(400, 400, dtype=torch.long), counts)
            _, ranks = span.ranks(torch.zeros(400, 400, 1), ragged)
            assert ranks is not None and ranks.tolist() == [span.num_tokens(count) for count in range(1, 401)]


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_off": -1}, "guidance_off .* got -1"),
        ({"guidance_off": 2.5}, "guidance_off .* got 2.5"),
        ({"alphas": {3: 1.5}}, "alphas .* got {3: 1.5}"),
        ({"alphas": {-1: 0.5}}, "alphas"),
        ({"alphas": 0.96}, "alphas .* got 0.96"),
        ({"alphas": ((1, 0.5), (1, 0.6))}, "alphas.*each once"),
        ({"alphas": ((1, 0.5, 2),)}, "alphas"),
        ({"alphas": "10"}, "alphas"),
        ({"ranks": "table"}, "ranks.*got 'table'"),
        ({"ranks": "nowhere.json"}, "ranks nowhere.json cannot be read .*nextscale calibrate stagevar"),
        ({"ranks": 0}, "ranks.*got 0"),
        ({"ranks": 1.2}, "ranks"),
        ({"ranks": ()}, "ranks"),
        ({"ranks": (0.2, 0)}, "ranks"),
        ({"ranks": {3: 0.2}}, "ranks"),
        ({"ranks": "measured"}, "ranks.*got 'measured'"),
        ({"groups": 0}, "groups .* got 0"),
        ({"kept_rows": "cond", "as_released": True}, "as_released.*got 'cond'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        StageVAR(**settings)


def test_settings_are_values() -> None:
    one = StageVAR(alphas={3: 0, 2: 0.96}, ranks={3: [0.2, 0.3], 2: (1, 0.5)})
    assert one.alphas == ((2, 0.96), (3, 0.0))
    assert one.ranks == ((2, (1.0, 0.5)), (3, (0.2, 0.3)))
    assert one == StageVAR(alphas=((2, 0.96), (3, 0)), ranks=((3, (0.2, 0.3)), (2, (1.0, 0.5))))
    assert len({one, StageVAR(), StageVAR(ranks=0.2), StageVAR(ranks=(0.2,))}) == 4


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (StageVAR(alphas={4: 0}), "alphas.*0 to 3.*got 4"),
        (StageVAR(alphas={0: 0.96}), "stage 0 cannot run at low rank"),
        (StageVAR(alphas={0: 0, 1: 0.96}), "stage 1 cannot run at low rank"),
        (StageVAR(groups=4), "groups.*at most 3.*got 4"),
        (StageVAR(groups=2), "groups.*ranks of var with 3 blocks of 64 channels, 3 groups; got 2"),
        (StageVAR(alphas={3: 0.9}), "alpha must be one of 0.96.*ranks of var.*got 0.9"),
        (StageVAR(ranks=published_tables()["star"]), "ranks.*var with 3 blocks.*got ranks of star with 30 blocks"),
        (StageVAR(ranks=(0.2, 0.3)), "ranks must be 3 ratios"),
        (StageVAR(ranks={2: (0.2, 0.3, 0.4)}), "stage 3, which runs at low rank too"),
        (StageVAR(as_released=True), "as_released.*infinity, star, hart; got .var"),
    ],
)
def test_what_does_not_fit_the_model_or_the_schedule_is_refused_before_anything_runs(method: StageVAR, message: str) -> None:
    pipe = tiny.shared_pipeline("var")
    with pytest.raises(SettingError, match=message):
        method.forecast(pipe.model, tiny.schedule_of("var"))
    with pytest.raises(SettingError, match=message):
        generated("var", method=method, on_stage=lambda preview: pytest.fail("a stage has run"))


def test_an_alpha_without_a_table_names_those_that_there_are() -> None:
    with pytest.raises(SettingError, match="alpha must be one of 0.7, 0.8, 0.85, 0.9, 0.91, 0.92, 0.95, 0.96.*got 0.93"):
        StageVAR(alphas={10: 0.93}).forecast(infinity(), ONE_MEGAPIXEL)
    StageVAR(alphas={10: 0.93}, ranks=0.2).forecast(infinity(), ONE_MEGAPIXEL)


def test_stars_released_text_attention_takes_one_image_at_a_time() -> None:
    """There the first row's tokens are looked up for all rows, which only fits where all rows run the same tokens."""
    model, schedule = on_meta(Star, StarConfig(1, 64, 4, (1, 2), 8, 4, 8, as_released=True)), Schedule((1, 2))
    model.rank_table = RankTable("star", 1, 64, (RankRow(0.96, 4, (0.2,)),))

    def setup(method: StageVAR, batch: int) -> RunSetup:
        return RunSetup(model, schedule, batch, ImageRng([0, 1], torch.device("cpu")), method.forecast(model, schedule))

    StageVAR().start(setup(StageVAR(), batch=1))
    with pytest.raises(SettingError, match="one image at a time"):
        StageVAR().start(setup(StageVAR(), batch=2))
    for method in (OFF, StageVAR(alphas={1: 0})):
        method.start(setup(method, batch=2))


def test_as_released_takes_first_positions() -> None:
    released = StageVAR(as_released=True).forecast(infinity(), ONE_MEGAPIXEL)[10].spans
    assert released and all(span.first_positions for span in released)
    assert not any(span.first_positions for span in StageVAR().forecast(infinity(), ONE_MEGAPIXEL)[10].spans)


def test_each_low_rank_stage_is_restored_from_the_stage_that_runs_before_it() -> None:
    model, schedule = on_meta(Var, VarConfig(3, 64, 4, (1, 2, 3, 4, 5, 6), False)), Schedule((1, 2, 3, 4, 5, 6))
    plans = StageVAR(alphas={2: 0, 3: 0.96, 4: 0.96, 5: 1}, ranks=0.2).forecast(model, schedule)
    assert [type(plan.spans[0]) if plan.spans else None for plan in plans] == [
        None,
        StoredGroup,
        None,
        LowRankGroup,
        LowRankGroup,
        None,
    ]
    assert plans[3].spans[0].store
    assert not plans[4].spans[0].store
    assert [any(span.whole_stage for span in plan.spans) for plan in plans] == [False, True, False, True, False, False]
    assert {plan.num_tokens for plan in plans} == {None}  # what is remembered must be whole, and nothing reduces it


# --- all families


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_everything_off_is_dense_bit_for_bit(family: str) -> None:
    dense = generated(family)
    assert_same_bits(generated(family, method=OFF), dense)
    assert_same_bits(generated(family, method=StageVAR(guidance_off=STAGES[family], alphas={last_stage(family): 1})), dense)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_remembering_changes_nothing_before_the_low_rank_stage(family: str) -> None:
    dense, ours = generated(family), generated(family, method=StageVAR(guidance_off=99))
    assert all(torch.equal(a, b) for a, b in zip(ours.codes[:-1], dense.codes[:-1], strict=True))
    assert not torch.equal(ours.codes[-1], dense.codes[-1])


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("first", [1, 2])
def test_guidance_off_is_a_scale_of_zero(family: str, first: int) -> None:
    """Unconditional logits alone. Latents to rounding, since other numbers of rows round differently. HART's diffusion takes its
    variances from the first rows, which are the conditional ones while there are any."""
    stages = STAGES[family]
    mixed = generated(family, guidance=StageGuidance(values=(2.5,) * first + (0.0,) * (stages - first)))
    off = generated(family, guidance=StageGuidance(values=(2.5,) * stages), method=StageVAR(guidance_off=first, alphas=()))
    assert [stage.rows for stage in off.report.stages] == [4] * first + [2] * (stages - first)
    assert_same_codes(off, mixed)
    assert family == "hart" or torch.allclose(off.pixels, mixed.pixels, atol=BATCH_TOLERANCE)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_without_guidance_the_conditional_rows_go_on(family: str) -> None:
    unguided = {"guidance": tiny.NO_GUIDANCE[family]}
    assert_same_bits(generated(family, method=StageVAR(guidance_off=1, alphas=()), **unguided), generated(family, **unguided))
    ours = generated(family, method=StageVAR(), **unguided)
    assert [stage.rows for stage in ours.report.stages] == [2] * STAGES[family]
    assert not torch.equal(ours.codes[-1], generated(family, **unguided).codes[-1])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_last_stages_can_be_skipped(family: str) -> None:
    last = last_stage(family)
    ours = generated(family, method=StageVAR(guidance_off=99, alphas={last: 0, last - 1: 0}))
    assert_same_bits(ours, generated(family, method=SkipStages(2)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_batch_is_its_images_alone(family: str, method: StageVAR = PUBLISHED) -> None:
    together = generated(family, 3, method)
    for image in (0, 2):
        single = alone(family, image, method)
        assert all(torch.equal(a[image], b[0]) for a, b in zip(together.codes, single.codes, strict=True))
        assert torch.allclose(together.pixels[image], single.pixels[0], atol=BATCH_TOLERANCE)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_guided_rows_of_one_image_share_the_noise(family: str) -> None:
    """With the prompt as its own negative both rows are the same, whatever the guidance."""
    method = StageVAR(guidance_off=99, ranks=0.3)
    together = generated(family, 2, method)
    for image in range(2):
        single = alone(family, image, method)
        assert all(torch.equal(a[image], b[0]) for a, b in zip(together.codes, single.codes, strict=True))
    if family in tiny.TEXT_FAMILIES:
        prompts = tiny.prompts(family, 2)
        same = generated(family, method=method, negative=prompts)
        once = generated(family, method=method, guidance=tiny.NO_GUIDANCE[family])
        assert_same_codes(same, once)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_permuted_batch_permutes_the_images(family: str) -> None:
    pipe, settings = tiny.shared_pipeline(family), INTEGER_CODES.get(family, {})
    prompts = tiny.prompts(family, 3)
    order = [2, 0, 1]
    method = StageVAR()
    first = pipe(prompts, seed=[5, 6, 7], method=method, **settings)
    turned = [prompts[i] for i in order] if isinstance(prompts, list) else type(prompts).joined([prompts.one(i) for i in order])
    second = pipe(turned, seed=[[5, 6, 7][i] for i in order], method=method, **settings)
    for a, b in zip(first.codes, second.codes, strict=True):
        assert torch.equal(a[order], b)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_seed_fixes_the_image(family: str) -> None:
    assert_same_bits(generated(family, method=StageVAR()), generated(family, method=StageVAR()))


def test_another_seed_samples_other_representatives() -> None:
    pipe = tiny.shared_pipeline("var")
    masks = [pipe([3], seed=seed, greedy=True, method=StageVAR(), compute_mask=True).compute_mask[-1] for seed in (1, 2)]
    assert not torch.equal(*masks)


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if not family.startswith("var")])  # VAR's positions are square
def test_images_that_are_not_square(family: str) -> None:
    schedule = Schedule([(1, 1), (2, 3), (4, 6), (6, 9)])
    method = StageVAR(alphas={2: 0.96, 3: 0.96}, ranks=0.3)
    together = generated(family, 2, method, size=schedule, compute_mask=True)
    assert together.compute_mask[-1].shape == (2, *schedule.grid)
    single = alone(family, 1, method, size=schedule)
    assert all(torch.equal(a[1], b[0]) for a, b in zip(together.codes, single.codes, strict=True))


@pytest.mark.parametrize("family", ["infinity", "hart"])
def test_half_precision(family: str) -> None:
    pipe = tiny.shared_pipeline(family, torch.bfloat16)
    assert pipe(tiny.prompts(family, 2), seed=1, method=StageVAR()).pixels.isfinite().all()


# --- what was run


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_compute_mask_is_the_share_of_groups_in_which_a_cell_was_a_representative(family: str) -> None:
    output = generated(family, method=StageVAR(ranks=0.3), compute_mask=True)
    assert all((mask == 1).all() for mask in output.compute_mask[:-1])
    last = output.compute_mask[-1].flatten(1)
    rows = int(0.3 * last.shape[1]) + 1
    assert torch.allclose(last.sum(dim=1), torch.tensor(float(rows)))
    assert set((3 * last).round(decimals=4).unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}
    assert last.unique().numel() > 2  # groups choose for themselves


def test_both_rows_of_an_image_count_in_the_compute_mask() -> None:
    """Three sublayers ran cells 0 and 1 of the conditional row, and 1 and 3 of the other; one more ran three quarters of everything."""
    computed = ComputedCells(1)
    computed.add(Tokens(FOUR.stage, torch.tensor([[0, 1], [1, 3]])), torch.zeros(2, 2, 5), sublayers=3)
    computed.add(FOUR, torch.zeros(2, 4, 5), sublayers=1, share=torch.tensor([0.5, 1.0]))
    assert computed.take(4).tolist() == [[(1.5 + 0.75) / 4, (3 + 0.75) / 4, 0.75 / 4, (1.5 + 0.75) / 4]]
    assert computed.take(4) is None


def test_a_span_reports_what_its_blocks_computed(kind: type[LowRankGroup] = LowRankGroup, share: float | None = None) -> None:
    """Two rows of four tokens went through one block of one sublayer: those of cells 0 and 2, or half of each cell."""
    ctx = toy_env(X, FOUR)
    toy_span(kind)([Doubling()], X, FOUR, ctx)  # type: ignore[list-item]
    assert ctx.computed is not None and ctx.computed.reported
    assert ctx.computed.take(1).tolist() == [[1, 0, 1, 0] if share is None else [share] * 4]


class CountingCache(LayerCache):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[int] = []

    def append(self, k: Tensor, v: Tensor, tokens: Tokens) -> CacheView:
        view = super().append(k, v, tokens)
        self.read.append(view.end)
        return view


@dataclass(frozen=True)
class Counting(Method):
    exclusive = frozenset({"cache"})
    caches: list[CountingCache]

    def start(self, setup: RunSetup) -> MethodRun:
        return CountingRun(self.caches)


@dataclass(frozen=True)
class CountingRun(MethodRun):
    caches: list[CountingCache]

    def layer_cache(self, spec: Any, workspace: Any) -> CountingCache:
        self.caches.append(CountingCache(spec, workspace))
        return self.caches[-1]


@pytest.mark.parametrize("family", ["var", "infinity", "hart", "star"])
def test_projected_rows_are_what_the_cache_holds(family: str) -> None:
    caches: list[CountingCache] = []
    method = StageVAR(alphas={2: 0.96, 3: 0.96}, ranks=(0.1, 0.3, 0.5))
    generated(family, method=Combined((method, Counting(caches))))
    stages = tiny.schedule_of(family).stages
    text = tiny.HART_TEXT - 1 if family == "hart" else 0  # the last one is the first stage's cell
    for held, ratio in zip(caches, (0.1, 0.3, 0.5), strict=True):
        cells = [stages[0].cells + text, stages[1].cells, *(int(ratio * stage.cells) + 1 for stage in stages[2:])]
        assert held.read == [sum(cells[: stage + 1]) for stage in range(4)]


def test_the_forecast_is_what_runs(method: StageVAR = PUBLISHED) -> None:
    pipe, schedule = tiny.shared_pipeline("star"), tiny.schedule_of("star")
    plans: list[StagePlan] = []
    generated("star", method=method, on_stage=lambda preview: plans.append(preview.done.plan))
    forecast = method.forecast(pipe.model, schedule)
    assert tuple(plans) == forecast
    assert len({*plans}) == len({*forecast})


def test_a_later_stage_is_restored_from_the_restored_maps() -> None:
    """Where the second low-rank stage has no representative its rows are those of the first one, resized."""
    maps: dict[int, Tensor] = {}

    class Looking(Method):
        def start(self, setup: RunSetup) -> MethodRun:
            return LookingRun()

    class LookingRun(MethodRun):
        def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
            maps[tokens.stage.index] = logits
            return Restored(logits, tokens)

    output = generated("star", method=Combined((StageVAR(alphas={2: 0.96, 3: 0.96}, groups=3, ranks=0.177), Looking())), compute_mask=True)
    small, large = maps[2], maps[3]  # logits [2, 9, V] and [2, 16, V]; STAR's head sees one token at a time
    untouched = output.compute_mask[3].flatten(1) == 0
    corners = torch.tensor([0, 3, 12, 15])  # an area resize from 3 to 4 leaves the corners as they are
    for image in range(2):
        free = [corner for corner in range(4) if untouched[image, corners[corner]]]
        assert free
        for corner in free:
            source = small[image, (0, 2, 6, 8)[corner]]
            assert torch.allclose(large[image, corners[corner]], source, atol=1e-4)


# --- with other methods


def spans_at(index: int) -> Planned:
    """Blocks run their own way at one stage, as FastVAR's do."""
    return Planned(lambda stage: StagePlan(spans=(RunBlocks(range(1, 3)),)) if stage.index == index else DENSE)


@dataclass(frozen=True)
class KeepAt(Method):
    """Keeps a share of each image's tokens at one stage, the same cells for all images."""

    exclusive = frozenset({"tokens"})
    stage: int
    shares: tuple[float, ...]

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return tuple(StagePlan(num_tokens=max(counts_of(self.shares, s))) if s.index == self.stage else DENSE for s in schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        return KeepAtRun(self)


@dataclass(frozen=True)
class KeepAtRun(MethodRun):
    method: KeepAt

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        return top_tokens(x, tokens, self.method.shares) if tokens.stage.index == self.method.stage else tokens


@pytest.mark.parametrize("stage", [2, 3])
def test_spans_of_others_at_low_rank_stages_and_before_are_refused(stage: int) -> None:
    pipe = tiny.shared_pipeline("infinity")
    combined = Combined((StageVAR(), spans_at(stage)))
    with pytest.raises(SettingError, match=f"at stage {stage} both change block"):
        combined.forecast(pipe.model, tiny.schedule_of("infinity"))
    with pytest.raises(SettingError, match="both change"):
        generated("infinity", method=combined, on_stage=lambda preview: pytest.fail("a stage has run"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_guidance_off_goes_with_spans_of_others(family: str) -> None:
    for method in (StageVAR(alphas=()),):
        assert_same_bits(generated(family, method=Combined((method, spans_at(last_stage(family))))), generated(family, method=method))


def test_a_method_that_reduces_the_stage_to_restore_from_is_refused() -> None:
    pipe = tiny.shared_pipeline("star")
    combined = Combined((KeepAt(2, (0.5, 0.5)), StageVAR()))
    with pytest.raises(SettingError, match=r"at stage 2 the span StoredGroup \(blocks? .*\) needs every cell of the stage"):
        combined.forecast(pipe.model, tiny.schedule_of("star"))
    Combined((KeepAt(1, (0.5, 0.5)), StageVAR())).forecast(pipe.model, tiny.schedule_of("star"))


SHARES = (0.4, 1.0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_low_rank_inside_a_reduced_stage(family: str, method: StageVAR = PUBLISHED) -> None:
    """Images that keep different numbers of tokens equal those images alone; the rank is a share of what is kept."""
    last = last_stage(family)
    together = generated(family, 2, Combined((KeepAt(last, SHARES), method)), greedy=True, compute_mask=True)
    for image, share in enumerate(SHARES):
        single = alone(family, image, Combined((KeepAt(last, (share,)), method)), greedy=True)
        assert all(torch.equal(a[image], b[0]) for a, b in zip(together.codes[:-1], single.codes[:-1], strict=True))
        kept = single.codes[-1].shape[1]
        assert torch.equal(together.codes[-1][image, :kept], single.codes[-1][0])
        if method == PUBLISHED:
            assert int(together.compute_mask[last][image].count_nonzero()) <= 3 * (int(tiny.RATIO * kept) + 1)


def test_a_stage_that_another_method_skips_cannot_be_restored_from() -> None:
    skipping = Planned(lambda stage: StagePlan(skip=stage.index == 2))
    with pytest.raises(SettingError, match="at stage 3 the span .* needs what stage 2 computes, and another method skips"):
        generated("star", method=Combined((skipping, StageVAR())), on_stage=lambda preview: pytest.fail("a stage has run"))


def test_a_stage_that_a_run_skips_unannounced_is_named_where_it_is_missed() -> None:
    with pytest.raises(SettingError, match="outputs .*stagevar.* are missing"):
        generated("star", method=Combined((SkipUnannounced(2), StageVAR())))


# --- names


def test_settings_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("nextscale.methods.registry", fromlist=["METHODS"]).METHODS, "stagevar", StageVAR)
    assert parse_method("stagevar") == StageVAR()
    text = "stagevar:guidance_off=10,alphas={10: 0.9, 11: 0},ranks=[0.1,0.2],kept_rows=cond"
    assert parse_method(text) == StageVAR(10, {10: 0.9, 11: 0}, (0.1, 0.2), kept_rows="cond")
    assert parse_method("stagevar:guidance_off=99,alphas=[]") == OFF
    assert parse_method("stagevar:ranks=0.3,alphas=[(3,0.9)]") == StageVAR(ranks=0.3, alphas={3: 0.9})


# --- replaying stored noise


def test_the_noise_of_a_method_can_be_replayed() -> None:
    """The i-th pair belongs to the i-th group of the low-rank stages in order."""

    class Replayed:
        def __init__(self) -> None:
            self.asked: list[tuple[str, tuple[int, ...]]] = []

        def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
            self.asked.append(("exponential", tuple(shape)))
            return torch.arange(1.0, 1 + shape[1]).pow(8).expand(tuple(shape))  # the first cells win

        def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
            self.asked.append(("normal", tuple(shape)))
            return torch.zeros(tuple(shape))

        def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
            raise AssertionError("not needed")

    noise = Replayed()
    pipe = tiny.shared_pipeline("infinity")
    mask = pipe(tiny.prompts("infinity", 2), seed=noise, greedy=True, method=StageVAR(ranks=0.2), compute_mask=True).compute_mask[-1]
    assert noise.asked == [("exponential", (2, 12)), ("normal", (2, 12, 3))] * 3
    assert (mask.flatten(1)[:, :3] > 0).all()


# --- measuring


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ranks_are_measured_with_one_call_and_can_be_used(family: str) -> None:
    pipe, stages = tiny.shared_pipeline(family), STAGES[family]
    prompts = [tiny.one_prompt(family, image) for image in range(2)]
    measured = measure_ranks(pipe, prompts, alphas=(0.6, 0.9999))
    late = [stages - 2, stages - 1]
    assert list(measured) == [(alpha, stage) for stage in late for alpha in (0.6, 0.9999)]
    for stage in late:
        few, many = measured[0.6, stage], measured[0.9999, stage]
        assert few.shape == many.shape == (3, 2)  # groups, images
        assert (few > 0).all() and (few <= many).all() and (many <= 1).all() and not torch.equal(few, many)
    generated(family, method=StageVAR(ranks={stage: measured[0.9999, stage].mean(dim=1).tolist() for stage in late}))


def test_measured_ratios_are_shares_of_the_largest_possible_rank() -> None:
    pipe = tiny.shared_pipeline("var")
    inputs: list[Tensor] = []

    class Looking(Planned):
        def start(self, setup: RunSetup) -> MethodRun:
            return LookingRun()

    class LookingRun(MethodRun):
        def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
            if tokens.stage.index == 3:
                inputs.append(before)

    for image in range(2):
        method = Looking(lambda stage: StagePlan(observed=(0, 2), cfg_branches="uncond" if stage.index >= 2 else "both"))
        pipe([3, 7][image], seed=4 + image, method=method)
    ranks = [int(energy_ranks(torch.linalg.svdvals(x).square(), 0.9)) for x in inputs]  # image 0 group 0, image 0 group 1, ...
    measured = measure_ranks(pipe, [3, 7], (0.9,), StageVAR(groups=2), seed=4)[0.9, 3]
    assert (measured * 16).flatten().tolist() == pytest.approx([ranks[0], ranks[2], ranks[1], ranks[3]])
    centered = measure_ranks(pipe, [3, 7], (0.9,), StageVAR(groups=2), seed=4, centered=True)[0.9, 3]
    without = [int(energy_ranks(torch.linalg.svdvals(x - x.mean(dim=1, keepdim=True)).square(), 0.9)) for x in inputs]
    assert (centered * 16).flatten().tolist() == pytest.approx([without[0], without[2], without[1], without[3]])


def test_measuring_refuses_what_it_cannot_measure() -> None:
    pipe = tiny.shared_pipeline("var")
    with pytest.raises(SettingError, match="prompts and stages"):
        measure_ranks(pipe, [3], method=OFF)
    with pytest.raises(SettingError, match="prompts and stages"):
        measure_ranks(pipe, [])


# --- the table


def test_the_published_table() -> None:
    tables = published_tables()
    shapes = {name: (len(table.rows), table.groups) for name, table in tables.items()}
    assert shapes == {"infinity": (36, 8), "star": (7, 30), "hart": (1, 24)}
    assert all(0 < ratio < 1 for table in tables.values() for row in table.rows for ratio in row.ratios)
    assert all(len(row.ratios) == table.groups for table in tables.values() for row in table.rows)
    for fewer, more in pairwise(sorted({row.alpha for row in tables["star"].rows})):
        assert sum(tables["star"].ratios(fewer, 4096)) < sum(tables["star"].ratios(more, 4096))
    assert sum(tables["infinity"].ratios(0.96, 1600)) / 8 == pytest.approx(0.177, abs=5e-4)


def test_tables_belong_to_models_that_can_be_loaded() -> None:
    """Of those that are published for 1024 px, in the names that `load` knows them by."""
    for name, spec in MODELS.items():
        with torch.device("meta"):
            model = build_model(spec.model)
        assert any(table.belongs_to(model) for table in published_tables().values()) == (
            name in ("infinity-2b", "star-1024", "star-1024-sampler", "hart-0.7b")
        ), name


# --- tables of one's own


OWN = RankTable("var", 3, 64, tuple(RankRow(0.9, cells, (0.1, 0.2, 0.3)) for cells in (4, 16)))


def test_a_table_is_written_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    write_rank_table(replace(OWN, about={"images": 2}), file)
    assert read_rank_table(file) == OWN and os.listdir(tmp_path) == ["own.json"]
    for ranks in (file, str(file), OWN):
        method = StageVAR(alphas={3: 0.9}, ranks=ranks)  # type: ignore[arg-type]
        assert method == StageVAR(alphas={3: 0.9}, ranks=OWN) and hash(method) == hash(StageVAR(alphas={3: 0.9}, ranks=OWN))
        plan = method.forecast(tiny.shared_pipeline("var").model, tiny.schedule_of("var"))[3]
        assert [span.ratio for span in plan.spans] == [0.1, 0.2, 0.3]
    assert parse_method(f"stagevar:alphas={{3:0.9}},ranks={file}") == method
    assert method.label == "StageVAR(alphas=((3, 0.9),), ranks=ranks of var with 3 blocks of 64 channels, 3 groups)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "cannot be read"),
        ('{"family": 3, "depth": 3, "dim": 64, "rows": []}', "family must be str; got 3"),
        ('{"family": "var", "depth": 0, "dim": 64, "rows": []}', "ranks"),
        ('{"family": "var", "depth": 3, "dim": "64", "rows": []}', "ranks"),
        ('{"family": "var", "depth": 3, "dim": 64, "rows": []}', "rows must be"),
        ('{"family": "var", "depth": 3, "dim": 64, "rows": [7]}', "cannot be read"),
        ('{"family": "var", "depth": 3, "dim": 64, "rows": [{"alpha": 0.9, "cells": 4, "ratios": [0.1, 1.5]}]}', "rows must be.*1.5"),
        ('{"family": "var", "depth": 3, "dim": 64, "rows": [{"alpha": 0.9, "cells": 4, "ratios": [NaN]}]}', "NaN is not a number"),
        ('{"family": "var", "depth": 3, "dim": 64, "rows": [{"alpha": 0.9, "cells": 0, "ratios": [0.1]}]}', "rows must be"),
        (
            '{"family": "var", "depth": 3, "dim": 64, "rows": [{"alpha": 0.9, "cells": 4, "ratios": [0.1]},'
            ' {"alpha": 0.9, "cells": 4, "ratios": [0.1]}]}',
            "every alpha and number of cells once",
        ),
    ],
)
def test_files_that_are_no_tables_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(text)
    with pytest.raises(SettingError, match=message):
        StageVAR(ranks=str(file))


def test_a_measured_table_is_that_of_the_model_and_used_before_the_published_one() -> None:
    pipe = tiny.fresh_pipeline("infinity")
    seen: list[int] = []
    schedules = [tiny.schedule_of("infinity"), Schedule(((1, 1), (2, 2), (4, 3)))]
    prompts = [tiny.one_prompt("infinity", image) for image in range(2)]
    table = measure_table(pipe, prompts, schedules, (0.9, 0.96), seed=3, on_image=lambda: seen.append(1))
    assert len(seen) == 4 and table.belongs_to(pipe.model) and table.groups == 3
    assert sorted({(row.alpha, row.cells) for row in table.rows}) == [(alpha, cells) for alpha in (0.9, 0.96) for cells in (4, 6, 12)]
    first, second = (measure_ranks(pipe, prompts, (0.96,), seed=3, size=schedule) for schedule in schedules)
    shared = torch.cat([first[0.96, 3], second[0.96, 2]], dim=1)  # 12 cells are the last stage of both
    assert table.ratios(0.96, 12) == pytest.approx(shared.mean(dim=1).tolist(), abs=1e-6)
    [row] = [row for row in table.rows if (row.alpha, row.cells) == (0.96, 12)]
    assert row.deviations == pytest.approx(shared.std(dim=1, correction=0).tolist(), abs=1e-6)
    pipe.model.rank_table = table
    plans = StageVAR().forecast(pipe.model, tiny.schedule_of("infinity"))
    assert [span.ratio for span in plans[3].spans] == list(table.ratios(0.96, 12))


def test_nano_comes_with_ranks_of_its_own() -> None:
    """They are a tenth of Infinity-2B's: 1.4 % of the tokens at 40x40, 7 % of the 320 channels."""
    spec = MODELS["nano"]
    weights = local_weights(spec)
    assert weights is not None
    with torch.device("meta"):
        table = rank_table_of(build_model(spec.model), weights)
    assert table is not None and table.groups == 8
    assert sum(table.ratios(0.96, 1600)) / 8 * 320 / 1600 == pytest.approx(0.014, abs=5e-4)


def test_the_table_beside_the_weights_is_found(tmp_path: Path) -> None:
    model, folder = tiny.shared_pipeline("var").model, tmp_path / "var-0.7b"
    folder.mkdir()
    weights = tmp_path / "var_d16.pth"
    weights.touch()
    for path, name in ((weights, "var_d16.ranks.json"), (folder, "var-0.7b.ranks.json")):
        assert rank_table_of(model, path) is None
        assert rank_file(path) == tmp_path / name
        write_rank_table(OWN, tmp_path / name)
        assert rank_table_of(model, path) == OWN
        write_rank_table(replace(OWN, dim=65), tmp_path / name)
        with pytest.raises(SettingError, match=f"{name} must be .*got ranks of var with 3 blocks of 65"):
            rank_table_of(model, path)


@pytest.mark.parametrize("family", tiny.KINDS)
def test_rounding_moves_logits_only_through_the_order_of_the_representatives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU twin of the batch test of test_cuda_quantize: noise of the size of bfloat16's on all hidden states of an image alone."""
    method, held = StageVAR(ranks=0.177), HeldRepresentatives(monkeypatch, batch=2)
    pipe = tiny.shared_pipeline(family)
    both = generate_seen(pipe, tiny.prompts(family, 2), None, seed=[3, 4], method=method)
    rounding = torch.Generator().manual_seed(0)

    def rounded(block: Block, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        return out * (1 + 2**-9 * torch.randn(out.shape, generator=rounding))

    for image in range(2):
        held.repeat_for([image])
        hooks = [block.register_forward_hook(rounded) for block in pipe.model.stack]
        try:
            codes = [codes[image : image + 1] for codes in both.codes]
            alone = generate_seen(pipe, tiny.one_prompt(family, image), None, codes, 3 + image, method)
        finally:
            for hook in hooks:
                hook.remove()
        for found, expected in zip(alone.logits, both.logits, strict=True):
            assert 0 < (found[0] - expected[image]).norm() < 0.05 * expected[image].norm()
