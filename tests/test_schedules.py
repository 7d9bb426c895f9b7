"""Which schedules the models offer, and how a size or an aspect ratio picks one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextscale.errors import SizeError
from nextscale.loading.presets import FLEXVAR_SETTINGS, MODELS, build_model, build_tokenizer
from nextscale.models.rope import grid_positions
from nextscale.schedules import (
    BUDGETS,
    BUDGETS_BY_STRIDE,
    FLEXVAR_512,
    FLEXVAR_STEPS,
    HART_1024,
    INFINITY_SIZES,
    LARGER_BUDGETS,
    VAR_256,
    VAR_512,
    InfinitySchedules,
    SquareSchedules,
    parse_aspect,
    parse_size,
)
from nextscale.stage import Schedule
from tests.helpers.tiny import infinity_schedule

PUBLISHED = json.loads((Path(__file__).parent / "data" / "infinity_schedules.json").read_text())
TEMPLATES: list[float] = PUBLISHED["templates_in_order"]
ENTRIES = [(template, budget) for template in TEMPLATES for budget in PUBLISHED["table"][str(template)]]


def published(template: float, budget: str) -> dict[str, Any]:
    return PUBLISHED["table"][str(template)][budget]


def published_sizes(template: float, budget: str) -> tuple[tuple[int, int], ...]:
    return tuple((height, width) for _, height, width in published(template, budget)["scales"])


# --- Infinity


def test_the_published_table_is_complete() -> None:
    assert len(ENTRIES) == 15 * 4
    assert {budget for _, budget in ENTRIES} == set(BUDGETS) == {"0.06M", "0.25M", "0.60M", "1M"}


@pytest.mark.parametrize(("template", "budget"), ENTRIES)
def test_every_entry_equals_the_published_one(template: float, budget: str) -> None:
    entry = published(template, budget)
    schedule = InfinitySchedules().choose(budget, template)
    assert schedule.sizes == published_sizes(template, budget)
    assert schedule.tokens == entry["tokens"]
    assert [16 * side for side in schedule.grid] == entry["pixel"]
    assert schedule.extent == published_sizes(template, "1M")[-1]
    assert schedule == infinity_schedule(template, budget)


@pytest.mark.parametrize(("template", "budget"), ENTRIES)
def test_a_size_in_pixels_finds_its_entry_whatever_the_budget(template: float, budget: str) -> None:
    height, width = published(template, budget)["pixel"]
    for book in (InfinitySchedules(), InfinitySchedules("0.06M")):
        assert book.choose((height, width), None) == infinity_schedule(template, budget)


def test_offers_are_the_published_sizes_two_larger_ones_per_aspect_ratio_and_four_of_fastvar() -> None:
    larger = [infinity_schedule(template, budget).grid for template in INFINITY_SIZES for budget in LARGER_BUDGETS]
    published_sizes = [tuple(published(*entry)["pixel"]) for entry in ENTRIES]
    larger += [(120, 60), (60, 120), (84, 63), (63, 84)]
    assert sorted(InfinitySchedules().offers()) == sorted([*published_sizes, *((16 * height, 16 * width) for height, width in larger)])


def test_fastvars_2k_continues_its_template() -> None:
    assert InfinitySchedules().choose((1920, 960), None).sizes[-2:] == ((90, 45), (120, 60))
    assert InfinitySchedules().choose((1008, 1344), None).sizes[-2:] == ((54, 72), (63, 84))
    assert InfinitySchedules().choose("1.8M", 1.0).grid == (84, 84)


@pytest.mark.parametrize(("budget", "stages", "grid"), [("1.8M", 14, (84, 84)), ("4M", 15, (128, 128))])
def test_larger_images_append_stages_and_extend_the_positions(budget: str, stages: int, grid: tuple[int, int]) -> None:
    trained, larger = InfinitySchedules().choose("1M", None), InfinitySchedules().choose(budget, None)
    assert larger.sizes[:13] == trained.sizes
    assert (len(larger), larger.grid, larger.extent) == (stages, grid, grid)
    assert InfinitySchedules().choose((16 * grid[0], 16 * grid[1]), None) == larger
    assert max(grid_positions(larger[12], larger.extent)[0]).item() == round(63 * grid[0] / 64)


@pytest.mark.parametrize("template", INFINITY_SIZES)
@pytest.mark.parametrize("budget", LARGER_BUDGETS)
def test_larger_images_keep_their_aspect_ratio_and_budget(template: float, budget: str) -> None:
    schedule = infinity_schedule(template, budget)
    (height, width), (trained_height, trained_width) = schedule.grid, INFINITY_SIZES[template][-1]
    assert abs(height / width - trained_height / trained_width) < 0.02 * trained_height / trained_width
    assert abs(256 * height * width / 1e6 - {"1.8M": 1.8, "4M": 4.2}[budget]) < 0.25


def test_the_square_megapixel_is_the_default() -> None:
    schedule = InfinitySchedules().choose(None, None)
    assert [height for height, _ in schedule.sizes] == [1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64]
    assert schedule.tokens == 10521
    assert InfinitySchedules("0.25M").choose(None, None).grid == (32, 32)
    assert InfinitySchedules("0.25M").choose("0.06M", None).grid == (16, 16)
    assert InfinitySchedules().choose(1024, None) == schedule


@settings(deadline=None)
@given(st.floats(1 / 3, 3))
def test_an_aspect_ratio_takes_the_nearest_template(ratio: float) -> None:
    distances = [abs(template - ratio) for template in TEMPLATES]
    nearest = TEMPLATES[distances.index(min(distances))]  # the first wins a tie
    assert InfinitySchedules().choose("0.06M", ratio) == infinity_schedule(nearest, "0.06M")


@pytest.mark.parametrize(
    ("ratio", "first", "second"),
    [(1.125, 1.0, 1.25), (1.625, 1.5, 1.75), (1.875, 1.75, 2.0), (2.25, 2.0, 2.5), (2.75, 2.5, 3.0), (0.9, 1.0, 0.8), (0.775, 0.8, 0.75)],
)
def test_a_tie_goes_to_the_template_published_first(ratio: float, first: float, second: float) -> None:
    """Above 1 that is the smaller ratio, below 1 the larger one."""
    assert abs(first - ratio) == abs(second - ratio)  # to the last bit
    assert TEMPLATES.index(first) < TEMPLATES.index(second)
    assert InfinitySchedules().choose("1M", ratio) == infinity_schedule(first, "1M")


@pytest.mark.parametrize(
    ("aspect", "template"),
    [("16:9", 0.571), ("9:16", 1.75), ("1:1", 1.0), ("4:3", 0.75), ("3:4", 1.333), ("2:3", 1.5), ("3:1", 0.333), ("1:3", 3.0), ("2", 2.0)],
)
def test_aspect_strings_are_width_to_height(aspect: str, template: float) -> None:
    assert InfinitySchedules().choose("1M", aspect) == infinity_schedule(template, "1M")


@pytest.mark.parametrize("aspect", [3.5, 0.28, "4:1", "1:4"])
def test_ratios_far_from_all_templates_are_refused_with_all_others(aspect: float | str) -> None:
    with pytest.raises(SizeError, match=f"one of 3:1, 5:2, .*, 1:1, 1:3, .* got {aspect!r}"):
        InfinitySchedules().choose("1M", aspect)


def test_an_unknown_budget_names_the_known_ones() -> None:
    with pytest.raises(SizeError, match=r"0.06M, 0.25M, 0.60M, 1M.*'2M'"):
        InfinitySchedules().choose("2M", None)
    with pytest.raises(SizeError, match=r"one of 0.02M, 0.06M, 0.15M, 0.25M; got '1M'"):
        InfinitySchedules("0.06M", pixels_per_token=8).choose("1M", None)


@pytest.mark.parametrize(("stride", "budget"), [(stride, budget) for stride, known in BUDGETS_BY_STRIDE.items() for budget in known])
def test_a_budget_tells_the_pixels_of_the_image_whatever_the_stride(stride: int, budget: str) -> None:
    height, width = InfinitySchedules(budget, stride).choose(None, None).grid
    named = float(budget.removesuffix("M"))
    assert 0.8 < stride * height * stride * width / 1e6 / named < 1.25


def test_a_smaller_stride_draws_smaller_images_with_the_same_stages() -> None:
    fine, coarse = InfinitySchedules("0.25M", pixels_per_token=8), InfinitySchedules()
    assert fine.choose(512, None) == fine.choose(None, None) == coarse.choose(1024, None)
    assert fine.choose("0.06M", "16:9") == coarse.choose("0.25M", "16:9")
    assert fine.offers() == [
        (height // 2, width // 2)
        for height, width in coarse.offers()
        if (height, width) in {tuple(published(*entry)["pixel"]) for entry in ENTRIES}
    ]


@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if isinstance(spec.settings.schedules, InfinitySchedules)])
def test_the_stride_of_the_sizes_is_the_tokenizer_s(name: str) -> None:
    spec = MODELS[name]
    with torch.device("meta"):
        assert build_tokenizer(spec.tokenizer).pixels_per_token == spec.settings.schedules.pixels_per_token


def test_an_unknown_size_names_the_nearest() -> None:
    with pytest.raises(SizeError, match=r"1000x1000.*Nearest: 1024x1024,"):
        InfinitySchedules().choose((1000, 1000), None)
    with pytest.raises(SizeError, match=r"260x320.*Nearest: 256x320,"):
        InfinitySchedules().choose((320, 260), None)


def test_height_comes_before_width() -> None:
    tall = published(1.25, "1M")["pixel"]
    assert tall == [1120, 896]
    assert InfinitySchedules().choose((1120, 896), None).grid == (70, 56)
    assert InfinitySchedules().choose((896, 1120), None).grid == (56, 70)


def test_size_and_aspect_together_contradict() -> None:
    with pytest.raises(SizeError, match="aspect"):
        InfinitySchedules().choose((1024, 1024), "1:1")


# --- square schedules


def test_the_published_square_schedules() -> None:
    assert VAR_256 == (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
    assert sum(side * side for side in VAR_256) == 680
    assert VAR_512 == (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
    assert sum(side * side for side in VAR_512) == 2240
    assert FLEXVAR_512 == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 23, 32)
    assert FLEXVAR_STEPS == {
        6: (1, 2, 4, 6, 10, 16),
        8: (1, 2, 3, 5, 7, 10, 13, 16),
        9: (1, 2, 3, 4, 5, 7, 10, 13, 16),
        10: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
        11: (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 16),
        12: (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
        13: (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16),
        14: (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16),
    }
    assert all(len(sides) == steps for steps, sides in FLEXVAR_STEPS.items())
    assert HART_1024 == (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64)
    assert sum(side * side for side in HART_1024) == 9451


def test_hart_keeps_its_text_before_the_image() -> None:
    """The specification's lengths of the cache after every stage, for 300 tokens of text."""
    spec = MODELS["hart-0.7b"]
    with torch.device("meta"):
        model = build_model(spec.model)
    schedule = spec.settings.schedules.choose(None, None)
    assert schedule == Schedule(HART_1024)
    cached = [model.text_prefix + stage.start + stage.cells for stage in schedule]
    assert cached == [300, 304, 313, 329, 354, 403, 484, 628, 884, 1325, 2054, 3350, 5654, 9750]
    sizes = model.cache_spec(schedule, rows=2)
    assert (sizes.tokens, sizes.room(rows=0)) == (9750, 5654)


