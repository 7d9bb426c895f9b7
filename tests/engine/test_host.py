"""Results that the host caches between requests to reduce its time per request."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from nextscale import Method, SparseVAR, StageVAR
from nextscale.engine.memory import WeightPointers
from nextscale.errors import PromptError
from nextscale.loading.load import random_pipeline
from nextscale.methods.method import Plans
from nextscale.methods.stagevar_ranks import RankRow, RankTable, identity
from nextscale.models import NextScaleModel
from nextscale.planning import Planner
from nextscale.planning.cost import Workload, request_cost
from nextscale.planning.memory import reserved_bytes
from nextscale.schedules import InfinitySchedules
from nextscale.stage import Schedule
from nextscale.text.features import TextFeatures
from tests.helpers import tiny

CPU = torch.device("cpu")


def walked(*modules: nn.Module) -> tuple[int, ...]:
    def tensors() -> Iterator[torch.Tensor]:
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()

    return tuple(sorted(tensor.data_ptr() for tensor in tensors()))


def test_weights_are_found_wherever_they_are_put() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)))
    other, changes = nn.Linear(3, 3), [WeightPointers(model).now()]
    places = WeightPointers(model, other)
    assert sorted(places.now()) == list(walked(model, other))

    def changed() -> bool:
        changes.append(places.now())
        assert sorted(changes[-1]) == list(walked(model, other))
        return changes[-1] != changes[-2]

    assert changed() and not changed()
    model[0].weight.data = model[0].weight.data.clone()
    assert changed()
    model[1][1].weight = nn.Parameter(torch.zeros(2, 2))
    assert changed()
    model[1][1] = nn.Linear(2, 2)
    assert changed()
    model[1][1].register_buffer("scale", torch.ones(2))
    assert changed()
    del model[1][1].scale
    model.append(nn.Linear(2, 2))
    assert changed() and not changed()


@dataclass(frozen=True)
class Counting(Method):
    """Counts its calls."""

    asked: list[int] | None = None

    def __hash__(self) -> int:
        if self.asked is None:
            raise TypeError("no hash")
        return 1

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        if self.asked is not None:
            self.asked.append(len(schedule))
        return super().forecast(model, schedule, guided, kept)


def test_a_forecast_is_made_once_until_the_model_changes() -> None:
    model, schedule = tiny.fresh_pipeline("var").model, tiny.schedule_of("var")
    planning, method = Planner(model), Counting([])
    for _ in range(3):
        assert planning.forecast(method, schedule, True) == method.forecast(model, schedule)
    assert method.asked == [4, 4, 4, 4]  # three times by the test
    planning.forecast(method, schedule, False)
    planning.forecast(method, Schedule((1, 2)), True)
    assert method.asked[4:] == [4, 2]
    assert planning.forecast(Counting(), schedule, True) == Method().forecast(model, schedule)


def test_a_forecast_follows_the_ranks_of_the_model() -> None:
    model, schedule = tiny.fresh_pipeline("var").model, tiny.schedule_of("var")
    planning, method = Planner(model), StageVAR(alphas={3: 0.96})
    before = planning.forecast(method, schedule, True)
    model.rank_table = RankTable(*identity(model), (RankRow(0.96, 1, (0.5,) * tiny.DEPTH),))
    after = planning.forecast(method, schedule, True)
    assert before != after == method.forecast(model, schedule)


def test_costs_and_bytes_are_those_that_are_counted() -> None:
    model, schedule = tiny.fresh_pipeline("infinity").model, tiny.schedule_of("infinity")
    planning, workload = Planner(model), Workload(tiny.schedule_of("infinity"), 2, text_tokens=8)
    plans = SparseVAR(keep=0.3, first_stage=2).forecast(model, schedule)
    for _ in range(2):
        assert planning.cost(workload) == request_cost(model, workload)
        assert planning.cost(workload, plans) == request_cost(model, workload, plans)
        assert planning.reserved_bytes(schedule, plans, 2, 4, 8) == reserved_bytes(model, schedule, plans, 2, 4, 8)
        model.bfloat16()  # keys take less from now on


@pytest.mark.parametrize("family", tiny.KINDS)
def test_a_pipeline_that_is_dropped_leaves_no_weights_to_the_garbage_collector(family: str) -> None:
    pipe = random_pipeline(tiny.SPECS[family])
    pipe(tiny.prompts(family, 2), method="sparsevar")
    gc.collect()
    parts = [weakref.ref(part) for part in (pipe, pipe.model, pipe.tokenizer)]
    gc.disable()
    try:
        del pipe
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()


def test_features_are_checked_again_when_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda tensor, seen=torch.Tensor.aminmax: (looked.append(tensor), seen(tensor))[1])
    features = TextFeatures((torch.ones(3, 4), torch.ones(2, 4)), pooled=torch.ones(2, 5))
    for _ in range(3):
        TextFeatures.of(features)
    assert len(looked) == 3
    features.rows[1].mul_(2)
    TextFeatures.of(features)
    assert len(looked) == 6
    changes = (
        lambda: features.rows[0][2].fill_(math.inf),
        lambda: features.rows[1].copy_(torch.full((2, 4), math.nan)),
        lambda: setattr(features.pooled, "data", torch.full((2, 5), -math.inf)),
    )
    named = ("features of prompt 0", "features of prompt 1", "pooled text features")
    for change, name, tensor in zip(changes, named, (*features.rows, features.pooled), strict=True):
        change()
        for _ in range(2):
            with pytest.raises(PromptError, match=f"{name} must be finite"):
                TextFeatures.of(features)
        tensor.zero_()
    with torch.inference_mode():
        unwatched = TextFeatures((torch.ones(3, 4),))
    TextFeatures.of(unwatched)
    with torch.inference_mode():
        unwatched.rows[0].fill_(math.nan)
    with pytest.raises(PromptError, match="must be finite"):
        TextFeatures.of(unwatched)


def test_schedules_are_made_once() -> None:
    book = InfinitySchedules()
    assert book.choose((1024, 1024), None) is book.choose("1M", None) is book.choose(None, 1.0)
    assert Schedule((1, 2)) == Schedule((1, 2)) != Schedule((1, 2), extent=(4, 4))


def test_images_are_made_once() -> None:
    out = tiny.shared_pipeline("var")([1, 2], seed=1)
    assert out.images is out.images and len(out.images) == 2
