"""CoDe (Chen et al., 2025): a large model drafts the first stages, and a small one of the same family refines what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from ..stage import Schedule
from ..validation import is_int, require_flags
from .method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan

if TYPE_CHECKING:
    from ..models.base import NextScaleModel

REFINED = 2  # last stages that are refined: 8 of 10 are drafted
PAIRS = {"var-d30": "var-d16", "flexvar-d24": "flexvar-d16", "star-256": "star-256-d16"}
"""The small model that refines what a large one has drafted. VAR's pair is published, the others are ours. Of Infinity's published sizes
no two share a tokenizer."""

HOTTER, HOT_STAGES = 1.1, 7


def released_sampling(stages: int) -> Mapping[str, Any]:
    """The settings of the released script that samples 50,000 images; guidance is VAR's ramp up to this strength."""
    temperature = tuple(HOTTER if stage < HOT_STAGES else 1.0 for stage in range(stages))
    return MappingProxyType({"guidance": 1.5, "top_k": 600, "top_p": 0.96, "temperature": temperature, "filter_first": True})


@dataclass(frozen=True)
class CoDe(Method):
    """The pipeline's own model drafts the first stages; a smaller model reads them in one pass and generates the others.

    Both models share the tokenizer and the schedule. The drafter's keys and values, which would be largest at the last stages, are gone
    before the refiner begins. There is no acceptance test: what is drafted stays. The published pairs are also tuned for their stages;
    any two models of a family work without.

    The knobs that matter:
    draft: how many stages are drafted. None is all but two, as published (8 of 10; 6 to 9 were tried). All stages is the drafter alone.
    refiner: the name of the small model, which is loaded as the large one was; None is the known partner of the pipeline's model.

    To tinker with:
    as_released: guidance and sampling of the released script, wherever the call gives none: strength 1.5, top_k 600, top_p 0.96, and a
        temperature of 1.1 up to stage 6 that divides the logits after they were filtered.
    """

    draft: int | None = None
    refiner: str | None = None
    as_released: bool = False

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        if self.draft is not None and not is_int(self.draft, 1):
            raise SettingError(f"draft is the number of stages that the large model generates, 1 or more; got {self.draft!r}")
        if self.refiner is not None and not isinstance(self.refiner, str):
            raise SettingError(f"refiner is the name of a model; got {self.refiner!r}")

    def drafted(self, schedule: Schedule) -> int:
        """How many stages are drafted."""
        draft = max(1, len(schedule) - REFINED) if self.draft is None else self.draft
        if draft > len(schedule):
            raise SettingError(f"CoDe: draft {draft} is more than the {len(schedule)} stages of this schedule")
        return draft

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        """What the drafter does."""
        draft = self.drafted(schedule)
        return (DENSE,) * draft + (StagePlan(skip=True),) * (len(schedule) - draft)

    def start(self, setup: RunSetup) -> MethodRun:
        raise SettingError("CoDe runs two models one after the other: pass it as the method of a call, which runs both")