@pytest.mark.parametrize("name", ["var-d16", "var-d20", "var-d24", "var-d30", "var-d36"])
def test_var_offers_the_one_size_it_was_trained_for(name: str) -> None:
    book = MODELS[name].settings.schedules
    sides, other = (VAR_512, 256) if name == "var-d36" else (VAR_256, 512)
    assert book.choose(None, None) == Schedule(sides)
    assert book.offers() == [(16 * sides[-1],) * 2]
    with pytest.raises(SizeError, match=f"{other}x{other}.*Nearest: {16 * sides[-1]}x{16 * sides[-1]}"):
        book.choose(other, None)


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("hart-0.7b", HART_1024),
        ("star-256-d16", VAR_256),
        ("star-256", VAR_256),
        ("star-512", VAR_512),
        ("star-1024", HART_1024),
        ("star-1024-sampler", HART_1024),
    ],
)
def test_hart_and_star_offer_the_one_size_they_were_trained_for(name: str, sides: tuple[int, ...]) -> None:
    book, side = MODELS[name].settings.schedules, 16 * sides[-1]
    assert book.choose(None, None) == book.choose(side, None) == Schedule(sides)
    assert book.offers() == [(side, side)]
    with pytest.raises(SizeError, match=f"Nearest: {side}x{side}"):
        book.choose(side - 16, None)


