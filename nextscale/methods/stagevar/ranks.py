"""Which rank table a model has: one that was measured of its weights, or the published one of the same model."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ...errors import SettingError
from ...methods.rank_table import RankRow, RankTable
from ...models.base import NextScaleModel
from .settings import PUBLISHED, published_for

ADVICE = (
    'Set ranks to a ratio such as 0.05, to one per group, or to "measured"; or measure a table of this model with'
    " `nextscale observe ranks`, which is then found beside its weights, or given as ranks=FILE"
)


@cache
def published_tables() -> dict[str, RankTable]:
    """The published ratios by family, each of the model that it was measured of."""
    tables = json.loads(files(__package__).joinpath("ranks.json").read_text())
    return {
        family: RankTable(
            family,
            published.depth,
            published.dim,
            tuple(
                RankRow(float(alpha), int(side) ** 2, tuple(ratios))
                for alpha, sides in tables[family].items()
                for side, ratios in sides.items()
            ),
        )
        for family, published in PUBLISHED.items()
    }


def published_table(model: NextScaleModel) -> RankTable | None:
    """The published table, if it was measured of this model."""
    published, table = published_for(model), published_tables().get(model.family)
    if published is None or table is None or not table.belongs_to(model):
        return None
    trained: Any = model.config if published.trained_sides else None
    return table if trained is None or trained.sides == published.trained_sides else None


def table_for(model: NextScaleModel, groups: int, as_released: bool) -> RankTable:
    """The table of this model; SettingError where there is none with as many groups.

    The reference implementations have one table for every model of a family, and Infinity's takes the first ratios for fewer groups.
    """
    published = published_for(model)
    if as_released and published is not None:
        table = published_tables()[model.family]
        if groups == table.groups or (published.first_ratios and groups < table.groups):
            return table
    known = model.rank_table or published_table(model)
    if known is not None:
        return require_groups(known, groups)
    owners = "; ".join(table.owner + trained_for(PUBLISHED[family].trained_sides) for family, table in published_tables().items())
    depth, dim = len(model.blocks), model.block_config.dim
    config: Any = model.config if published is not None and published.trained_sides else None
    asked = f"{model.family} with {depth} blocks of {dim} channels{trained_for(config and config.sides)}"
    raise SettingError(f"StageVAR has no ranks for {asked}; there are published ones for {owners}. {ADVICE}")


def trained_for(sides: tuple[int, ...] | None) -> str:
    """The grid of a model's last stage, in words, where models for other grids have weights of their own."""
    return f" trained for a grid of {sides[-1]}x{sides[-1]} cells" if sides else ""


def given_table(table: RankTable, model: NextScaleModel, groups: int) -> RankTable:
    """A table that the caller gives for this model; SettingError if it belongs to another."""
    if not table.belongs_to(model):
        depth, dim = len(model.blocks), model.block_config.dim
        raise SettingError(f"these are {table!r}, and not of {model.family} with {depth} blocks of {dim} channels. {ADVICE}")
    return require_groups(table, groups)


def require_groups(table: RankTable, groups: int) -> RankTable:
    if table.groups != groups:
        raise SettingError(f"these are {table!r}, and not {groups}: leave out the setting groups. {ADVICE}")
    return table


def counted_tokens(model: NextScaleModel) -> int | None:
    """What a ratio is a share of: all tokens on Infinity (None), elsewhere at most as many as the network has channels."""
    published = published_for(model)
    return None if published is not None and published.counts_all_tokens else model.block_config.dim
