"""Candidates that are worth more runs: those at the frontier of speed and distance, or near it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")
MAX_RANGES = 12  # of speed
WANTED = (1.2, 5.0)  # the speedups that these ranges divide; those beyond belong to the first or the last of them

Place = Callable[[T], tuple[float, float]]
"""Speedup, and distance to dense."""


def gaps(places: Sequence[tuple[float, float]]) -> list[float]:
    """Returns each speedup relative to the fastest that is no further from dense: 1 at the frontier, less behind it."""
    ordered = sorted(places, key=lambda place: place[1])
    distances = [distance for _, distance in ordered]
    fastest = list(accumulate((speedup for speedup, _ in ordered), max))
    return [speedup / fastest[bisect_right(distances, distance) - 1] for speedup, distance in places]


def frontier(items: Sequence[T], of: Place[T]) -> list[T]:
    """Returns the items that nothing beats in both, slowest first; of equals the first."""
    found: list[T] = []
    best = -math.inf
    for item in sorted(items, key=lambda item: (of(item)[1], -of(item)[0])):  # nearest first
        if of(item)[0] > best:
            found.append(item)
            best = of(item)[0]
    return found


def near_frontier(items: Sequence[T], of: Place[T], count: int) -> list[T]:
    """Returns at most `count` items, of several ranges of speed in turn, always the one nearest to the frontier."""
    places = [of(item) for item in items]
    return spread(items, [speedup for speedup, _ in places], gaps(places), count)


def spread(items: Sequence[T], speedups: Sequence[float], scores: Sequence[float], count: int) -> list[T]:
    """Returns at most `count` items, of several ranges of speed in turn, always the one with the highest score."""
    if not items:
        return []
    bins = max(1, min(MAX_RANGES, count // 2))
    low, high = (math.log(min(max(pick(speedups), WANTED[0]), WANTED[1])) for pick in (min, max))
    width = (high - low) / bins or 1.0
    shelves: dict[int, list[tuple[float, int]]] = {}
    for number, (speedup, score) in enumerate(zip(speedups, scores, strict=True)):
        shelf = max(0, min(bins - 1, int((math.log(speedup) - low) / width)))
        shelves.setdefault(shelf, []).append((-score, number))
    for shelf_items in shelves.values():
        shelf_items.sort()
    chosen: list[int] = []
    for rank in range(len(items)):
        for shelf in sorted(shelves):
            if rank < len(shelves[shelf]) and len(chosen) < count:
                chosen.append(shelves[shelf][rank][1])
    return [items[number] for number in chosen]


def thinned(items: Sequence[T], of: Place[T], count: int) -> list[T]:
    """Returns at most `count` items of a frontier, evenly spread over the logarithm of the speedup, with both ends."""
    if len(items) <= count:
        return list(items)
    low, high = math.log(of(items[0])[0]), math.log(of(items[-1])[0])
    wanted = [low + (high - low) * step / (count - 1) for step in range(count)]
    chosen = {min(range(len(items)), key=lambda number: abs(math.log(of(items[number])[0]) - place)) for place in wanted}
    return [items[number] for number in sorted(chosen)]
