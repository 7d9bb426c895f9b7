"""Settings of StageVAR: those published for a backbone, and those that a caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ...errors import SettingError
from ...models import Hart, Infinity, NextScaleModel, Star

Alphas = tuple[tuple[int, float], ...]
StageRatios = tuple[tuple[int, tuple[float, ...]], ...]

PUBLISHED_ALPHA = 0.96
RELEASED_SIDES = {40: PUBLISHED_ALPHA, 48: 0.0, 64: 0.0}  # what the released program for Infinity goes by


# --- as published


@dataclass(frozen=True)
class Published:
    """What the authors' program does for one backbone."""

    table: str  # in stagevar_ranks.json
    stages: int
    guidance_off: int
    alphas: Alphas
    blocks_per_group: int | None = None  # None: an eighth of the depth
    first_ratios: bool = False  # with fewer groups than its table the program takes the first ratios


PUBLISHED: dict[type[NextScaleModel], Published] = {
    Infinity: Published("infinity", 13, 10, ((10, PUBLISHED_ALPHA), (11, 0.0), (12, 0.0)), first_ratios=True),
    Star: Published("star", 14, 12, ((13, PUBLISHED_ALPHA),), blocks_per_group=1),
    Hart: Published("hart", 14, 12, ((13, PUBLISHED_ALPHA),), blocks_per_group=1),
}


def published_for(model: NextScaleModel) -> Published | None:
    return next((published for backbone, published in PUBLISHED.items() if isinstance(model, backbone)), None)


def group_layers(model: NextScaleModel, blocks_per_group: int | None) -> tuple[range, ...]:
    """Consecutive blocks; the last group may have fewer."""
    depth = len(model.blocks)
    published = published_for(model)
    size = blocks_per_group or (published and published.blocks_per_group) or max(1, depth // 8)
    if size > depth:
        raise SettingError(f"groups of {size} blocks: this model has {depth}; choose 1 to {depth}")
    return tuple(range(first, min(first + size, depth)) for first in range(0, depth, size))


# --- as given


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_share(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def checked_alphas(given: object) -> Alphas:
    pairs = pairs_of(given)
    if pairs is None or not all(is_count(stage, least=0) and is_number(alpha) and 0 <= alpha <= 1 for stage, alpha in pairs):
        raise SettingError(f"alphas is a mapping of stages to numbers from 0 (skip) to 1 (full rank), or such pairs; got {given!r}")
    if len({stage for stage, _ in pairs}) < len(pairs):
        raise SettingError(f"alphas names a stage twice: {given!r}")
    return tuple(sorted((int(stage), float(alpha)) for stage, alpha in pairs))


def checked_ranks(given: Any) -> str | float | tuple[float, ...] | StageRatios:
    if is_share(given):
        return float(given)
    if isinstance(given, str) and given in ("table", "measured"):
        return given
    if isinstance(given, Sequence) and given and all(is_share(ratio) for ratio in given):
        return tuple(float(ratio) for ratio in given)
    pairs = pairs_of(given)
    if not pairs or not all(
        is_count(stage, least=0) and isinstance(ratios, Sequence) and ratios and all(is_share(ratio) for ratio in ratios)
        for stage, ratios in pairs
    ):
        raise SettingError(
            'ranks is "table", "measured", a ratio above 0 and up to 1, a tuple of one per group, or a mapping of stages to such tuples;'
            f" got {given!r}"
        )
    return tuple(sorted((int(stage), tuple(float(ratio) for ratio in ratios)) for stage, ratios in pairs))


def pairs_of(given: object) -> list[tuple[Any, Any]] | None:
    """Of a mapping or a sequence of pairs; None if it is neither."""
    items = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(items, Sequence) or isinstance(items, str):
        return None
    pairs = [tuple(item) for item in items if isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2]
    return pairs if len(pairs) == len(items) else None  # type: ignore[return-value]
