"""The readers of ScaleKV, SkipVAR and CoDe cases use all settings of a case."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nextscale import Schedule, sampling
from nextscale.schedules import INFINITY_SIZES
from nextscale_research.methods.skipvar_models import Outcome
from tests.parity import code_cases, scalekv_cases, skipvar_cases
from tests.parity.compare import Expected
from tests.parity.infinity_cases import infinity_model, schedule_of
from tests.parity.make_compact import TARGET as COMPACT


def case_of(name: str) -> dict[str, Any]:
    return json.loads((COMPACT / name / "case.json").read_text())


def scalekv_case(stages: int, ratio: float = 1.0, **settings: Any) -> dict[str, Any]:
    case = case_of("scalekv_infinity/rule_depth12")
    case["config"] |= {"scale_schedule": [[1, *size] for size in INFINITY_SIZES[ratio][:stages]], "h_div_w_template": ratio}
    case["scalekv"] |= settings
    return case


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (scalekv_case(13), [7, 8, 9, 10, 11]),
        (scalekv_case(13, 2.0), [7, 8, 9, 10, 11]),
        (scalekv_case(10), [7, 8]),
        (scalekv_case(7, first_compressed_stage=None), []),
        (scalekv_case(13, base_capacity=1000, first_compressed_stage=8), [8, 9, 10, 11]),
    ],
    ids=["13 stages", "2:1", "10 stages", "7 stages", "larger base"],
)
def test_scalekv_compresses_from_the_stage_on_that_a_case_says(case: dict[str, Any], expected: list[int]) -> None:
    config = case["config"]
    model, schedule = infinity_model(config), schedule_of(config["scale_schedule"], config["h_div_w_template"])
    budgets = scalekv_cases.budgets_of(case, len(model.blocks))
    method = scalekv_cases.method_of(model, schedule, budgets, case["scalekv"])
    assert [stage for stage, plan in enumerate(method.forecast(model, schedule)) if plan.kept_keys is not None] == expected


def test_scalekv_has_the_window_and_the_pooling_of_a_case() -> None:
    case = scalekv_case(13, window_size=9, kernel_size=7)
    model = infinity_model(case["config"])
    method = scalekv_cases.method_of(
        model, Schedule([side[1] for side in case["config"]["scale_schedule"]]), {7: (90,) * 12}, case["scalekv"]
    )
    assert (method.window, method.pooling, method.as_released) == (9, 7, True)


@pytest.mark.parametrize("outcome", [Outcome(3, 0), Outcome(0, 2), Outcome(0, 0)])
def test_skipvar_takes_a_decision_that_was_forced(outcome: Outcome) -> None:
    said = {
        "decision_set_used": "0.84",
        "decision_forced": True,
        "outcome_of_this_run": {"skip_last": outcome.skipped, "conditional_only_last": outcome.unguided},
    }
    decisions = skipvar_cases.method_of(said).decisions
    assert decisions(torch.tensor([[0.0, 0.0], [0.3, 0.6]])) == [outcome] * 2 and decisions.outcomes == [outcome]
    unforced = skipvar_cases.method_of(said | {"decision_forced": False}).decisions
    assert len(unforced.outcomes) == 6


@pytest.mark.parametrize("changed", [None, "table.0.84.margin", "table.0.88.uncond"])
def test_skipvar_compares_the_decision_tables_of_a_generation(changed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation, which has other tests, is left out."""
    stored = load_file(COMPACT / "skipvar_infinity/features_and_decisions/case.safetensors")
    tables = {name: tensor for name, tensor in stored.items() if name.startswith("table.")}
    if changed is not None:
        tables[changed][7] += 1
    infinity = skipvar_cases.infinity_cases
    monkeypatch.setattr(infinity, "build", lambda *_: SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(infinity, "generation", lambda *_, **__: infinity.Generation({}, None, None))
    config = {"scale_schedule": [[1, 1, 1], [1, 2, 2]], "h_div_w_template": 1.0, "depth": 1}
    case = {"config": config, "cfg_list": [1.0], "skipvar": {**skipvar_cases.FIXED, "decision_set_used": "0.84"}}
    case |= {"noise_max_abs_other_attention_kernel_and_2_threads": {"logits": 0}, "suggested_tolerance": {"float": "atol 1 + rtol 1"}}
    expected = Expected(tables)
    with nullcontext() if changed is None else pytest.raises(AssertionError, match=changed):
        skipvar_cases.replay_skipvar(COMPACT, case, expected)
        assert expected.finish() == 12


@pytest.mark.parametrize(("stored", "settled"), [([1, 2], [1, 2]), ([0, 2], [0, 2]), ([2, 0], [1, 2])], ids=["same", "near", "far"])
def test_code_settles_draws_at_the_border_alone(stored: list[int], settled: list[int]) -> None:
    """With probabilities 0.5, 0.25, 0.25, the first number is at the border of codes 0 and 1, the second well inside code 2."""
    tensors = {"draft.s0.tokens": torch.tensor([stored]), "draft.s0.uniform": torch.tensor([[0.50005, 0.9]])}
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(1, 2, 3)
    said = pytest.warns(UserWarning, match="1 codes") if stored == settled != [1, 2] else nullcontext()
    with said, code_cases.drawn(Expected(tensors), Schedule((1, 2)), 1, noise=1e-4, seeded=False):
        assert sampling.sample(logits, torch.ones(1, 2, 3)).tolist() == [settled]


def test_code_settles_a_lost_race_that_was_close() -> None:
    tensors = {"draft.s0.tokens": torch.tensor([[1, 1]])}
    logits, noise = torch.zeros(1, 2, 2), torch.tensor([[[1.0, 1.0001], [1.0, 1.1]]])
    with pytest.warns(UserWarning, match="1 codes"), code_cases.drawn(Expected(tensors), Schedule((1, 2)), 1, noise=1e-4, seeded=True):
        assert sampling.sample(logits, noise).tolist() == [[1, 0]]
