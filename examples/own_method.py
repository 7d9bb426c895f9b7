"""A method of one's own: a frozen dataclass whose forecast says what every stage does. For one that picks tokens see docs/."""

from dataclasses import dataclass

import nextscale
from nextscale import Method, Schedule, StagePlan
from nextscale.methods import METHODS, Plans
from nextscale.models import NextScaleModel


@dataclass(frozen=True)
class Thrifty(Method):
    """Skips the last stages, and runs some before them on the conditional rows only, without guidance."""

    last: int = 1
    unguided: int = 3

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        skipped = len(schedule) - self.last
        late = [stage.index >= skipped - self.unguided for stage in schedule]
        return tuple(StagePlan(skip=i >= skipped, cfg_branches="cond" if late[i] and guided else "both") for i in range(len(schedule)))


METHODS["thrifty"] = Thrifty  # for names such as "thrifty:last=2"

pipe = nextscale.load("nano")
for method in ("dense", "thrifty", "thrifty:last=0"):
    report = pipe("a flat icon of a rocket", seed=3, size=128, method=method).report
    rows = [stage.rows for stage in report.stages]
    print(f"{report.method:30} MACs {report.cost_share:4.0%}   rows per stage {rows}")
