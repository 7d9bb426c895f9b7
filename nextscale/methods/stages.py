"""The stages at which methods act, as callers give them: checked indices, and what they are where none are given."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SettingError
from ..stage import Schedule
from ..validation import is_int

LAST_STAGES = 3
FIRST_COMPARED = 10  # the stage from which on SparseVAR's appendix B reduces tokens: 40 x 40 on Infinity, 27 x 27 on HART


def stage_indices(stages: Sequence[int]) -> tuple[int, ...]:
    """Returns checked stage indices in order, each once."""
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not all(is_int(stage) for stage in stages):
        raise SettingError(f"stages is a tuple of stage indices, 0 or more; got {stages!r}")
    return tuple(sorted({int(stage) for stage in stages}))


def present_stages(stages: Sequence[int], schedule: Schedule, method: str) -> Sequence[int]:
    """Returns these stage indices; raises SettingError if the schedule does not have them."""
    absent = [stage for stage in stages if stage >= len(schedule)]
    if absent:
        raise SettingError(f"{method}: there is no stage {absent[0]}; this schedule has stages 0 to {len(schedule) - 1}")
    return stages


def late_stages(stages: Sequence[int] | None, schedule: Schedule, method: str) -> Sequence[int]:
    """Returns checked stage indices; None is from SparseVAR's first reduced stage on, at least the last three, so that curves compare."""
    if stages is not None:
        return present_stages(stages, schedule, method)
    return range(max(1, min(FIRST_COMPARED, len(schedule) - LAST_STAGES)), len(schedule))
