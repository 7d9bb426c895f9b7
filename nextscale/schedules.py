"""The schedules of a model, and the choice of one by size or aspect ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Protocol, TypeVar

from .errors import SizeError
from .stage import Schedule
from .validation import is_int

PIXELS_PER_TOKEN = 16  # along one side, of every published model

SizeLike = Schedule | tuple[int, int] | int | str | None
"""A schedule, (height, width) in pixels, the side of a square, or the name of a pixel budget."""

AspectLike = float | str | None
"""Height divided by width, or "W:H" such as "16:9"."""


Chosen = TypeVar("Chosen", Schedule, tuple[int, int])


class Schedules(Protocol):
    def choose(self, size: SizeLike, aspect: AspectLike) -> Schedule: ...

    def offers(self) -> list[tuple[int, int]]:
        """Returns the image sizes (height, width) of the model."""
        ...


def parse_aspect(aspect: float | str) -> float:
    """Returns height divided by width."""
    try:
        if isinstance(aspect, str) and ":" in aspect:
            width, height = (float(part) for part in aspect.split(":"))
            ratio = height / width if width > 0 else 0.0
        else:
            ratio = float(aspect)
    except (ValueError, TypeError):
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise SizeError(f'aspect must be "W:H" such as "16:9", or height / width as a number; got {aspect!r}.')
    return ratio


def parse_size(size: tuple[int, int] | int) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(pair) != 2 or not all(is_int(side, least=1) for side in pair):
        raise SizeError(f"size must be (height, width) in pixels, both ints of at least 1; got {size!r}.")
    return pair[0], pair[1]


def without_aspect(size: Chosen, aspect: AspectLike) -> Chosen:
    if aspect is not None:
        shown = f"{size[1]}x{size[0]}" if isinstance(size, tuple) else size
        raise SizeError(f"aspect must be left out beside size {shown}, which fixes it; got {aspect!r}.")
    return size


def no_such_size(size: tuple[int, int], offers: list[tuple[int, int]]) -> SizeError:
    nearest = sorted(offers, key=lambda offer: math.dist(map(math.log, offer), map(math.log, size)))[:4]
    named = ", ".join(f"{width}x{height}" for height, width in nearest)
    return SizeError(f"size must be one that the model generates (width x height); got {size[1]}x{size[0]}. Nearest: {named}.")


@cache
def square_stages(sides: tuple[int, ...]) -> Schedule:
    return Schedule(sides)


@dataclass(frozen=True)
class SquareSchedules:
    """Square schedules by image side; the first is the default (VAR, FlexVAR, HART, STAR)."""

    sides: tuple[tuple[int, ...], ...]

    def choose(self, size: SizeLike, aspect: AspectLike) -> Schedule:
        if isinstance(size, Schedule):
            return without_aspect(size, aspect)
        if isinstance(size, str):
            raise SizeError(
                f"size must be (height, width) in pixels or a Schedule for this model, which has no pixel budgets; got {size!r}."
            )
        if aspect is not None and parse_aspect(aspect) != 1:
            raise SizeError(f"aspect must be 1:1 for this model, whose images are square; got {aspect!r}.")
        if size is None:
            return square_stages(self.sides[0])
        wanted = parse_size(size)
        for sides in self.sides:
            if wanted == (sides[-1] * PIXELS_PER_TOKEN,) * 2:
                return square_stages(sides)
        raise no_such_size(wanted, self.offers())

    def offers(self) -> list[tuple[int, int]]:
        return [(sides[-1] * PIXELS_PER_TOKEN,) * 2 for sides in self.sides]


VAR_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
VAR_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)

FLEXVAR_STEPS = {
    6: (1, 2, 4, 6, 10, 16),
    8: (1, 2, 3, 5, 7, 10, 13, 16),
    9: (1, 2, 3, 4, 5, 7, 10, 13, 16),
    10: VAR_256,
    11: (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 16),
    12: (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
    13: (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16),
    14: (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16),
}
"""FlexVAR's schedules at 256 px by number of stages; any other list of sides works too."""
FLEXVAR_512 = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 23, 32)

HART_1024 = (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64)
"""Sides of HART's and STAR's stages."""

BUDGETS = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13}
"""Infinity's pixel budgets: number of stages of the aspect ratio's list."""
LARGER_BUDGETS = {"1.8M": 14, "4M": 15}
"""Budgets past Infinity's training."""
LARGER_FACTORS = (21 / 16, 2.0)
"""Stages 14 and 15 are larger than the last trained one by these factors (64: 84 and 128)."""
STRIDE_8_BUDGETS = {"0.02M": 7, "0.06M": 10, "0.15M": 12, "0.25M": 13}
"""Trained numbers of stages for tokens of 8 x 8 pixels: images of a quarter of the pixels."""
BUDGETS_BY_STRIDE = {PIXELS_PER_TOKEN: BUDGETS | LARGER_BUDGETS, 8: STRIDE_8_BUDGETS}

