"""Timing helpers: waiting for the device, rounds in turns, percentiles and ranges of times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
ROUNDS = 3  # timed rounds, at least
UNEVEN = 1 / 3  # difference of rounds above which the user is told
UNEVEN_NOTE = "Rounds differ by more than a third: other programs may be running. Measure again when the machine is quiet."


def wait(device: torch.device) -> None:
    """Waits until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    if len(values) == 1:
        return dict.fromkeys(("median", "p20", "p80"), round(values[0], 4))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": round(statistics.median(values), 4), "p20": round(deciles[1], 4), "p80": round(deciles[7], 4)}


def repeated(batches: Sequence[T]) -> list[T]:
    """Returns the batches, all of them repeated until they make ROUNDS or more."""
    return [*batches] * -(-ROUNDS // len(batches))


def percentiles_and_range(values: Sequence[float]) -> dict[str, float]:
    """Percentiles with the lowest and the highest value."""
    return percentiles(values) | {"low": round(min(values), 4), "high": round(max(values), 4)}


def with_range(found: Mapping[str, float]) -> str:
    """Returns the median, and the range where there is one."""
    middle, low, high = (f"{found[name]:.2f}" for name in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def difference(found: Mapping[str, float]) -> float:
    """Returns by which share the highest value exceeds the lowest one."""
    return found["high"] / found["low"] - 1


def is_uneven(found: Mapping[str, float]) -> bool:
    return difference(found) > UNEVEN


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """The same in milliseconds, and named so."""
    return {f"{name}_ms": round(value, 3) for name, value in percentiles([1000 * one for one in seconds]).items()}
