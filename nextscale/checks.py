"""Whether a setting that a caller gives is of the right kind. True and False are no numbers."""

from __future__ import annotations

from numbers import Integral, Real

from .errors import SettingError


def is_number(value: object) -> bool:
    return isinstance(value, float | Real) and not isinstance(value, bool)  # a float needs no look into the tower of numbers


def is_whole(value: object, least: int = 0) -> bool:
    """A whole number, `least` or more."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_share(value: object, above_zero: bool = False) -> bool:
    """A number from 0 to 1; with `above_zero` not 0 itself."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        share = float(value)
    except OverflowError:  # a whole number that is too large for floats
        return False
    return (share > 0 if above_zero else share >= 0) and share <= 1


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
