"""Rotary positions: the published formulas element by element, and tables that follow the tokens."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor

from nextscale.models.rope import GridPlaces, InterleavedRope, Rope, RotateHalfRope, infinity_rotations, star_rotations
from nextscale.stage import Schedule, Stage, Tokens

HEAD_DIM = 16
SPAN, THETA = 64.0, 10000.0
SCHEDULE = Schedule((1, 2, (3, 5), (4, 6)))
TEXT = 5
# Running counts of real tokens minus one: three real tokens, then padding; padding first; none but the first real.
TEXT_POSITIONS = torch.tensor([[0.0, 1, 2, 2, 2], [-1, -1, 0, 1, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]])
ROWS = len(TEXT_POSITIONS)


def pair_rope() -> InterleavedRope:
    return InterleavedRope(star_rotations(stage, HEAD_DIM, SPAN, THETA) for stage in SCHEDULE)


def halves_rope() -> RotateHalfRope:
    return RotateHalfRope.over_text_and_grid(GridPlaces.of(SCHEDULE), HEAD_DIM, TEXT_POSITIONS)


def queries_and_keys(tokens: int) -> Tensor:
    return torch.randn(ROWS, tokens, 2, 3, HEAD_DIM, generator=torch.Generator().manual_seed(tokens))


# --- tables follow the tokens, for both


@pytest.mark.parametrize("rope", [pair_rope(), halves_rope()], ids=["pairs", "halves"])
@pytest.mark.parametrize("stage", SCHEDULE.stages[1:], ids=lambda stage: f"{stage.height}x{stage.width}")
def test_naming_tokens_is_slicing_the_dense_table(rope: Rope, stage: Stage) -> None:
    dense = queries_and_keys(stage.cells)
    turned = rope.apply_rotary(dense, Tokens(stage))
    index = torch.stack([torch.randperm(stage.cells, generator=torch.Generator().manual_seed(row))[:3] for row in range(ROWS)])
    row = torch.arange(ROWS)[:, None]
    assert torch.equal(rope.apply_rotary(dense[row, index], Tokens(stage, index)), turned[row, index])
    every = torch.arange(stage.cells).expand(ROWS, -1)
    assert torch.equal(rope.apply_rotary(dense, Tokens(stage, every)), turned)
    assert not torch.equal(turned, dense)


@pytest.mark.parametrize("rope", [pair_rope(), halves_rope()], ids=["pairs", "halves"])
def test_some_rows_turn_as_they_do_among_all(rope: Rope) -> None:
    for stage in SCHEDULE.stages[1:]:
        x = queries_and_keys(stage.cells)
        for rows in (slice(0, 2), slice(2, None)):
            assert torch.equal(rope.rows(rows).apply_rotary(x[rows], Tokens(stage)), rope.apply_rotary(x, Tokens(stage))[rows])


# --- pairs


def turned_pairs(x: Tensor, angles: list[float]) -> Tensor:
    """Rotates one token's channels [D]: (2m, 2m + 1) is a complex number, multiplied by exp(i * angle)."""
    pairs = [complex(x[2 * m], x[2 * m + 1]) * cmath.exp(1j * angle) for m, angle in enumerate(angles)]
    return torch.tensor([part for pair in pairs for part in (pair.real, pair.imag)])


