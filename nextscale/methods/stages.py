"""The stages at which methods act, as callers give them: checked indices, and what they are where none are given."""

from __future__ import annotations

from collections.abc import Sequence

from ..stage import Schedule
from ..validation import is_int, require, require_stages

LAST_STAGES = 3
FIRST_COMPARED = 10  # the stage from which on SparseVAR's appendix B reduces tokens: 40 x 40 on Infinity, 27 x 27 on HART


def stage_indices(stages: Sequence[int]) -> tuple[int, ...]:
    """Returns checked stage indices in order, each once."""
    good = isinstance(stages, Sequence) and all(map(is_int, stages))
    require(good, "stages", "a tuple of stage indices from 0", stages)
    return tuple(sorted({int(stage) for stage in stages}))


def present_stages(stages: Sequence[int], schedule: Schedule) -> Sequence[int]:
    """Returns these stage indices; raises SettingError if the schedule does not have them."""
    require_stages("stages", stages, len(schedule))
    return stages


def late_stages(stages: Sequence[int] | None, schedule: Schedule) -> Sequence[int]:
    """Returns checked stage indices; None is from SparseVAR's first reduced stage on, at least the last three, so that curves compare."""
    if stages is not None:
        return present_stages(stages, schedule)
    return range(max(1, min(FIRST_COMPARED, len(schedule) - LAST_STAGES)), len(schedule))
