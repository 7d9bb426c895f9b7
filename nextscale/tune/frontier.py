"""Candidates that are worth more runs: those at the frontier of speed and distance, or near it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import TypeVar

import numpy as np

T = TypeVar("T")
MAX_RANGES = 12  # of speed
WANTED = (1.2, 5.0)  # the speedups that these ranges divide; those beyond belong to the first or the last of them

Place = tuple[float, float]
"""Speedup, and distance to dense."""


def frontier(places: Mapping[T, Place]) -> list[T]:
    """Returns the items that nothing beats in both, slowest first; of equals the first."""
    found: list[T] = []
    best = -math.inf
    for item, (speedup, _) in sorted(places.items(), key=lambda entry: (entry[1][1], -entry[1][0])):  # nearest first
        if speedup > best:
            found.append(item)
            best = speedup
    return found


def speed_by_distance(places: Iterable[Place]) -> Callable[[float], float]:
    """Returns the speedup of a frontier that starts at dense generation, along straight lines between its points."""
    speedups, distances = np.array(frontier({place: place for place in [(1.0, 0.0), *places]})).T
    return lambda distance: float(np.interp(distance, distances, speedups))


def near_frontier(places: Mapping[T, Place], count: int) -> list[T]:
    """Returns at most `count` items, from several ranges of speed, always the one nearest to the frontier."""
    fastest = speed_by_distance(places.values())
    return spread({item: (speedup, speedup / fastest(distance)) for item, (speedup, distance) in places.items()}, count)


def spread(scored: Mapping[T, tuple[float, float]], count: int) -> list[T]:
    """Returns at most `count` items by speedup and score: from several ranges of speed, the highest score first."""
    if not scored:
        return []
    bins = max(1, min(MAX_RANGES, count // 2))
    speedups = [speedup for speedup, _ in scored.values()]
    low, high = (math.log(min(max(end, WANTED[0]), WANTED[1])) for end in (min(speedups), max(speedups)))
    width = (high - low) / bins or 1.0
    shelves: dict[int, list[T]] = defaultdict(list)
    for item in sorted(scored, key=lambda item: -scored[item][1]):
        shelves[max(0, min(bins - 1, int((math.log(scored[item][0]) - low) / width)))].append(item)
    turns = zip_longest(*(shelves[shelf] for shelf in sorted(shelves)))
    return [item for turn in turns for item in turn if item is not None][:count]
