"""Rank ratios that were measured of one model: what StageVAR needs to know of its features, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checks import is_share, is_whole
from ..errors import SettingError
from ..io import regular, write_text

if TYPE_CHECKING:
    from .base import NextScaleModel

SUFFIX = ".ranks.json"
ADVICE = "write it anew with `nextscale observe ranks`"


class RankRow(NamedTuple):
    """The ratios of a stage of this number of cells, one per group of blocks, that hold the share `alpha` of its energy."""

    alpha: float
    cells: int
    ratios: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class RankTable:
    """Ratios of one model. It belongs to models of this family, depth and dim, and to no other."""

    family: str
    depth: int
    dim: int
    rows: tuple[RankRow, ...]  # each alpha and number of cells once, all with as many groups

    def __repr__(self) -> str:
        return f"ranks of {self.owner}, {self.groups} groups"

    @property
    def owner(self) -> str:
        return f"{self.family} with {self.depth} blocks of {self.dim} channels"

    @property
    def groups(self) -> int:
        return len(self.rows[0].ratios)

    def belongs_to(self, model: NextScaleModel) -> bool:
        return (self.family, self.depth, self.dim) == identity(model)

    def ratios(self, alpha: float, cells: int) -> tuple[float, ...]:
        """Those of the stage with the nearest number of cells."""
        rows = [row for row in self.rows if row.alpha == alpha]
        if not rows:
            known = ", ".join(str(one) for one in sorted({row.alpha for row in self.rows}))
            raise SettingError(
                f"alpha {alpha}: the {self!r} have none for it, only for {known}. Choose one of these, or set ranks to a ratio, to"
                ' "measured", or to a table that `nextscale observe ranks --alpha` measures'
            )
        return min(rows, key=lambda row: abs(row.cells - cells)).ratios


def identity(model: NextScaleModel) -> tuple[str, int, int]:
    """What a table is known by: family, depth and dim."""
    return model.family, len(model.blocks), model.block_config.dim


# --- the file


def rank_file(weights: Path) -> Path:
    """Where the table of a model lies that was loaded from this file or folder: beside it."""
    return weights.with_name(f"{weights.stem if weights.is_file() else weights.name}{SUFFIX}")


def write_rank_table(table: RankTable, target: Path, about: dict[str, Any] | None = None) -> None:
    """`about`: how it was measured, for readers of the file."""
    rows = [json.dumps(row._asdict()) for row in table.rows]
    head = {key: value for key, value in asdict(table).items() if key != "rows"} | {"about": about or {}}
    write_text(json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n", target)


def read_rank_table(path: Path) -> RankTable:
    """The table of a file; SettingError if that is none."""
    try:
        found = json.loads(regular(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"ranks {path} cannot be read ({error}): {ADVICE}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list) or not isinstance(found.get("family"), str):
        raise SettingError(f"ranks {path}: expected an object with family, depth, dim and rows; {ADVICE}")
    if not all(is_whole(found.get(name), least=1) for name in ("depth", "dim")):
        raise SettingError(f"ranks {path}: depth and dim are whole numbers; got {found.get('depth')!r} and {found.get('dim')!r}; {ADVICE}")
    rows = checked_rows(found["rows"], path)
    return RankTable(found["family"], found["depth"], found["dim"], rows)


def checked_rows(found: Iterable[Any], path: Path) -> tuple[RankRow, ...]:
    rows = []
    for row in found:
        given = row if isinstance(row, dict) else {}
        ratios = given.get("ratios")
        good = isinstance(ratios, list) and ratios and all(is_share(ratio, above_zero=True) for ratio in ratios)
        if not good or not is_share(given.get("alpha"), above_zero=True) or not is_whole(given.get("cells"), least=1):
            raise SettingError(f"ranks {path}: rows have alpha and ratios, above 0 and up to 1, and cells; got {row!r}; {ADVICE}")
        rows.append(RankRow(float(given["alpha"]), given["cells"], tuple(float(ratio) for ratio in given["ratios"])))
    if not rows or len({len(row.ratios) for row in rows}) > 1 or len({row[:2] for row in rows}) < len(rows):
        raise SettingError(f"ranks {path}: expected rows with as many ratios each, and every alpha and number of cells once; {ADVICE}")
    return tuple(sorted(rows))
