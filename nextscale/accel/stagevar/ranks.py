"""Ranks as StageVAR counts them, one ratio per group of blocks: the published tables, and the probe that measures such tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from torch import Tensor

from ...errors import SettingError
from ...models.base import NextScaleModel
from ...stage import Schedule, Stage, Tokens
from ..method import Method, MethodRun, Plans, RunSetup, StagePlan
from .lowrank import energy_ranks, singular_energies
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


def table_for(model: NextScaleModel, groups: int) -> Table | None:
    """The published table of this kind of model, if it has as many groups."""
    published = published_for(model)
    table = None if published is None else rank_tables()[published.table]
    return table if table is not None and groups_in(table) == groups else None


def table_ratios(table: Table, alpha: float, stage: Stage) -> tuple[float, ...]:
    """The ratios at the side whose square has the number of cells nearest to the stage's."""
    if alpha not in table:
        raise SettingError(
            f"alpha {alpha} at stage {stage.index} has no published ranks; there are {', '.join(str(known) for known in sorted(table))}."
            ' Choose one of them, or set ranks to a ratio or "measured"'
        )
    sides = table[alpha]
    return sides[min(sides, key=lambda side: abs(side * side - stage.cells))]


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


@dataclass(frozen=True)
class RankProbe(Method):
    """Dense generation that notes, before each group of blocks, how many singular directions hold each alpha."""

    layers: tuple[range, ...]
    stages: frozenset[int]
    alphas: tuple[float, ...]
    found: dict[tuple[float, int, int], list[Tensor]] = field(default_factory=dict)  # (alpha, stage, group): one mean per request

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        taps = tuple(blocks.start for blocks in self.layers)
        return tuple(StagePlan(taps=taps if stage.index in self.stages else ()) for stage in schedule)

    @property
    def capturable(self) -> bool:
        return False

    def start(self, setup: RunSetup) -> MethodRun:
        return RankProbeRun(self)


@dataclass(frozen=True)
class RankProbeRun(MethodRun):
    probe: RankProbe

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        x, grid = tokens.on_grid(before)
        energies = singular_energies(x, grid.count)
        group = next(group for group, blocks in enumerate(self.probe.layers) if blocks.start == layer)
        for alpha in self.probe.alphas:
            rank = energy_ranks(energies, alpha).double().mean()
            self.probe.found.setdefault((alpha, tokens.stage.index, group), []).append(rank)
