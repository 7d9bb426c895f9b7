"""Checks of settings. True and False are not numbers."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from .errors import SettingError


def is_number(value: object) -> bool:
    return isinstance(value, float | Real) and not isinstance(value, bool)  # float first: Real takes longer


def is_finite(value: object) -> bool:
    """Returns True for a number that fits into a float: integers may have any length, and JSON has NaN and infinities."""
    number: Any = value
    return is_number(value) and bool(abs(number) <= sys.float_info.max)


def is_int(value: object, least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_fraction(value: object, above_zero: bool = False) -> bool:
    """Returns True for a number from 0 to 1; with `above_zero` not for 0 itself."""
    number: Any = value  # not as a float: 10**400 has none
    return is_number(value) and bool((number > 0 if above_zero else number >= 0) and number <= 1)


def is_positive_fraction(value: object) -> bool:
    return is_fraction(value, above_zero=True)


def is_one_of(value: object, choices: Collection[str]) -> bool:
    return isinstance(value, str) and value in choices


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


# --- settings


def require(condition: object, name: str, expected: str, value: object, error: type[Exception] = SettingError) -> None:
    """Raises the error unless the condition holds."""
    if not condition:
        raise error(f"{name} must be {expected}; got {value!r:.200}.")


def require_flags(settings: object, *names: str) -> None:
    """Raises SettingError unless these attributes are bool: a word such as "no" would count as True."""
    for name in names:
        require(isinstance(getattr(settings, name), bool), name, "True or False", getattr(settings, name))


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    require(is_one_of(value, choices), name, f"one of {', '.join(choices)}", value)


def require_stages(name: str, stages: Iterable[int], count: int) -> None:
    """Raises SettingError unless a schedule of `count` stages has all of these."""
    for stage in stages:
        require(stage < count, name, f"about stages 0 to {count - 1} of this schedule", stage)


def sorted_pairs(
    name: str, given: Any, expected: str, valid: Callable[[Any], Any], convert: Callable[[Any], Any] = float, least: int = 0
) -> tuple[tuple[int, Any], ...]:
    """Returns the checked values of stages, given as {stage index: value} or as pairs, ordered by stage."""
    try:
        pairs = [(stage, value) for stage, value in (given.items() if isinstance(given, Mapping) else given)]
        good = all(is_int(stage, least) and valid(value) for stage, value in pairs) and len(dict(pairs)) == len(pairs)
    except (TypeError, ValueError):
        good = False
    require(good, name, f"{{stage index: {expected}}}, with indices from {least}, each once", given)
    return tuple(sorted((int(stage), convert(value)) for stage, value in pairs))


def block_range(name: str, given: Any) -> tuple[int, int]:
    """Returns a checked pair of the first block and the one after the last; a number is a single block."""
    pair = (given, given + 1) if is_int(given) else tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    good = len(pair) == 2 and all(map(is_int, pair)) and pair[0] < pair[1]
    require(good, name, "a block, or (first block, last block + 1) such as (3, 28), counted from 0", given)
    return int(pair[0]), int(pair[1])


def blocks_of(name: str, pair: tuple[int, int], depth: int) -> range:
    """Returns the blocks; raises SettingError if a model of this depth does not have them."""
    require(pair[1] <= depth, name, f"within (0, {depth}), the blocks of this model", pair)
    return range(*pair)
