"""Measured rank ratios of StageVAR: published tables, and files beside the weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import SettingError
from ..io import write_text
from ..serialization import from_plain, read_json
from ..validation import is_int, is_positive_fraction, require

if TYPE_CHECKING:
    from ..models.base import NextScaleModel

SUFFIX = ".ranks.json"


@dataclass(frozen=True, order=True)
class RankRow:
    """The ratios of a stage of this number of cells, one per group of blocks, that hold the share `alpha` of its energy.

    A ratio is a share of the largest possible rank: the smaller of the cells and the channels.
    """

    alpha: float
    cells: int
    ratios: tuple[float, ...]
    deviations: tuple[float, ...] | None = None  # of the ratios, over images


@dataclass(frozen=True, repr=False)
class RankTable:
    """Ratios of one model; they apply to no other family, depth or dim."""

    family: str
    depth: int
    dim: int
    rows: tuple[RankRow, ...]
    sides: tuple[int, ...] | None = None  # stages of the model, if models for other sizes have weights of their own
    about: dict[str, Any] = field(default_factory=dict, compare=False)  # conditions of the measurement

    def __post_init__(self) -> None:
        for row in self.rows:
            good = is_int(row.cells, 1) and row.ratios and all(map(is_positive_fraction, (row.alpha, *row.ratios)))
            require(good, "rows", "alpha and ratios above 0 and up to 1, and cells", row)
        same = len({len(row.ratios) for row in self.rows}) == 1 and len({(row.alpha, row.cells) for row in self.rows}) == len(self.rows)
        require(same, "rows", "rows with as many ratios each, and every alpha and number of cells once", self.rows)

    def __repr__(self) -> str:
        return f"ranks of {self.family} with {self.depth} blocks of {self.dim} channels, {self.groups} groups"

    @property
    def groups(self) -> int:
        return len(self.rows[0].ratios)

    def belongs_to(self, model: NextScaleModel) -> bool:
        config: Any = model.config
        return (self.family, self.depth, self.dim) == identity(model) and (self.sides is None or self.sides == config.sides)

    def ratios(self, alpha: float, cells: int) -> tuple[float, ...]:
        """Returns the ratios of the stage with the nearest number of cells."""
        rows = [row for row in self.rows if row.alpha == alpha]
        known = sorted({row.alpha for row in self.rows})
        require(rows, "alpha", f"one of {', '.join(map(str, known))}, as in {self!r}", alpha)
        return min(rows, key=lambda row: abs(row.cells - cells)).ratios


def identity(model: NextScaleModel) -> tuple[str, int, int]:
    """Returns family, depth and dim of a model."""
    return model.family, len(model.blocks), model.block_config.dim


# --- files


def rank_file(weights: Path) -> Path:
    """Returns the path of the table beside the weights, a file or folder."""
    return weights.with_name(f"{weights.stem if weights.is_file() else weights.name}{SUFFIX}")


def write_rank_table(table: RankTable, target: Path) -> None:
    write_text(json.dumps(asdict(table)) + "\n", target)


def read_rank_table(path: Path) -> RankTable:
    try:
        return from_plain(RankTable, read_json(path), "table")
    except ValueError as error:
        raise SettingError(f"ranks {path} cannot be read ({error}): write it again with `nextscale calibrate stagevar`.") from error


# --- the table of a model


@cache
def published_tables() -> dict[str, RankTable]:
    """Returns the published ratios by family, each with the model on which it was measured."""
    found = json.loads(files(__package__).joinpath("ranks.json").read_text())["tables"]
    return {table.family: table for table in from_plain(tuple[RankTable, ...], found, "tables")}


def table_for(model: NextScaleModel, groups: int, as_released: bool) -> RankTable:
    """Returns the table of this model; raises SettingError if there is none with as many groups.

    The reference implementations have one table for every model of a family, and Infinity's takes the first ratios for fewer groups.
    """
    published = published_tables().get(model.family)
    if as_released and published and (groups == published.groups or (model.family == "infinity" and groups < published.groups)):
        return published
    known = model.rank_table or (published if published and published.belongs_to(model) else None)
    if known is None:
        family, depth, dim = identity(model)
        released = f", or as_released=true for the published ratios of {published!r}" if published else ""
        raise SettingError(
            f"StageVAR has no ranks for {family} with {depth} blocks of {dim} channels, trained for this size."
            f" Measure a table with `nextscale calibrate stagevar`, set ranks to a ratio such as 0.05{released}."
        )
    return require_groups(known, groups)


def require_groups(table: RankTable, groups: int) -> RankTable:
    require(table.groups == groups, "groups", f"left out with {table!r}", groups)
    return table


def group_layers(model: NextScaleModel, blocks_per_group: int | None) -> tuple[range, ...]:
    """Returns groups of consecutive blocks; the last may have fewer. None is the published number per group, or an eighth."""
    depth = len(model.blocks)
    size = blocks_per_group or (1 if model.family in ("star", "hart") else max(1, depth // 8))
    require(size <= depth, "groups", f"at most {depth}, the blocks of this model", size)
    return tuple(range(first, min(first + size, depth)) for first in range(0, depth, size))


def energy_ranks(energies: Tensor, alpha: float) -> Tensor:
    """Returns the smallest number of leading `energies` [R, n] that holds `alpha` of their sum (equation 4): [R]."""
    held = energies.cumsum(dim=1)
    return ((held < alpha * held[:, -1:]).sum(dim=1) + 1).clamp(max=energies.shape[1])
