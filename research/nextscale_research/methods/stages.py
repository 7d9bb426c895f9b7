"""The late stages at which comparison methods act."""

from __future__ import annotations

from collections.abc import Sequence

from nextscale.methods.skip import present_stages
from nextscale.stage import Schedule

LAST_STAGES = 3
FIRST_COMPARED = 10  # the stage from which on SparseVAR's appendix B reduces tokens: 40 x 40 on Infinity, 27 x 27 on HART


def late_stages(stages: Sequence[int] | None, schedule: Schedule) -> Sequence[int]:
    """Returns checked stage indices; None is from SparseVAR's first reduced stage on, at least the last three, so that curves compare."""
    if stages is not None:
        return present_stages(stages, schedule)
    return range(max(1, min(FIRST_COMPARED, len(schedule) - LAST_STAGES)), len(schedule))