def test_flexvar_draws_256_and_512() -> None:
    book = FLEXVAR_SETTINGS.schedules
    assert book.choose(None, None) == Schedule(VAR_256)
    assert book.choose(256, None) == Schedule(VAR_256)
    assert book.choose((512, 512), "1:1") == Schedule(FLEXVAR_512)
    with pytest.raises(SizeError, match="Nearest: 256x256, 512x512"):
        book.choose(300, None)


def test_square_models_refuse_other_aspects_and_budgets() -> None:
    book = SquareSchedules((VAR_256,))
    with pytest.raises(SizeError, match="square"):
        book.choose(None, "16:9")
    with pytest.raises(SizeError, match="256x256"):
        book.choose((256, 512), None)
    with pytest.raises(SizeError, match="has no pixel budgets"):
        book.choose("1M", None)


@pytest.mark.parametrize("book", [InfinitySchedules(), SquareSchedules((VAR_256,))])
def test_a_schedule_is_taken_as_it_is(book: InfinitySchedules | SquareSchedules) -> None:
    own = Schedule((1, (3, 2)))
    assert book.choose(own, None) is own


# --- reading sizes and aspects


@pytest.mark.parametrize(("aspect", "ratio"), [("16:9", 9 / 16), ("1:2", 2.0), (0.75, 0.75), ("0.75", 0.75), (2, 2.0), ("1.5:1", 1 / 1.5)])
def test_aspects_become_height_over_width(aspect: float | str, ratio: float) -> None:
    assert parse_aspect(aspect) == ratio