def star_angles(stage: Stage, cell: int) -> list[float]:
    """Returns the specified angles: columns, then rows, both from 0 to the span; 0 if there is only one."""
    row, column = divmod(cell, stage.width)
    x = column / (stage.width - 1) * SPAN if stage.width > 1 else 0.0
    y = row / (stage.height - 1) * SPAN if stage.height > 1 else 0.0
    frequencies = [THETA ** (-4 * j / HEAD_DIM) for j in range(HEAD_DIM // 4)]
    return [coordinate * frequency for coordinate in (x, y) for frequency in frequencies]


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (4, 4), (3, 5), (5, 3), (1, 4), (4, 1)])
def test_star_turns_by_the_published_angles(size: tuple[int, int]) -> None:
    stage = Stage(0, *size, start=0, last=True)
    x = queries_and_keys(stage.cells)
    turned = InterleavedRope([star_rotations(stage, HEAD_DIM, SPAN, THETA)]).apply_rotary(x, Tokens(stage))
    for cell in range(stage.cells):
        for part, head in ((0, 0), (1, 2)):
            expected = turned_pairs(x[1, cell, part, head], star_angles(stage, cell))
            assert torch.allclose(turned[1, cell, part, head], expected, atol=1e-4)  # angles up to 64 in float32


def test_stars_corners_share_coordinates_at_every_stage() -> None:
    """First and last cell, and the ends of the first row and of the first column; span and frequencies set how far they turn."""
    tables = [star_rotations(stage, HEAD_DIM, SPAN, THETA) for stage in SCHEDULE.stages[1:]]
    corners = [
        (table[0], table[stage.width - 1], table[-stage.width], table[-1]) for table, stage in zip(tables, SCHEDULE.stages[1:], strict=True)
    ]
    for others in corners[1:]:
        assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(others, corners[0], strict=True))
    first, right, below, last = corners[0]
    quarter = HEAD_DIM // 4
    assert torch.equal(first, torch.ones(2 * quarter, dtype=torch.complex64))
    fastest = cmath.exp(1j * SPAN)
    assert right[0].item() == pytest.approx(fastest, abs=1e-5) == below[quarter].item() == last[0].item()
    assert torch.equal(right[quarter:], first[quarter:]) and torch.equal(below[:quarter], first[:quarter])


def test_a_stage_of_one_cell_is_not_turned() -> None:
    x = queries_and_keys(1)
    assert torch.equal(pair_rope().apply_rotary(x, Tokens(SCHEDULE[0])), x)


def test_infinity_turns_by_rows_first_and_star_by_columns_first() -> None:
    stage, quarter = Stage(1, 2, 2, 1, False), HEAD_DIM // 4
    infinity, star = infinity_rotations(stage, (2, 2), HEAD_DIM, "raw"), star_rotations(stage, HEAD_DIM, 1.0, THETA)
    assert torch.allclose(infinity, star.roll(quarter, dims=1))
    upper_right = 1
    assert (star[upper_right, :quarter] != 1).all() and (star[upper_right, quarter:] == 1).all()


@pytest.mark.parametrize("prefix", [1, 3])
@pytest.mark.parametrize("index", [None, torch.tensor([[7, 2, 2], [0, 1, 14], [3, 3, 3], [14, 0, 5]])], ids=["dense", "named"])
def test_pairs_of_a_prefix_stay_as_they_are(prefix: int, index: Tensor | None) -> None:
    rope, grid = pair_rope(), Tokens(SCHEDULE[2], index)
    x = queries_and_keys(prefix + grid.num_tokens)
    turned = rope.apply_rotary(x, grid.with_prefix(prefix))
    assert torch.equal(turned[:, :prefix], x[:, :prefix])
    assert torch.equal(turned[:, prefix:], rope.apply_rotary(x[:, prefix:], grid))


@pytest.mark.parametrize("stage", SCHEDULE.stages, ids=lambda stage: f"{stage.height}x{stage.width}")
def test_pairs_keep_their_length_and_their_type(stage: Stage) -> None:
    x = queries_and_keys(stage.cells)
    turned = pair_rope().apply_rotary(x, Tokens(stage))
    assert (turned.shape, turned.dtype) == (x.shape, torch.float32)
    assert torch.allclose(turned.unflatten(-1, (-1, 2)).norm(dim=-1), x.unflatten(-1, (-1, 2)).norm(dim=-1), atol=1e-5)


# --- halves


