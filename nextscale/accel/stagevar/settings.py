"""Settings of StageVAR: those published for a backbone, and those that a caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...checks import is_share, is_whole
from ...errors import SettingError
from ...io import expanded
from ...models.base import NextScaleModel
from ...models.rank_table import RankTable, read_rank_table
from ...schedules import HART_1024

Variant = Literal["vanilla", "svd_approximation", "svd", "svd_fixed", "least_squares", "representative"]
Alphas = tuple[tuple[int, float], ...]
StageRatios = tuple[tuple[int, tuple[float, ...]], ...]

PUBLISHED_ALPHA = 0.96


# --- as published


@dataclass(frozen=True)
class Published:
    """What the paper and its reference implementation do for one family."""

    depth: int  # with dim, of the model that its ranks were measured of
    dim: int
    stages: int
    guidance_off: int
    alphas: Alphas
    blocks_per_group: int | None = None  # None: an eighth of the depth
    sides: Mapping[int, float] | None = None  # alphas by the stage's side, where the reference implementation finds stages by it
    counts_all_tokens: bool = False  # a ratio is a share of all tokens; False: of at most as many as the network has channels
    first_ratios: bool = False  # with fewer groups than its table the program takes the first ratios
    trained_sides: tuple[int, ...] | None = None  # where models for other sizes have weights of their own: that model's stages


PUBLISHED: Mapping[str, Published] = {
    "infinity": Published(
        32,
        2048,
        13,
        10,
        ((10, PUBLISHED_ALPHA), (11, 0.0), (12, 0.0)),
        sides={40: PUBLISHED_ALPHA, 48: 0.0, 64: 0.0},
        counts_all_tokens=True,
        first_ratios=True,
    ),
    "star": Published(30, 1920, 14, 12, ((13, PUBLISHED_ALPHA),), blocks_per_group=1, trained_sides=HART_1024),
    "hart": Published(24, 1536, 14, 12, ((13, PUBLISHED_ALPHA),), blocks_per_group=1),
}


def published_for(model: NextScaleModel) -> Published | None:
    return PUBLISHED.get(model.family)


def group_layers(model: NextScaleModel, blocks_per_group: int | None) -> tuple[range, ...]:
    """Groups of consecutive blocks, of which the last may have fewer. None is the published number of blocks per group, or an eighth."""
    depth = len(model.blocks)
    published = published_for(model)
    size = blocks_per_group or (published and published.blocks_per_group) or max(1, depth // 8)
    if size > depth:
        raise SettingError(f"groups of {size} blocks: this model has {depth}; choose 1 to {depth}")
    return tuple(range(first, min(first + size, depth)) for first in range(0, depth, size))


# --- as given


def checked_alphas(given: object) -> Alphas:
    pairs = pairs_of(given)
    if pairs is None or not all(is_whole(stage) and is_share(alpha) for stage, alpha in pairs):
        raise SettingError(f"alphas is a mapping of stages to numbers from 0 (skip) to 1 (full rank), or such pairs; got {given!r}")
    if len({stage for stage, _ in pairs}) < len(pairs):
        raise SettingError(f"alphas names a stage twice: {given!r}")
    return tuple(sorted((int(stage), float(alpha)) for stage, alpha in pairs))


def checked_ranks(given: Any) -> str | float | tuple[float, ...] | StageRatios | RankTable:
    if is_share(given, above_zero=True):
        return float(given)
    if isinstance(given, RankTable) or (isinstance(given, str) and given == "measured"):
        return given
    if isinstance(given, str | Path) and str(given).endswith(".json"):
        return read_rank_table(expanded(given))
    if isinstance(given, Sequence) and given and all(is_share(ratio, above_zero=True) for ratio in given):
        return tuple(float(ratio) for ratio in given)
    pairs = pairs_of(given)
    if not pairs or not all(
        is_whole(stage) and isinstance(ratios, Sequence) and ratios and all(is_share(ratio, above_zero=True) for ratio in ratios)
        for stage, ratios in pairs
    ):
        raise SettingError(
            'ranks is "measured", a ratio above 0 and up to 1, a tuple of one per group, a mapping of stages to such tuples, or the file of'
            f" a table (.json); got {given!r}"
        )
    return tuple(sorted((int(stage), tuple(float(ratio) for ratio in ratios)) for stage, ratios in pairs))


def pairs_of(given: object) -> list[tuple[Any, Any]] | None:
    """The pairs of a mapping or of a sequence of pairs; None if it is neither."""
    items = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(items, Sequence) or isinstance(items, str):
        return None
    pairs = [tuple(item) for item in items if isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2]
    return pairs if len(pairs) == len(items) else None  # type: ignore[return-value]
