"""From logits to codes: filters, draws, smoothing, and where the random numbers come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.loading.presets import FLEXVAR_SETTINGS, MODELS
from nextscale.sampling import (
    ImageRng,
    Refinement,
    Rng,
    Sampling,
    SharedRng,
    cell_noise,
    choose,
    filter_logits,
    gumbel_softmax,
    sample,
    sample_codes,
)
from nextscale.schedules import FLEXVAR_512, FLEXVAR_STEPS, HART_1024
from nextscale.stage import Schedule, Stage, Tokens

CPU = torch.device("cpu")
SECOND_OF_ONE_CELL = Stage(1, 1, 1, 1, False)
STAGES = Schedule((1, 2, (3, 2)))


class NoDraws:
    """A source that must not be asked."""

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        raise AssertionError("random numbers were used")

    uniform = normal = exponential


class ScriptedDraws:
    """Hands out the given noise, one tensor per call."""

    def __init__(self, *noise: Tensor) -> None:
        self.noise = list(noise)

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        noise = self.noise.pop(0)
        assert tuple(shape) == noise.shape
        return noise

    uniform = normal = exponential


def square(side: int) -> Stage:
    return Stage(0, side, side, 0, False)


# --- filters

INFINITELY_UNLIKELY = float("-inf")


def filtered_row_by_row(row: list[float], top_k: int, top_p: float) -> list[float]:
    """The published rules, spelled out: ties with the k-th stay; then the least likely go while their sum is at most 1 - p."""
    kept = list(row)
    if top_k > 0:
        kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        kept = [value if value >= kth else INFINITELY_UNLIKELY for value in kept]
    if top_p > 0:
        largest = max(kept)
        weights = [math.exp(value - largest) for value in kept]
        ascending = sorted(range(len(kept)), key=lambda position: kept[position])
        below = 0.0
        for position in ascending[:-1]:
            below += weights[position] / sum(weights)
            assume(abs(below - (1 - top_p)) > 1e-5)  # float32 may round to either side
            if below <= 1 - top_p:
                kept[position] = INFINITELY_UNLIKELY
    return kept


@settings(deadline=None)
@given(
    rows=st.integers(2, 8).flatmap(
        lambda codes: st.lists(
            st.lists(st.integers(-40, 40), min_size=codes, max_size=codes, unique=True).map(lambda row: [value / 8 for value in row]),
            min_size=1,
            max_size=4,
        )
    ),
    top_k=st.integers(0, 10),
    top_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 0.99)),
)
def test_filters_equal_the_rules_spelled_out(rows: list[list[float]], top_k: int, top_p: float) -> None:
    expected = [filtered_row_by_row(row, top_k, top_p) for row in rows]
    assert filter_logits(torch.tensor(rows), top_k, top_p).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=9), st.integers(1, 9))
def test_ties_with_the_kth_survive(row: list[int], top_k: int) -> None:
    logits = torch.tensor(row).float()
    kept = filter_logits(logits, top_k, 0.0)
    kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
    assert kept.isfinite().tolist() == [value >= kth for value in row]
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])


def test_more_than_k_can_remain() -> None:
    assert filter_logits(torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0]), 2, 0.0).tolist() == [2.0, 1.0, 1.0, 1.0, INFINITELY_UNLIKELY]
    assert filter_logits(torch.tensor([1.0, 1.0]), 1, 0.0).tolist() == [1.0, 1.0]


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=9), st.integers(0, 9), st.floats(0, 1))
def test_the_likeliest_is_never_dropped(row: list[float], top_k: int, top_p: float) -> None:
    kept = filter_logits(torch.tensor(row), top_k, top_p)
    assert kept.max() == max(row)
    assert set(kept.tolist()) <= {*torch.tensor(row).tolist(), INFINITELY_UNLIKELY}


def test_top_p_by_hand() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.85, 3), (0.97, 4), (1.0, 4), (0.0, 4)):
        assert filter_logits(shares.log(), 0, top_p).isfinite().sum() == kept, top_p


def test_top_p_looks_at_what_top_k_left() -> None:
    """Half of the probability takes two codes; after top-k the first alone makes up 0.40 / 0.72 of what is left."""
    logits = torch.tensor([0.40, 0.32, 0.28]).log()
    assert filter_logits(logits, 0, 0.5).isfinite().tolist() == [True, True, False]
    assert filter_logits(logits, 2, 0.5).isfinite().tolist() == [True, False, False]


def test_a_bit_of_at_most_three_percent_is_removed() -> None:
    def logits(unlikely: float) -> Tensor:
        return torch.tensor([1 - unlikely, unlikely]).log()

    assert filter_logits(logits(0.029), 900, 0.97).isfinite().tolist() == [True, False]
    assert filter_logits(logits(0.031), 900, 0.97).isfinite().tolist() == [True, True]


def test_filters_leave_their_input_alone() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    filter_logits(logits, 2, 0.5)
    assert logits.tolist() == [3.0, 2.0, 1.0]
    assert filter_logits(logits, 0, 0.0) is logits


# --- draws

DRAWN_SHAPES = [(1, 1, 2), (1, 1, 100), (1, 5, 100), (3, 7, 100), (2, 16, 100), (1, 6, 32, 2), (2, 9, 56, 2), (4, 1, 3, 2), (1, 169, 4096)]


@pytest.mark.parametrize("shape", DRAWN_SHAPES)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.0), (20, 0.9)])
def test_draw_equals_multinomial_from_the_same_generator_state(shape: tuple[int, ...], top_k: int, top_p: float) -> None:
    logits = filter_logits(3 * torch.randn(shape, generator=torch.Generator().manual_seed(1)), top_k, top_p)
    ours, theirs = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    for _ in range(3):  # the generator is left in the same state as well
        drawn = sample(logits, SharedRng(ours).exponential(shape, CPU))
        expected = torch.multinomial(logits.softmax(-1).view(-1, shape[-1]), 1, generator=theirs).view(shape[:-1])
        assert torch.equal(drawn, expected)


def test_large_logits_do_not_overflow() -> None:
    """Only differences count: here 0 against 0.5, far beyond what exp can take."""
    logits = torch.tensor([1000.0, 1000.5]).expand(1, 500, 2)
    noise = SharedRng(torch.Generator().manual_seed(9)).exponential(logits.shape, CPU)
    drawn = sample(logits, noise)
    assert torch.equal(drawn, sample(logits - 1000, noise))
    assert 0 < drawn.sum() < 500


@pytest.mark.parametrize("shape", [(3, 7, 100), (3, 9, 56, 2)])
def test_images_with_their_own_seeds_equal_multinomial_image_by_image(shape: tuple[int, ...]) -> None:
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    seeds = (4, 0, 123456789)
    draws, generators = ImageRng(seeds, CPU), [torch.Generator().manual_seed(seed) for seed in seeds]
    for _ in range(2):
        for drawn, image, generator in zip(sample(logits, draws.exponential(logits.shape, CPU)), logits, generators, strict=True):
            assert torch.equal(drawn, torch.multinomial(image.softmax(-1).view(-1, shape[-1]), 1, generator=generator).view(shape[1:-1]))


DISTRIBUTIONS = ("exponential", "uniform", "normal")


@settings(deadline=None, max_examples=30)
@given(
    seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=4),
    calls=st.lists(st.tuples(st.sampled_from(DISTRIBUTIONS), st.lists(st.integers(1, 9), min_size=1, max_size=3)), min_size=1, max_size=3),
)
def test_an_image_does_not_depend_on_its_neighbors(seeds: list[int], calls: list[tuple[str, list[int]]]) -> None:
    together = ImageRng(seeds, CPU)
    alone = [ImageRng([seed], CPU) for seed in seeds]
    for distribution, shape in calls:
        noise = getattr(together, distribution)((len(seeds), *shape), CPU)
        for image, own in zip(noise, alone, strict=True):
            assert torch.equal(image, getattr(own, distribution)((1, *shape), CPU)[0])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_number_of_generators_is_the_number_of_images(distribution: str) -> None:
    with pytest.raises(ValueError, match="shorter|longer"):
        getattr(ImageRng([1, 2], CPU), distribution)((3, 4), CPU)


@pytest.mark.parametrize("draws", [ImageRng([3], CPU), SharedRng(torch.Generator().manual_seed(3))], ids=["per image", "shared"])
def test_numbers_are_distributed_as_their_name_says(draws: Rng) -> None:
    """Mean, standard deviation and range of 40000 numbers: means within five standard errors."""
    shape, standard_error = (1, 200, 200), 1 / 200
    exponential, uniform, normal = (getattr(draws, distribution)(shape, CPU) for distribution in DISTRIBUTIONS)
    assert exponential.min() >= 0
    assert 0 <= uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    assert normal.min() < -3 < 3 < normal.max()
    for noise, mean, deviation in ((exponential, 1, 1), (uniform, 0.5, 12**-0.5), (normal, 0, 1)):
        assert abs(noise.mean().item() - mean) < 5 * standard_error * deviation
        assert noise.std().item() == pytest.approx(deviation, rel=0.05)


def test_one_stream_gives_what_torch_would_give() -> None:
    shape = (2, 3, 50)
    ours, theirs = SharedRng(torch.Generator().manual_seed(9)), torch.Generator().manual_seed(9)
    for _ in range(2):
        assert torch.equal(ours.uniform(shape, CPU), torch.rand(shape, generator=theirs))
        assert torch.equal(ours.normal(shape, CPU), torch.randn(shape, generator=theirs))


@pytest.mark.parametrize("channels", [(), (4,), (3, 2)])
def test_noise_belongs_to_the_cells_of_a_stage(channels: tuple[int, ...]) -> None:
    stage, seeds = STAGES[2], [1, 2]
    everywhere = ImageRng(seeds, CPU).normal((2, stage.cells, *channels), CPU)
    dense = cell_noise(ImageRng(seeds, CPU).normal, Tokens(stage), everywhere.shape, CPU)
    assert torch.equal(dense, everywhere)
    some = Tokens(stage, torch.tensor([[4, 0, 1], [2, 5, 5]]), torch.tensor([3, 2]))
    taken = cell_noise(ImageRng(seeds, CPU).normal, some, (2, 3, *channels), CPU)
    assert torch.equal(taken, torch.stack([everywhere[0, [4, 0, 1]], everywhere[1, [2, 5, 5]]]))


def test_frequencies_follow_the_softmax() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    times = 40_000
    noise = SharedRng(torch.Generator().manual_seed(0)).exponential((1, times, 4), CPU)
    counts = sample(shares.log().expand(1, times, 4), noise).flatten().bincount(minlength=4)
    five_sigma = 5 * (times * shares * (1 - shares)).sqrt()
    assert ((counts - times * shares).abs() < five_sigma).all()
    assert not ((counts - times * shares.flip(0)).abs() < five_sigma).any()


def test_what_was_filtered_is_never_drawn() -> None:
    logits = filter_logits(torch.tensor([1.0, 0.9, 0.8, 0.7]), 2, 0.0).expand(2, 2000, 4)
    assert set(sample(logits, ImageRng([1, 2], CPU).exponential(logits.shape, CPU)).flatten().tolist()) == {0, 1}


# --- smoothing


@pytest.mark.parametrize(("progress", "tau"), [(0.0, 0.27), (0.5, 0.14175), (1.0, 0.0135)])
def test_smoothing_sharpens_with_progress(progress: float, tau: float) -> None:
    logits = torch.tensor([[0.1, 0.0, -0.05]])
    mixture = gumbel_softmax(logits, torch.ones(1, 3), progress)  # noise 1 is a Gumbel term of 0
    assert torch.allclose(mixture, (logits * (1 + progress) / tau).softmax(-1), atol=1e-6)


def test_smoothing_adds_minus_log_of_the_noise() -> None:
    noise = torch.tensor([[math.exp(-0.5), 1.0, math.exp(0.25)]])
    mixture = gumbel_softmax(torch.zeros(1, 3), noise, 0.0)
    assert torch.allclose(mixture, (torch.tensor([[0.5, 0.0, -0.25]]) / 0.27).softmax(-1), atol=1e-6)


def test_tau_has_a_floor() -> None:
    """0.27 * (1 - 0.95 * 1.05) is below 0.005; stages never get there, but the published formula says so."""
    mixture = gumbel_softmax(torch.tensor([[0.001, 0.0]]), torch.ones(1, 2), 1.05)
    assert torch.allclose(mixture, torch.tensor([[0.001 * 2.05 / 0.005, 0.0]]).softmax(-1), atol=1e-5)


def test_smoothing_draws_first_and_mixes_what_the_filters_left() -> None:
    logits = torch.tensor([[[1.0, 0.5, 0.0]]])
    first, second = torch.tensor([[[4.0, 0.1, 1.0]]]), torch.tensor([[[1.0, 2.0, 1.0]]])
    ids, mixture = choose(logits, Tokens(SECOND_OF_ONE_CELL), len(STAGES), Sampling(top_k=2, smooth=True), ScriptedDraws(first, second))
    assert ids.tolist() == [[1]]  # the small noise at 1 outweighs
    kept = torch.tensor([[[1.0, 0.5, INFINITELY_UNLIKELY]]])
    assert torch.equal(mixture, gumbel_softmax(kept, second, 1 / 2))
    assert mixture[0, 0, 2] == 0
    assert mixture.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("stages", [2, 4, 14])
def test_progress_is_the_place_of_a_stage_and_hart_repeats_it_at_the_last(stages: int) -> None:
    schedule, last = Schedule((1,) * stages), stages - 1
    assert [Sampling().progress(stage, stages) for stage in schedule] == [stage.index / last for stage in schedule]
    repeated = [Sampling(last_repeats=True).progress(stage, stages) for stage in schedule]
    assert repeated == [*(index / last for index in range(last)), (last - 1) / last]


@pytest.mark.parametrize("last_repeats", [False, True])
def test_a_single_stage_has_made_no_progress(last_repeats: bool) -> None:
    assert Sampling(last_repeats=last_repeats).progress(Schedule((1,))[0], 1) == 0


def test_hart_repeats_the_temperature_of_its_smoothing() -> None:
    """Of its 14 stages, the last two are both smoothed with 12 / 13: tau 0.27 * (1 - 0.95 * 12 / 13)."""
    sampling, schedule = MODELS["hart-0.7b"].settings.sampling, Schedule(HART_1024)
    progress = [sampling.progress(stage, 14) for stage in schedule]
    assert progress == [*(index / 13 for index in range(13)), 12 / 13]
    assert max(0.27 * (1 - 0.95 * progress[-1]), 0.005) == pytest.approx(0.033231, abs=1e-6)


# --- choosing


def test_greedy_takes_the_likeliest_and_no_random_numbers() -> None:
    logits = torch.tensor([[[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]]])
    ids, codes = choose(logits, Tokens(STAGES[1]), len(STAGES), Sampling(greedy=True, top_k=2, top_p=0.5), NoDraws())
    assert ids.tolist() == [[1, 0]]
    assert codes is ids


def test_a_draw_tells_what_it_was_drawn_from() -> None:
    logits = torch.tensor([[[0.0, 3.0, 1.0]]])
    for sampling, expected in ((Sampling(top_k=2), 2), (Sampling(top_k=2, greedy=True), 1)):
        drawn, kept = sample_codes(logits, Tokens(STAGES[0]), sampling, ScriptedDraws(torch.tensor([[[1e-6, 1.0, 1e-6]]])))
        assert drawn.item() == expected
        assert kept.tolist() == [[[INFINITELY_UNLIKELY, 3.0, 1.0]]]
    sample_codes(logits, Tokens(STAGES[0]), Sampling(greedy=True), NoDraws())


def test_forced_greedy_stages_still_use_up_their_random_numbers() -> None:
    """As the reference implementations do: otherwise the later stages of a seed would change."""
    sampling = Sampling(top_k=900, widest_sampled=1)
    assert sampling.top_k_at(STAGES[0]) == 900
    assert sampling.top_k_at(STAGES[1]) == 1
    logits, noise = torch.tensor([0.0, 1.0]).expand(1, 4, 2), torch.tensor([1e-6, 1e6]).expand(1, 4, 2)
    ids, _ = choose(logits, Tokens(STAGES[1]), 3, sampling, ScriptedDraws(noise))
    assert ids.tolist() == [[1] * 4]
    with pytest.raises(AssertionError, match="random numbers"):
        choose(logits, Tokens(STAGES[1]), 3, sampling, NoDraws())


def test_choose_filters_before_it_draws() -> None:
    """The noise favors the unlikely code so strongly that only a filter keeps it away."""
    logits, noise = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1e-6, 1e6]]])
    for sampling, expected in ((Sampling(), 0), (Sampling(top_k=1), 1), (Sampling(top_p=0.5), 1), (Sampling(top_k=2, top_p=0.99), 0)):
        ids, codes = choose(logits, Tokens(STAGES[0]), 1, sampling, ScriptedDraws(noise))
        assert ids.item() == expected, sampling
        assert codes is ids


def test_a_cell_draws_the_same_whichever_others_are_run() -> None:
    """Noise belongs to cells: kept tokens draw what they draw in the dense case, and padding what the token it repeats draws."""
    stage = STAGES[1]
    logits = torch.randn(2, stage.cells, 50, generator=torch.Generator().manual_seed(0))
    everywhere, _ = choose(logits, Tokens(stage), 3, Sampling(), ImageRng([1, 2], CPU))
    kept = Tokens(stage, torch.tensor([[1, 3, 3], [0, 1, 2]]), torch.tensor([2, 3]))
    some, _ = choose(kept.gather(logits), kept, 3, Sampling(), ImageRng([1, 2], CPU))
    assert torch.equal(some, everywhere.gather(1, kept.index))


# --- settings


def test_temperature_divides_the_logits_of_its_stage() -> None:
    logits = torch.tensor([[[2.0, -4.0]]])
    per_stage = Sampling(temperature=(0.5, 1.0, 4.0))
    assert [per_stage.prepare(logits, stage).tolist() for stage in STAGES] == [[[[4.0, -8.0]]], [[[2.0, -4.0]]], [[[0.5, -1.0]]]]
    assert [Sampling(temperature=2).prepare(logits, stage).tolist() for stage in STAGES] == [[[[1.0, -2.0]]]] * 3
    assert logits.tolist() == [[[2.0, -4.0]]]


def test_temperatures_may_be_more_than_the_stages_but_not_fewer() -> None:
    Sampling(temperature=(1.0,) * 4).check(STAGES)
    Sampling(temperature=2.0).check(STAGES)
    with pytest.raises(SettingError, match=r"temperature must be .* stage \(3\); got 2 values"):
        Sampling(temperature=(1.0, 1.0)).check(STAGES)


def test_every_stage_may_have_its_own_top_k() -> None:
    per_stage = Sampling(top_k=(3, 0, 7))
    assert [per_stage.top_k_at(stage) for stage in STAGES] == [3, 0, 7]
    assert [Sampling(top_k=5).top_k_at(stage) for stage in STAGES] == [5, 5, 5]
    assert Sampling(top_k=(3, 4, 7), widest_sampled=1).top_k_at(STAGES[1]) == 1
    assert Sampling().changed(top_k=[3, 0, 7]) == per_stage
    Sampling(top_k=(1,) * 4).check(STAGES)
    with pytest.raises(SettingError, match=r"top_k must be .* stage \(3\); got 2 values"):
        Sampling(top_k=(1, 1)).check(STAGES)


def test_forbidden_codes_get_minus_one_hundred() -> None:
    logits = torch.tensor([[[5.0, 4.0, 3.0]]])
    assert Sampling(suppressed_codes=(0, 2)).prepare(logits, STAGES[0]).tolist() == [[[-100.0, 4.0, -100.0]]]
    assert Sampling(suppressed_codes=(0,), temperature=0.5).prepare(logits, STAGES[0]).tolist() == [[[-100.0, 8.0, 6.0]]]
    assert logits.tolist() == [[[5.0, 4.0, 3.0]]]


FLEXVAR_DRAWN = {1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 23, 24, 32}


def test_flexvar_draws_only_at_the_sides_it_was_trained_for() -> None:
    sampling = FLEXVAR_SETTINGS.sampling
    for side in range(1, 40):
        drawn = side in FLEXVAR_DRAWN and side <= 16
        assert sampling.top_k_at(square(side)) == (900 if drawn else 1), side
        wider = sampling.changed(widest_sampled=None)
        assert wider.top_k_at(square(side)) == (900 if side in FLEXVAR_DRAWN else 1), side


@pytest.mark.parametrize(
    ("sides", "greedy"),
    [
        (FLEXVAR_512, {7, 9, 12, 14, 23, 32}),
        (FLEXVAR_STEPS[10], set()),
        (FLEXVAR_STEPS[13], {7, 9, 12, 14}),
        (FLEXVAR_STEPS[11], {7, 9, 11}),
    ],
)
def test_greedy_sides_of_flexvars_schedules(sides: tuple[int, ...], greedy: set[int]) -> None:
    assert {stage.height for stage in Schedule(sides) if FLEXVAR_SETTINGS.sampling.top_k_at(stage) == 1} == greedy


def test_both_sides_of_a_stage_count() -> None:
    sampling = Sampling(top_k=5, sampled_sides=frozenset({2, 3}), widest_sampled=3)
    assert sampling.top_k_at(Stage(1, 2, 3, 1, False)) == 5
    assert sampling.top_k_at(Stage(1, 2, 4, 1, False)) == 1
    assert sampling.top_k_at(Stage(1, 1, 3, 1, False)) == 1
    for stage in (Stage(1, 2, 4, 1, False), Stage(1, 4, 2, 1, False)):
        assert Sampling(top_k=5, widest_sampled=3).top_k_at(stage) == 1
        assert Sampling(top_k=5, widest_sampled=4).top_k_at(stage) == 5


def test_published_settings() -> None:
    assert MODELS["var-d30"].settings.sampling == Sampling(top_k=900, top_p=0.95)
    assert MODELS["infinity-2b"].settings.sampling == Sampling(top_k=900, top_p=0.97, temperature=0.5)
    assert MODELS["infinity-8b"].settings.sampling == Sampling(top_k=900, top_p=0.97, temperature=1.0)
    assert MODELS["hart-0.7b"].settings.sampling == Sampling(top_k=(600,) * 7 + (300,) * 7, smooth=True, last_repeats=True)
    for name in ("star-256-d16", "star-256", "star-512", "star-1024"):
        assert MODELS[name].settings.sampling == Sampling(top_k=600, top_p=0.8)
    assert MODELS["star-1024-sampler"].settings.sampling == Sampling(top_k=600, top_p=0.8, refine=Refinement())


def test_settings_left_out_keep_their_values() -> None:
    changed = Sampling(top_k=900, top_p=0.95).changed(top_p=0.5, temperature=[1.0, 2.0])
    assert changed == Sampling(top_k=900, top_p=0.5, temperature=(1.0, 2.0))


def test_greedy_alone_turns_a_published_smoothing_off() -> None:
    published = Sampling(smooth=True, top_k=5)
    assert published.changed(greedy=True) == Sampling(greedy=True, top_k=5)
    assert published.changed(greedy=False) == published
    with pytest.raises(SettingError, match="Choose one of them"):
        published.changed(greedy=True, smooth=True)


def test_unknown_settings_are_named_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"unknown setting beam, topk;.*temperature, top_k, top_p"):
        Sampling().changed(topk=5, beam=2, top_p=0.5)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"top_k": -1}, "top_k"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": (1.0, 0.0)}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"greedy": True, "smooth": True}, "smooth"),
        ({"top_k": (5, -1)}, "top_k"),
    ],
)
def test_values_out_of_range_are_refused(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        Sampling(**bad)
    with pytest.raises(SettingError, match=named):
        Sampling().changed(**bad)


@pytest.mark.parametrize(
    "bad", [{"top_k": 1.5}, {"top_k": (3, 1.5)}, {"top_p": "0.9"}, {"temperature": None}, {"temperature": "hot"}, {"suppressed_codes": 3}]
)
def test_values_of_another_type_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        Sampling(**bad)


# --- refinement


def test_the_published_refinement() -> None:
    """Eight rounds at stages 9 to 12, the first five drafted by the main model; fifteen at stage 13, none drafted."""
    stages = Schedule(HART_1024).stages[9:]
    assert [Refinement().at(stage) for stage in stages] == [(8, 5)] * 4 + [(15, 0)]
    assert (Refinement().first_stage, Refinement().random) == (9, 5)


def test_later_stages_repeat_the_last_entry() -> None:
    refinement = Refinement(first_stage=1, rounds=(3, 7), drafted=(2, 0))
    assert [refinement.at(stage) for stage in Schedule((1,) * 6).stages[1:]] == [(3, 2)] + [(7, 0)] * 4


@pytest.mark.parametrize(
    "bad",
    [
        {"rounds": (), "drafted": ()},
        {"rounds": (3,), "drafted": (1, 1)},
        {"rounds": (3, 0), "drafted": (1, 1)},
        {"rounds": (3,), "drafted": (-1,)},
        {"first_stage": -1},
        {"random": -1},
    ],
    ids=str,
)
def test_impossible_refinements_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="refine must be"):
        Refinement(**bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"smooth": "no"},
        {"greedy": 1},
        {"last_repeats": "x"},
        {"top_k": True},
        {"sampled_sides": 3},
        {"sampled_sides": ["a"]},
        {"widest_sampled": "a"},
    ],
    ids=str,
)
def test_settings_of_the_wrong_kind_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        Sampling(**settings)


def test_sampled_sides_may_be_a_list() -> None:
    assert Sampling(sampled_sides=[1, 2]).sampled_sides == frozenset({1, 2})


@pytest.mark.parametrize("settings", [{"rounds": 8, "drafted": 5}, {"first_stage": 1.5}, {"rounds": (4.5,), "drafted": (0,)}], ids=str)
def test_refinements_of_the_wrong_kind_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="refine"):
        Refinement(**settings)