def turned_halves(u: Tensor, angles: list[float]) -> Tensor:
    """Computes the specification entry by entry; every entry has its own angle."""
    half = HEAD_DIM // 2
    first = [u[j] * math.cos(angles[j]) - u[j + half] * math.sin(angles[j]) for j in range(half)]
    second = [u[j + half] * math.cos(angles[j + half]) + u[j] * math.sin(angles[j + half]) for j in range(half)]
    return torch.tensor([*first, *second])


def text_angles(position: float) -> list[float]:
    once = [position * 10000 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    return once + once


def grid_angles(stage: Stage, cell: int, begin: float) -> list[float]:
    """Returns [row * f, row * f, column * f, column * f], with coordinates on the last grid plus the text's last position."""
    row, column = divmod(cell, stage.width)
    y = row / stage.height * SCHEDULE.grid[0] + begin
    x = column / stage.width * SCHEDULE.grid[1] + begin
    frequencies = [10000 ** (-4 * i / HEAD_DIM) for i in range(HEAD_DIM // 4)]
    return [coordinate * frequency for coordinate in (y, y, x, x) for frequency in frequencies]


def test_harts_text_turns_by_its_positions() -> None:
    x = queries_and_keys(TEXT)
    turned = halves_rope().apply_rotary(x, Tokens(SCHEDULE[0], prefix=TEXT - 1))
    for row in range(ROWS):
        for token in range(TEXT):
            expected = turned_halves(x[row, token, 1, 2], text_angles(TEXT_POSITIONS[row, token].item()))
            assert torch.allclose(turned[row, token, 1, 2], expected, atol=1e-5)


@pytest.mark.parametrize("stage", SCHEDULE.stages[1:], ids=lambda stage: f"{stage.height}x{stage.width}")
def test_harts_grid_turns_by_rows_and_columns_from_where_the_text_ends(stage: Stage) -> None:
    x = queries_and_keys(stage.cells)
    turned = halves_rope().apply_rotary(x, Tokens(stage))
    for row in range(ROWS):
        for cell in range(stage.cells):
            expected = turned_halves(x[row, cell, 0, 1], grid_angles(stage, cell, begin=TEXT_POSITIONS[row, -1].item()))
            assert torch.allclose(turned[row, cell, 0, 1], expected, atol=1e-5)


def test_rows_differ_by_where_their_text_ends_and_by_nothing_else() -> None:
    """Rows 0 and 1 both end at 2; row 2 ends at 0 and row 3 at 4."""
    cosines, sines = halves_rope().at(Tokens(SCHEDULE[3]))
    for table in (cosines, sines):
        assert torch.equal(table[0], table[1])
        assert not torch.allclose(table[0], table[2], atol=1e-2)
        assert not torch.allclose(table[0], table[3], atol=1e-2)
    assert (cosines[2, 0] == 1).all() and (sines[2, 0] == 0).all()


def test_a_named_first_token_stands_behind_the_whole_text() -> None:
    x = queries_and_keys(TEXT)
    dense = Tokens(SCHEDULE[0], prefix=TEXT - 1)
    named = Tokens(SCHEDULE[0], torch.zeros(ROWS, 1, dtype=torch.long), prefix=TEXT - 1)
    assert torch.equal(halves_rope().apply_rotary(x, named), halves_rope().apply_rotary(x, dense))


def test_the_text_is_rotated_and_the_grid_is_not() -> None:
    """Partners on the grid take one angle from the row and one from the column, so lengths change, as they did in training."""
    rope = halves_rope()
    text, grid = queries_and_keys(TEXT), queries_and_keys(24)
    assert torch.allclose(rope.apply_rotary(text, Tokens(SCHEDULE[0], prefix=TEXT - 1)).norm(dim=-1), text.norm(dim=-1), atol=1e-5)
    assert (rope.apply_rotary(grid, Tokens(SCHEDULE[3])).norm(dim=-1) - grid.norm(dim=-1)).abs().max() > 0.1
