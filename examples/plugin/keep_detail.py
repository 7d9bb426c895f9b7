"""A method as a plug-in: late stages compute only the cells that differ most from those around them."""

from dataclasses import dataclass

from torch.nn.functional import avg_pool2d

from nextscale import Method, MethodRun, StagePlan
from nextscale.methods import RunSetup
from nextscale.validation import is_fraction, require


@dataclass(frozen=True)
class KeepDetail(Method):
    """Computes a share of the cells of the last stages: those that differ most from the cells around them."""

    share: float = 0.5
    last: int = 2

    exclusive = frozenset({"tokens"})  # no other method of a request may select tokens

    def __post_init__(self):
        require(is_fraction(self.share, above_zero=True), "share", "above 0 and at most 1", self.share)

    def forecast(self, model, schedule, guided=True, kept=1.0):
        require(0 <= self.last < len(schedule), "last", f"from 0 to {len(schedule) - 1} for this schedule", self.last)
        dense = len(schedule) - self.last
        reduced = (StagePlan(num_tokens=max(1, round(self.share * stage.cells))) for stage in schedule.stages[dense:])
        return (StagePlan(),) * dense + tuple(reduced)

    def start(self, setup):
        return KeepDetailRun(setup)


@dataclass
class KeepDetailRun(MethodRun):
    setup: RunSetup

    def select_tokens(self, x, tokens):
        num_tokens = self.setup.plans[tokens.stage.index].num_tokens
        if num_tokens is None:
            return tokens
        images = x[: self.setup.batch].float()  # both rows of a guided pair keep the same cells, by the conditional row's score
        grid = images.transpose(1, 2).unflatten(2, tokens.stage.size)  # [B, C, height, width]
        detail = grid - avg_pool2d(grid, 3, stride=1, padding=1, count_include_pad=False)
        return tokens.top(detail.square().sum(dim=1).flatten(1), num_tokens)[1]
