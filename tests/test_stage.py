"""Schedules as lists of stages, and which grid cells a token tensor stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextscale.errors import NextscaleError, SizeError
from nextscale.stage import Schedule, Stage, Tokens, repeat_tail

GRID_2X3 = Stage(index=2, height=2, width=3, start=5, last=False)


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


# --- schedules


def test_stages_follow_one_another_without_gaps() -> None:
    schedule = Schedule((1, (2, 2), (3, 2)))
    assert schedule.stages == (Stage(0, 1, 1, 0, False), Stage(1, 2, 2, 1, False), Stage(2, 3, 2, 5, True))
    assert schedule.tokens == 1 + 4 + 6
    assert schedule.sizes == ((1, 1), (2, 2), (3, 2))
    assert schedule.grid == (3, 2)
    assert [stage.index for stage in schedule] == [0, 1, 2]
    assert len(schedule) == 3
    assert schedule[-1].cells == 6


def test_positions_are_measured_on_the_last_grid_unless_an_extent_is_given() -> None:
    assert Schedule((1, (3, 2))).extent == (3, 2)
    assert Schedule((1, (3, 2)), extent=(12, 8)).extent == (12, 8)


def test_schedules_are_values() -> None:
    assert Schedule((1, 2)) == Schedule(((1, 1), [2, 2]))
    assert len({Schedule((1, 2)), Schedule((1, 2)), Schedule((1, 3)), Schedule((1, 2), extent=(4, 4))}) == 3
    assert Schedule((1, 2)) != ((1, 1), (2, 2))
    assert repr(Schedule((1, (3, 2)))) == "Schedule(1x1 3x2)"


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0), (1, (2, -1))])
def test_empty_and_non_positive_schedules_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(SizeError, match="non-empty list"):
        Schedule(sizes)


@pytest.mark.parametrize("first", [2, (1, 2), (2, 1)])
def test_a_schedule_starts_with_the_single_start_token(first: int | tuple[int, int]) -> None:
    with pytest.raises(NextscaleError, match="first stage"):
        Schedule((first, 4))


# --- tokens, by hand


def test_dense_tokens_are_the_whole_grid_and_cost_nothing() -> None:
    tokens, grid = Tokens(GRID_2X3), torch.rand(2, 6, 4)
    assert tokens.num_tokens == 6
    assert tokens.gather(grid) is grid
    assert tokens.scatter(grid, torch.zeros(2, 6, 4)) is grid
    assert tokens.rows(slice(0, 1)) is tokens


def test_take_counts_within_the_tokens_at_hand() -> None:
    corners = Tokens(GRID_2X3).take(torch.tensor([[0, 2, 3, 5], [0, 2, 3, 5]]))
    assert corners.index.tolist() == [[0, 2, 3, 5]] * 2
    assert corners.count is None
    some = corners.take(torch.tensor([[1, 2], [3, 3]]), count=torch.tensor([2, 1]))
    assert some.index.tolist() == [[2, 3], [5, 5]]
    assert some.count.tolist() == [2, 1]
    assert (some.num_tokens, some.stage) == (2, GRID_2X3)


def test_top_keeps_the_best_in_raster_order_and_repeats_the_last_kept() -> None:
    score = torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3, 0.7], [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]])
    selection, kept = Tokens(GRID_2X3).top(score, keep=torch.tensor([3, 2]), num_tokens=4)
    assert selection.tolist() == [[1, 3, 5, 5], [0, 1, 1, 1]]
    assert kept.index.tolist() == selection.tolist()
    assert kept.count.tolist() == [3, 2]


def test_rows_of_equal_length_carry_no_count() -> None:
    selection, kept = Tokens(GRID_2X3).top(row(3, 1, 2, 0, 5, 4), keep=2)
    assert selection.tolist() == kept.index.tolist() == [[4, 5]]
    assert kept.count is None
    _, padded = Tokens(GRID_2X3).top(row(3, 1, 2, 0, 5, 4), keep=torch.tensor([2]), num_tokens=3)
    assert padded.count.tolist() == [2]


def test_top_never_chooses_padding() -> None:
    ragged = Tokens(GRID_2X3, torch.tensor([[1, 4, 4, 4]]), torch.tensor([2]))
    selection, kept = ragged.top(row(1, 2, 9, 9), keep=torch.tensor([1]), num_tokens=2)
    assert selection.tolist() == [[1, 1]]
    assert kept.index.tolist() == [[4, 4]]


def test_gather_reads_and_scatter_writes_the_cells_named() -> None:
    grid = torch.arange(12.0).view(1, 6, 2)
    tokens = Tokens(GRID_2X3, torch.tensor([[4, 0]]))
    assert tokens.gather(grid).tolist() == [[[8, 9], [0, 1]]]
    written = tokens.scatter(torch.tensor([[[-1.0, -2], [-3, -4]]]), grid)
    assert written.tolist() == [[[-3, -4], [2, 3], [4, 5], [6, 7], [-1, -2], [10, 11]]]
    assert grid.tolist() == torch.arange(12.0).view(1, 6, 2).tolist()


def test_one_grid_serves_all_rows() -> None:
    tokens = Tokens(GRID_2X3, torch.tensor([[0, 1], [5, 4]]))
    assert tokens.gather(torch.arange(6.0).view(1, 6, 1)).squeeze(-1).tolist() == [[0, 1], [5, 4]]


def test_rows_cuts_index_and_count_together() -> None:
    tokens = Tokens(GRID_2X3, torch.tensor([[0, 1], [5, 5], [2, 3]]), torch.tensor([2, 1, 2]))
    upper = tokens.rows(slice(1, None))
    assert upper.index.tolist() == [[5, 5], [2, 3]]
    assert upper.count.tolist() == [1, 2]


# --- tokens, in general


@st.composite
def ragged_choices(draw: st.DrawFn) -> tuple[Stage, Tensor, Tensor, int]:
    """A stage, scores with ties for some rows, how many to keep in each, and a padded number of tokens."""
    height, width, rows = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    cells = height * width
    scores = draw(st.lists(st.lists(st.integers(-3, 3), min_size=cells, max_size=cells), min_size=rows, max_size=rows))
    keep = draw(st.lists(st.integers(1, cells), min_size=rows, max_size=rows))
    padded = draw(st.integers(max(keep), cells))
    return Stage(1, height, width, 1, False), torch.tensor(scores).float(), torch.tensor(keep), padded


@settings(deadline=None)
@given(ragged_choices())
def test_top_keeps_exactly_the_best(choice: tuple[Stage, Tensor, Tensor, int]) -> None:
    stage, score, keep, padded = choice
    selection, kept = Tokens(stage).top(score, keep, padded)
    assert selection.shape == (len(keep), padded)
    for chosen, scores, count in zip(selection.tolist(), score.tolist(), keep.tolist(), strict=True):
        real, padding = chosen[:count], chosen[count:]
        assert real == sorted(set(real))
        assert set(padding) <= {real[-1]}
        left_out = [value for cell, value in enumerate(scores) if cell not in real]
        assert not left_out or min(scores[cell] for cell in real) >= max(left_out)
    assert torch.equal(kept.count, keep)


@settings(deadline=None)
@given(ragged_choices(), st.data())
def test_a_choice_within_a_ragged_choice_is_a_choice_of_cells(choice: tuple[Stage, Tensor, Tensor, int], data: st.DataObject) -> None:
    stage, score, keep, padded = choice
    _, outer = Tokens(stage).top(score, keep, padded)
    fewer = torch.tensor([data.draw(st.integers(1, count)) for count in keep.tolist()])
    _, inner = outer.top(outer.gather(score[..., None]).squeeze(-1), fewer, int(fewer.max()))
    for cells, parents, scores, count, parent_count in zip(
        inner.index.tolist(), outer.index.tolist(), score.tolist(), fewer.tolist(), keep.tolist(), strict=True
    ):
        real = cells[:count]
        assert real == sorted(set(real))
        left_out = [scores[cell] for cell in parents[:parent_count] if cell not in real]
        assert not left_out or min(scores[cell] for cell in real) >= max(left_out)


@settings(deadline=None)
@given(ragged_choices())
def test_scatter_restores_what_gather_took(choice: tuple[Stage, Tensor, Tensor, int]) -> None:
    stage, score, keep, padded = choice
    _, kept = Tokens(stage).top(score, keep, padded)
    values = torch.rand(len(keep), stage.cells, 3)
    background = -torch.ones_like(values)
    restored = kept.scatter(kept.gather(values), background)
    present = torch.zeros(len(keep), stage.cells, dtype=torch.bool).scatter(1, kept.index, True)
    assert present.sum(dim=1).tolist() == keep.tolist()
    assert torch.equal(restored[present], values[present])
    assert torch.equal(restored[~present], background[~present])
    assert torch.equal(kept.scatter(kept.gather(values), values), values)


# --- tokens that are not on the grid

WITH_PREFIX = Tokens(GRID_2X3, torch.tensor([[4, 0], [1, 1]]), torch.tensor([2, 1]), prefix=3)


def test_a_prefix_counts_in_the_width_and_is_cut_off_at_the_front() -> None:
    assert Tokens(GRID_2X3, prefix=3).num_tokens == 3 + 6
    assert WITH_PREFIX.num_tokens == 3 + 2
    x = torch.arange(10.0).view(2, 5, 1)
    grid, tokens = WITH_PREFIX.on_grid(x)
    assert grid.squeeze(-1).tolist() == [[3, 4], [8, 9]]
    assert (tokens.prefix, tokens.num_tokens, tokens.stage) == (0, 2, GRID_2X3)
    assert torch.equal(tokens.index, WITH_PREFIX.index)
    assert torch.equal(tokens.count, WITH_PREFIX.count)
    dense = Tokens(GRID_2X3)
    assert dense.on_grid(x) == (x, dense)


def test_a_prefix_survives_where_rows_are_cut_or_repeated() -> None:
    twice, second = WITH_PREFIX.repeat(2), WITH_PREFIX.rows(slice(1, None))
    assert twice.index.tolist() == [[4, 0], [1, 1]] * 2
    assert twice.count.tolist() == [2, 1, 2, 1]
    assert (second.index.tolist(), second.count.tolist()) == ([[1, 1]], [1])
    assert twice.prefix == second.prefix == 3
    for dense in (Tokens(GRID_2X3), Tokens(GRID_2X3, prefix=3)):
        assert dense.repeat(2) is dense
        assert dense.rows(slice(1, None)) is dense
    without_count = Tokens(GRID_2X3, torch.tensor([[4, 0]])).repeat(3)
    assert (without_count.index.tolist(), without_count.count) == ([[4, 0]] * 3, None)


@pytest.mark.parametrize(
    "select",
    [
        lambda tokens: tokens.take(torch.tensor([[0], [0]])),
        lambda tokens: tokens.top(torch.rand(2, 2), 1),
        lambda tokens: tokens.gather(torch.rand(2, 6, 1)),
        lambda tokens: tokens.scatter(torch.rand(2, 2, 1), torch.rand(2, 6, 1)),
        lambda tokens: tokens.move(torch.rand(2, 2), Tokens(GRID_2X3)),
        lambda tokens: Tokens(GRID_2X3).move(torch.rand(2, 6), tokens),
    ],
    ids=["take", "top", "gather", "scatter", "move from", "move to"],
)
def test_tokens_that_are_not_on_the_grid_cannot_be_selected_among_its_cells(select: Callable[[Tokens], object]) -> None:
    with pytest.raises(ValueError, match="3 tokens of stage 2 are not on its grid"):
        select(WITH_PREFIX)
    select(WITH_PREFIX.with_prefix(0))


# --- from some tokens to others


def test_values_move_to_the_same_cells_and_are_zero_elsewhere() -> None:
    some, others = Tokens(GRID_2X3, torch.tensor([[4, 0], [1, 2]])), Tokens(GRID_2X3, torch.tensor([[0, 1, 4], [5, 1, 2]]))
    values = torch.tensor([[7, 8], [9, 6]])
    assert some.move(values, others).tolist() == [[8, 0, 7], [0, 9, 6]]
    assert some.move(values, Tokens(GRID_2X3)).tolist() == [[8, 0, 0, 0, 7, 0], [0, 9, 6, 0, 0, 0]]
    assert Tokens(GRID_2X3).move(torch.arange(6).expand(2, -1), some).tolist() == some.index.tolist()
    assert some.move(values, some) is values
    assert Tokens(GRID_2X3).move(values, Tokens(GRID_2X3)) is values


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_what_moves_may_have_any_number_of_channels(trailing: tuple[int, ...]) -> None:
    some, values = Tokens(GRID_2X3, torch.tensor([[4, 0]])), torch.rand(1, 2, *trailing)
    moved = some.move(values, Tokens(GRID_2X3, torch.tensor([[0, 3, 4]])))
    assert torch.equal(moved, torch.stack([values[:, 1], torch.zeros_like(values[:, 0]), values[:, 0]], dim=1))


@settings(deadline=None)
@given(ragged_choices())
def test_what_moves_to_the_whole_grid_moves_back(choice: tuple[Stage, Tensor, Tensor, int]) -> None:
    stage, score, keep, padded = choice
    _, kept = Tokens(stage).top(score, keep, padded)
    values = kept.gather(torch.rand(len(keep), stage.cells, 2))
    whole = kept.move(values, Tokens(stage))
    assert torch.equal(Tokens(stage).move(whole, kept), values)
    assert torch.equal((whole == 0).all(dim=-1).sum(dim=1), stage.cells - keep)


@pytest.mark.parametrize("sizes", ["1234", [1, 2.5], [(1, 1, 1)], [1, None], [1, (2, 0)], 7, []], ids=str)
def test_what_is_no_list_of_sizes_is_no_schedule(sizes: object) -> None:
    with pytest.raises(SizeError, match="a schedule must be a non-empty list"):
        Schedule(sizes)


def test_the_tail_of_a_row_repeats_its_last_real_entry() -> None:
    x = torch.arange(8.0).view(2, 4)[..., None].expand(-1, -1, 3)
    count = torch.tensor([4, 2])
    assert repeat_tail(x, count)[..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 5, 5]]
    assert repeat_tail(x[..., 0], count).tolist() == [[0, 1, 2, 3], [4, 5, 5, 5]]
    assert repeat_tail(x, None) is x
