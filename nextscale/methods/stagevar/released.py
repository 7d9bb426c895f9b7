"""What the reference implementation of StageVAR does, and which requests it is not made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...errors import SettingError
from ...models.base import NextScaleModel
from ...stage import Schedule
from .settings import PUBLISHED, published_for

if TYPE_CHECKING:
    from .method import StageVAR


def released_sides(model: NextScaleModel) -> Mapping[int, float]:
    """Alphas by the stage's side where the reference implementation finds stages by their side, as for Infinity; else empty."""
    published = published_for(model)
    return {} if published is None or published.sides is None else published.sides


def released_alphas(model: NextScaleModel, schedule: Schedule) -> dict[int, float]:
    """Alphas by stage index where the reference implementation finds stages by their side."""
    sides = released_sides(model)
    return {stage.index: sides[stage.width] for stage in schedule if stage.width in sides}


def require_released(method: StageVAR, model: NextScaleModel, schedule: Schedule) -> None:
    """Raises SettingError if the reference implementation cannot run this request, or would not do in it what it is for."""
    published = published_for(model)
    if published is None:
        known = ", ".join(PUBLISHED)
        raise SettingError(
            f"as_released: there are reference implementations for {known} only, not for {type(model).__name__}; leave it out"
        )
    if any(stage.height != stage.width for stage in schedule):
        raise SettingError(f"as_released: the reference implementation generates square images only, not {schedule}; leave as_released out")
    if published.sides is None and len(schedule) != published.stages and None in (method.alphas, method.guidance_off):
        raise SettingError(
            f"as_released: the reference implementation for {type(model).__name__} has {published.stages} stages, and {schedule} has"
            f" {len(schedule)}: give both alphas and guidance_off, or leave as_released out"
        )
    alphas = method.stage_alphas(model, schedule)
    skipped = [stage.index for stage in schedule if alphas.get(stage.index) == 0]
    if skipped and skipped != list(range(skipped[0], len(schedule))):
        raise SettingError(
            f"as_released: stage {skipped[0]}, {schedule[skipped[0]].width} wide, is skipped and a later one is not, which the reference"
            f" implementation does not do; got {schedule}: give other alphas, or leave as_released out"
        )
    if published.sides is not None:
        _require_sides(published.sides, alphas, method.alphas is None, schedule)


def _require_sides(sides: Mapping[int, float], alphas: Mapping[int, float], by_default: bool, schedule: Schedule) -> None:
    named = ", ".join(str(side) for side in sides)
    if by_default and not any(stage.width in sides for stage in schedule):
        raise SettingError(f"as_released: the reference implementation acts at sides {named}; {schedule} has none of them")
    for stage in (schedule[index] for index, alpha in alphas.items() if 0 < alpha < 1):
        if stage.width not in sides:
            raise SettingError(f"as_released: the reference implementation runs sides {named} at low rank, not {stage.width} of {schedule}")
