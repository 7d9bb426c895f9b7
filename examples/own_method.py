"""A method of one's own: a frozen dataclass whose forecast says what every stage does. For one that picks tokens see docs/."""

from dataclasses import dataclass
from typing import Any

import nextscale
from nextscale import SkipStages, StagePlan
from nextscale.accel import METHODS


@dataclass(frozen=True)
class Thrifty(SkipStages):
    """Skips the last stages, and runs some before them on the conditional rows alone, that is without guidance."""

    last: int = 1
    unguided: int = 3

    def forecast(self, model: Any, schedule: nextscale.Schedule, *args: Any, **kwargs: Any) -> tuple[StagePlan, ...]:
        plans = super().forecast(model, schedule, *args, **kwargs)
        first = len(schedule) - self.last - self.unguided
        return tuple(plan if plan.skip or i < first else StagePlan(cfg_branches="cond") for i, plan in enumerate(plans))


METHODS["thrifty"] = Thrifty  # for names such as "thrifty:last=2"

pipe = nextscale.load("nano")
for method in ("dense", "thrifty", "thrifty:last=0"):
    report = pipe("a flat icon of a rocket", seed=3, size=128, method=method).report
    rows = [stage.rows for stage in report.stages]
    print(f"{report.method:30} MACs {report.cost_share:4.0%}   rows per stage {rows}")