_TALL = {
    1.0: "1x1 2x2 4x4 6x6 8x8 12x12 16x16 20x20 24x24 32x32 40x40 48x48 64x64",
    1.25: "1x1 2x2 3x3 5x4 10x8 15x12 20x16 25x20 30x24 35x28 45x36 55x44 70x56",
    1.333: "1x1 2x2 4x3 8x6 12x9 16x12 20x15 24x18 28x21 36x27 48x36 60x45 72x54",
    1.5: "1x1 2x2 3x2 6x4 9x6 15x10 21x14 27x18 33x22 39x26 48x32 63x42 78x52",
    1.75: "1x1 2x2 3x3 7x4 11x6 14x8 21x12 28x16 35x20 42x24 56x32 70x40 84x48",
    2.0: "1x1 2x2 4x2 6x3 10x5 16x8 22x11 30x15 38x19 46x23 60x30 74x37 90x45",
    2.5: "1x1 2x2 5x2 10x4 15x6 20x8 25x10 30x12 40x16 50x20 65x26 80x32 100x40",
    3.0: "1x1 2x2 6x2 9x3 15x5 21x7 27x9 36x12 45x15 54x18 72x24 90x30 111x37",
}
_WIDE = {1.25: 0.8, 1.333: 0.75, 1.5: 0.666, 1.75: 0.571, 2.0: 0.5, 2.5: 0.4, 3.0: 0.333}  # named by truncation


def _infinity_table() -> dict[float, tuple[tuple[int, int], ...]]:
    """Returns the 13 sizes of each template (height / width), in the published order: ties go to the first."""
    table: dict[float, tuple[tuple[int, int], ...]] = {}
    for ratio, text in _TALL.items():
        pairs = (pair.split("x") for pair in text.split())
        sizes = tuple((int(height), int(width)) for height, width in pairs)
        table[ratio] = sizes
        if ratio in _WIDE:
            table[_WIDE[ratio]] = tuple((width, height) for height, width in sizes)
    return table


INFINITY_SIZES = _infinity_table()
FARTHEST_ASPECT = 0.125  # relative; every ratio from 1:3 to 3:1 is nearer to a template


@cache
def infinity_stages(template: float, stages: int) -> Schedule:
    """Returns the schedule with positions on the grid of the template's 13 stages, or on the last grid if that is larger."""
    sizes = INFINITY_SIZES[template]
    if stages <= len(sizes):
        return Schedule(sizes[:stages], extent=sizes[-1])
    height, width = sizes[-1]
    factors = LARGER_FACTORS[: stages - len(sizes)]
    return Schedule((*sizes, *((round(height * factor), round(width * factor)) for factor in factors)))


FASTVAR_GRIDS = {2.0: (120, 60), 0.5: (60, 120), 1.333: (84, 63), 0.75: (63, 84)}
"""Stage 14 by template in a comment of FastVAR's released program, whose "2K" is most likely 1920x960. Its 84x84 is the stage of "1.8M"."""


@cache
def infinity_images(pixels_per_token: int) -> dict[tuple[int, int], Schedule]:
    """Returns all sizes in pixels of a stride; each occurs once."""
    budgets = BUDGETS_BY_STRIDE[pixels_per_token].values()
    schedules = [infinity_stages(template, stages) for template in INFINITY_SIZES for stages in budgets]
    if pixels_per_token == PIXELS_PER_TOKEN:
        schedules += [Schedule((*INFINITY_SIZES[template], grid)) for template, grid in FASTVAR_GRIDS.items()]
    return {(schedule.grid[0] * pixels_per_token, schedule.grid[1] * pixels_per_token): schedule for schedule in schedules}


@dataclass(frozen=True)
class InfinitySchedules:
    """Fifteen aspect ratios times the pixel budgets of a stride; the published stride has two budgets beyond training."""

    budget: str = "1M"
    pixels_per_token: int = PIXELS_PER_TOKEN

    def __post_init__(self) -> None:
        if self.budget not in BUDGETS_BY_STRIDE.get(self.pixels_per_token, ()):
            raise SizeError(f"no schedules for budget {self.budget!r} with {self.pixels_per_token} pixels per token: {BUDGETS_BY_STRIDE}")

    @property
    def budgets(self) -> dict[str, int]:
        """Number of stages by name; the name gives the pixels of the image."""
        return BUDGETS_BY_STRIDE[self.pixels_per_token]

    def choose(self, size: SizeLike, aspect: AspectLike) -> Schedule:
        if isinstance(size, Schedule):
            return without_aspect(size, aspect)
        if isinstance(size, str) or size is None:
            budget = self.budget if size is None else size
            if budget not in self.budgets:
                raise SizeError(f"size must be (height, width) or a pixel budget, one of {', '.join(self.budgets)}; got {budget!r}.")
            return infinity_stages(self._template(aspect), self.budgets[budget])
        wanted = without_aspect(parse_size(size), aspect)
        found = infinity_images(self.pixels_per_token).get(wanted)
        if found is None:
            raise no_such_size(wanted, self.offers())
        return found

    def offers(self) -> list[tuple[int, int]]:
        return list(infinity_images(self.pixels_per_token))

    @staticmethod
    def _template(aspect: AspectLike) -> float:
        ratio = 1.0 if aspect is None else parse_aspect(aspect)
        nearest = min(INFINITY_SIZES, key=lambda template: abs(template - ratio))
        if abs(nearest - ratio) / ratio > FARTHEST_ASPECT:
            pairs = [Fraction(template).limit_denominator(7).as_integer_ratio() for template in sorted(_TALL, reverse=True)]
            wide, tall = (", ".join(f"{sides[0]}:{sides[1]}" for sides in order) for order in (pairs, [pair[::-1] for pair in pairs]))
            raise SizeError(f"aspect must be W:H with one of {wide}, {tall.removesuffix(', 1:1')}, or near one of them; got {aspect!r}.")
        return nearest
