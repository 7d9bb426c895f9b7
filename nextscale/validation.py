"""Whether a setting that a caller gives is of the right kind. True and False are no numbers."""

from __future__ import annotations

import sys
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from .errors import SettingError


def is_number(value: object) -> bool:
    return isinstance(value, float | Real) and not isinstance(value, bool)  # a float needs no look into the tower of numbers


def is_finite(value: object) -> bool:
    """A number that a float can hold: whole numbers may be of any length, and JSON has NaN and infinities."""
    number: Any = value
    return is_number(value) and bool(abs(number) <= sys.float_info.max)


def is_int(value: object, least: int = 0) -> bool:
    """A whole number, `least` or more."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_fraction(value: object, above_zero: bool = False) -> bool:
    """A number from 0 to 1; with `above_zero` not 0 itself."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number: Any = value  # not as a float: there is none for 10**400
    return bool((number > 0 if above_zero else number >= 0) and number <= 1)


def is_one_of(value: object, choices: Collection[str]) -> bool:
    """One of these words."""
    return isinstance(value, str) and value in choices


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def require_flags(settings: object, *names: str) -> None:
    """Raises SettingError unless these attributes are True or False: a word such as "no" would count as True."""
    for name in names:
        if not isinstance(getattr(settings, name), bool):
            raise SettingError(f"{name} is True or False; got {getattr(settings, name)!r}")