@pytest.mark.parametrize(
    "aspect", ["", "wide", ":", "16:", "16:9:1", "0:9", "16:0", "-16:9", 0, -1.5, "inf", "nan", float("inf"), float("nan"), "1:inf"]
)
def test_impossible_aspects_are_refused(aspect: float | str) -> None:
    with pytest.raises(SizeError, match="W:H"):
        parse_aspect(aspect)


def test_two_negative_sides_are_no_aspect() -> None:
    with pytest.raises(SizeError):
        parse_aspect("-16:-9")


@pytest.mark.parametrize(("size", "aspect"), [(None, (16, 9)), (None, [1.0]), (256.0, None)])
def test_values_of_other_types_are_refused_in_words(size: Any, aspect: Any) -> None:
    with pytest.raises(SizeError):
        InfinitySchedules().choose(size, aspect)


@pytest.mark.parametrize("book", [InfinitySchedules(), SquareSchedules((VAR_256,))])
def test_a_schedule_already_fixes_the_aspect(book: InfinitySchedules | SquareSchedules) -> None:
    with pytest.raises(SizeError, match="aspect"):
        book.choose(Schedule((1, 2)), "1:1")


def test_sizes_are_pairs_of_positive_whole_numbers() -> None:
    assert parse_size(64) == (64, 64)
    assert parse_size([64, 32]) == (64, 32)
    for size in ((64,), (64, 64, 64), (64, 0), (-64, 64), (64.0, 64), ("64", 64), 0):
        with pytest.raises(SizeError, match="height, width"):
            parse_size(size)
