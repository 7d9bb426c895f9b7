"""What lies beside a model's weights: its ranks for StageVAR, and profiles for `auto`."""

from __future__ import annotations

from pathlib import Path

from ..errors import SettingError
from ..io import home
from ..methods.stagevar_ranks import RankTable, rank_file, read_rank_table
from ..models.base import NextScaleModel
from ..profiles import profile_folder
from .artifacts import Weights
from .fetch import locate
from .presets import Embedded, ModelSpec


def rank_table_of(model: NextScaleModel, weights: Path) -> RankTable | None:
    """The table beside the weights; None where there is none, SettingError if it is another model's."""
    file = rank_file(weights)
    if not file.is_file():
        return None
    table = read_rank_table(file)
    if not table.belongs_to(model):
        raise SettingError(f"{file} lies beside these weights, and has {table!r}: remove it, or run `nextscale calibrate stagevar`")
    return table


def profile_folders(spec: ModelSpec, weights: Path) -> list[Path]:
    """Where profiles of these weights may lie: in the package for those that come with it, then beside them. The last of equals counts."""
    return [*([profile_folder(spec.weights.path)] if isinstance(spec.weights, Embedded) else []), profile_folder(weights)]


def local_weights(spec: ModelSpec) -> Path | None:
    """Where the weights lie if they are there: in the package, or where they are looked for; None where none are released."""
    if isinstance(spec.weights, Embedded):
        return spec.weights.path
    if spec.weights is None:
        return None
    return locate(Weights(f"weights of {spec.name}", spec.weights)) or home() / spec.weights.local
