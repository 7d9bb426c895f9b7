"""Ranks as StageVAR counts them, one ratio per group of blocks: the published tables."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from ...errors import SettingError
from ...models.base import NextScaleModel
from ...stage import Stage
from .settings import PUBLISHED, published_for

CONSTANT_RATIO = 0.177  # where no table fits: the share of its tokens that Infinity's 40 x 40 stage keeps at alpha 0.96

Table = dict[float, dict[int, tuple[float, ...]]]


@cache
def rank_tables() -> dict[str, Table]:
    """The published ratios by table, alpha and side of the stage, one per group."""
    text = files(__package__).joinpath("ranks.json").read_text()
    return {
        name: {float(alpha): {int(side): tuple(ratios) for side, ratios in sides.items()} for alpha, sides in table.items()}
        for name, table in json.loads(text).items()
        if name != "note"
    }


def groups_in(table: Table) -> int:
    return len(next(iter(next(iter(table.values())).values())))


def table_for(model: NextScaleModel, groups: int, as_released: bool = False) -> Table | None:
    """The published table of this kind of model, if it has as many groups; as released it may have more, where the program's may."""
    published = published_for(model)
    if published is None:
        return None
    table = rank_tables()[published.table]
    fits = groups <= groups_in(table) if as_released and published.first_ratios else groups == groups_in(table)
    return table if fits else None


def table_ratios(table: Table, alpha: float, stage: Stage, groups: int) -> tuple[float, ...]:
    """The first `groups` ratios at the side whose square has nearly as many cells as the stage."""
    if alpha not in table:
        raise SettingError(
            f"alpha {alpha} at stage {stage.index} has no published ranks; there are {', '.join(str(known) for known in sorted(table))}."
            ' Choose one of them, or set ranks to a ratio or "measured"'
        )
    sides = table[alpha]
    return sides[min(sides, key=lambda side: abs(side * side - stage.cells))][:groups]


def no_table(model: NextScaleModel, groups: int) -> SettingError:
    known = []
    for backbone, published in PUBLISHED.items():
        table = rank_tables()[published.table]
        sides = ", ".join(str(side) for side in next(iter(table.values())))
        known.append(f"{backbone} with {groups_in(table)} groups (sides {sides})")
    return SettingError(
        f"there are no published ranks for {type(model).__name__} with {groups} groups of blocks, only for {'; '.join(known)}."
        ' Set ranks to a ratio such as 0.2, to one per group, to "measured", or to what measure_ranks returns'
    )


def counted_tokens(model: NextScaleModel) -> int | None:
    """What a ratio is a share of: all tokens on Infinity (None), elsewhere at most as many as the network has channels."""
    published = published_for(model)
    return None if published is not None and published.counts_all_tokens else model.block_config.dim
