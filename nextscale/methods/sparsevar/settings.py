"""Settings of SparseVAR: those published for a backbone, ours where nothing is published, and those that a caller gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ...errors import SettingError
from ...validation import is_fraction, is_int

if TYPE_CHECKING:
    from ...models.base import NextScaleModel
    from ...stage import Schedule

Metric = Literal["mse", "logits", "image"]
ScoredRows = Literal["cond", "uncond", "both"]
Resize = Literal["bilinear", "nearest"]
LeftOut = Literal["carried", "zero"]
Select = Literal["threshold", "share"]
Anchors = Literal["grid", "content"]
Shares = tuple[tuple[int, float], ...]
CHOICES: Mapping[str, tuple[str, ...]] = {
    "metric": get_args(Metric),
    "rows": get_args(ScoredRows),
    "resize": get_args(Resize),
    "left_out": get_args(LeftOut),
    "select": get_args(Select),
    "anchors": get_args(Anchors),
}


# --- as published, and where nothing is


@dataclass(frozen=True)
class Published:
    """Where one family starts, and where its change is measured."""

    start: float  # cells of the first reduced stage, as a share of the last stage's
    blocks: tuple[float, float]  # first and last + 1, as shares of the depth


FIRST_SHARE = 3 / 8  # index 10 of all of Infinity's schedules of 13 stages: 38 to 44 % of the cells; index 9 has 25 %
PUBLISHED: Mapping[str, Published] = {
    "infinity": Published(FIRST_SHARE, (3 / 8, 4 / 8)),  # chunk 3 of 8
    "hart": Published((27 / 64) ** 2, (15 / 24, 16 / 24)),
}
OTHER = Published(FIRST_SHARE, (6 / 8, 7 / 8))  # ours: as measured on nano
MEASURED_BLOCKS: Mapping[tuple[str, int], tuple[int, int]] = {("infinity", 8): (6, 7)}  # family and depth of nano


def first_stage(model: NextScaleModel, schedule: Schedule, earliest: int) -> int:
    """Index of the first reduced stage where none is given: the first that has the published share of the last one's cells."""
    least = PUBLISHED.get(model.family, OTHER).start * schedule[-1].cells
    return max(earliest, next(stage.index for stage in schedule if stage.cells >= least))


def change_blocks(model: NextScaleModel) -> range:
    """Indices of the blocks across which change is measured where none are given."""
    depth = len(model.blocks)
    measured = MEASURED_BLOCKS.get((model.family, depth))
    if measured is not None:
        return range(*measured)
    first, stop = (math.floor(share * depth) for share in PUBLISHED.get(model.family, OTHER).blocks)
    return range(first, max(first + 1, stop))


# --- as given


def checked_blocks(given: object) -> tuple[int, int]:
    """The first block and the last block + 1."""
    if is_int(given):
        return int(given), int(given) + 1  # type: ignore[call-overload]
    pair: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if len(pair) != 2 or not all(is_int(block) for block in pair) or pair[0] >= pair[1]:
        raise SettingError(f"blocks is a block, or (first block, last block + 1) such as (12, 16), counted from 0; got {given!r}")
    return int(pair[0]), int(pair[1])


def checked_keep(keep: Any, earliest: int) -> float | Shares:
    """The share of every reduced stage, or pairs of stage index and share in order."""
    if is_fraction(keep):
        return float(keep)
    expected = f"keep is a share from 0 to 1, or {{stage index: share}} with indices from {earliest}"
    try:
        pairs = [(stage, share) for stage, share in (keep.items() if isinstance(keep, Mapping) else keep)]
    except (TypeError, ValueError):
        raise SettingError(f"{expected}; got {keep!r}") from None
    stages = {stage for stage, share in pairs if is_int(stage, earliest) and is_fraction(share)}
    if not pairs or len(stages) < len(pairs):
        raise SettingError(f"{expected}, each once; got {keep!r}")
    return tuple(sorted((int(stage), float(share)) for stage, share in pairs))
