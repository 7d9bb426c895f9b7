"""What counts as a number, a whole number and a share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nextscale.errors import SettingError
from nextscale.validation import block_range, blocks_of, is_fraction, is_int, is_number, sorted_pairs

NEITHER: list[Any] = [True, False, None, "1", [1], 1j, np.array([1.0, 2.0])]


@pytest.mark.parametrize("value", NEITHER, ids=repr)
def test_what_is_no_number(value: Any) -> None:
    assert not is_number(value)
    assert not is_int(value)
    assert not is_fraction(value)


@pytest.mark.parametrize("value", [0, -3, 2.5, math.inf, np.float32(0.5), np.int64(2)], ids=repr)
def test_numbers(value: Any) -> None:
    assert is_number(value)


def test_whole_numbers_have_a_least_one() -> None:
    assert is_int(0) and is_int(np.int64(7)) and is_int(3, least=3)
    assert not is_int(-1) and not is_int(2, least=3) and not is_int(1.0)
    assert is_int(-1, least=-1)


def test_shares_lie_between_0_and_1() -> None:
    assert all(is_fraction(value) for value in (0, 1, 0.5, np.float64(0.25)))
    assert not any(is_fraction(value) for value in (-0.1, 1.1, math.nan, math.inf))
    assert is_fraction(1e-9, above_zero=True) and is_fraction(1, above_zero=True)
    assert not is_fraction(0, above_zero=True) and not is_fraction(math.nan, above_zero=True)


def test_stage_values_are_pairs_in_order() -> None:
    for given in ({3: 1, 2: 0.5}, ((2, 0.5), (3, 1)), [[3, 1.0], [2, 0.5]]):
        assert sorted_pairs("ratios", given, "number", is_fraction) == ((2, 0.5), (3, 1.0))
    for wrong in ({3: 2}, {-1: 0.5}, {True: 0.5}, ((3, 0.5), (3, 0.5)), "ab", 0.5, None, {3: [0.5]}):
        with pytest.raises(SettingError, match="ratios must be {stage index: number}"):
            sorted_pairs("ratios", wrong, "number", is_fraction)
    with pytest.raises(SettingError, match="indices from 2"):
        sorted_pairs("keep", {1: 0.5}, "number", is_fraction, least=2)


def test_blocks_are_a_number_or_a_range() -> None:
    assert block_range("layers", 3) == block_range("layers", [3, 4]) == (3, 4)
    for wrong in ((3, 3), (-1, 3), (0, 1, 2), -1, 1.5, "12", None):
        with pytest.raises(SettingError, match="layers must be a block"):
            block_range("layers", wrong)
    with pytest.raises(SettingError, match=r"layers must be within \(0, 3\).*got \(1, 4\)"):
        blocks_of("layers", (1, 4), 3)
