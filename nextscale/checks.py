"""What settings may be: small questions that every place asks alike. A bool is no number."""

from __future__ import annotations

from numbers import Integral, Real


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object, least: int = 0) -> bool:
    """A whole number, at least `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_share(value: object, above_zero: bool = False) -> bool:
    """A number from 0 to 1, or above 0 and up to 1."""
    return isinstance(value, Real) and is_number(value) and (0 < float(value) <= 1 or (float(value) == 0 and not above_zero))
