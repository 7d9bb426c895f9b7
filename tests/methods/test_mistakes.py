"""Mistakes of a method's author end in a message that names the method, the hook and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.methods import DENSE, Method, MethodRun, RunSetup, StagePlan
from nextscale.stage import Tokens
from tests.helpers import tiny
from tests.helpers.toy_methods import RunBlocks


@dataclass(frozen=True)
class Own(Method):
    """Reduces the last stage to two tokens, as the run does that a test gives."""

    run: Any = None
    exclusive = frozenset({"tokens"})

    def forecast(self, model: Any, schedule: Any, guided: bool = True, kept: float = 1.0) -> Any:
        return (*(DENSE,) * (len(schedule) - 1), StagePlan(num_tokens=2))

    def start(self, setup: RunSetup) -> Any:
        return self.run


class Plain(Own):
    def forecast(self, model: Any, schedule: Any, guided: bool = True, kept: float = 1.0) -> Any:
        return (DENSE,) * len(schedule)


class FewPlans(Own):
    def forecast(self, model: Any, schedule: Any, guided: bool = True, kept: float = 1.0) -> Any:
        return (DENSE,) * 3


class NoPlans(Own):
    def forecast(self, model: Any, schedule: Any, guided: bool = True, kept: float = 1.0) -> Any:
        pass


class Numbers(Own):
    def forecast(self, model: Any, schedule: Any, guided: bool = True, kept: float = 1.0) -> Any:
        return [0.5] * len(schedule)


class TwoArguments(Own):
    def forecast(self, model: Any, schedule: Any) -> Any:
        return (DENSE,) * len(schedule)


class OtherNames(Own):
    def forecast(self, model: Any, schedule: Any, cfg: bool = True, share: float = 1.0) -> Any:
        return (DENSE,) * len(schedule)


class OneRow(RunBlocks):
    """Drops the unconditional rows."""

    def __call__(self, blocks: Sequence[Any], x: Tensor, tokens: Tokens, ctx: Any) -> Tensor:
        return super().__call__(blocks, x, tokens, ctx)[:1]


class Spanned(Own):
    def forecast(self, model: Any, schedule: Any, guided: bool = True, kept: float = 1.0) -> Any:
        return (*(DENSE,) * (len(schedule) - 1), StagePlan(spans=(OneRow(range(1), "half"),)))


class First(MethodRun):
    """Keeps the first two cells of this number of rows."""

    rows = 2

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        return tokens if tokens.stage.cells < 16 else tokens.take(torch.arange(2).expand(self.rows, -1))


class ThreeRows(First):
    rows = 3


class Pair(MethodRun):
    def select_tokens(self, x: Tensor, tokens: Tokens) -> Any:
        return tokens.top(x[:2, :, 0], len(x[0]))


class FewArguments(MethodRun):
    def select_tokens(self, x: Tensor) -> Any:  # type: ignore[override]
        return x


class LogitsAlone(MethodRun):
    def restore(self, logits: Tensor, tokens: Tokens) -> Any:
        return logits


MISTAKES = [
    (FewPlans(), "FewPlans.forecast must return one StagePlan for each of the 4 stages; got 3 values. StagePlan() is"),
    (NoPlans(), "NoPlans.forecast must return one StagePlan for each of the 4 stages; got NoneType"),
    (Numbers(), "Numbers.forecast must return one StagePlan for each of the 4 stages; got 4 values"),
    (TwoArguments(), "TwoArguments.forecast must take (self, model, schedule, guided, kept); it takes (self, model, schedule)."),
    (OtherNames(), "OtherNames.forecast must take (self, model, schedule, guided, kept); it takes (self, model, schedule, cfg, share)."),
    (Own(), "Own.start must return a MethodRun; got NoneType. End it with `return`."),
    (Own(MethodRun()), "planned with 2 tokens, and 16 entered. `select_tokens` must keep the planned number."),
    (Own(ThreeRows()), "`select_tokens` must choose cells for each of the 2 images or 4 rows (guidance adds one per image); got 3."),
    (Own(Pair()), "Pair.select_tokens must return Tokens; got tuple. `tokens.top(score, count)[1]` has them."),
    (Own(FewArguments()), "FewArguments.select_tokens must take (self, x, tokens); it takes (self, x)."),
    (Plain(LogitsAlone()), "LogitsAlone.restore must return Restored(logits, tokens); got Tensor."),
    (Spanned(MethodRun()), "the span half must return [rows, tokens, channels] [4, 16, 64] as it got; got [1, 16, 64]."),
]


@pytest.mark.parametrize(("method", "message"), MISTAKES, ids=[message.partition(" ")[0] for _, message in MISTAKES])
@pytest.mark.parametrize("combined", [False, True])
def test_a_mistake_is_named_with_its_remedy(method: Method, message: str, combined: bool) -> None:
    with pytest.raises(SettingError) as refused:
        tiny.shared_pipeline("var")([3, 7], method=[method, "dropguidance:first_stage=4"] if combined else method)
    assert message in str(refused.value)


def test_the_same_method_without_the_mistake_runs() -> None:
    assert tiny.shared_pipeline("var")([3, 7], method=Own(First())).report.stages[-1].tokens == 2
