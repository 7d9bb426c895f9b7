"""The example of docs/extend/method.md is code that works: it is taken from the page and run on every family."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nextscale.errors import SettingError
from nextscale.guidance import StageGuidance
from nextscale.methods import METHODS, Method, MethodRun, RunSetup
from nextscale.sampling import ImageRng
from nextscale.stage import Schedule, Tokens
from tests.helpers import tiny
from tests.helpers.toy_methods import entered
from tests.methods.test_method import keeping

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "method.md"


@cache
def example() -> tuple[str, type[Method]]:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    module = ModuleType("example_of_the_docs")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return code, module.KeepDetail


@pytest.fixture
def registered() -> Iterator[None]:
    METHODS["keepdetail"] = example()[1]
    yield
    METHODS.pop("keepdetail")


def test_it_is_complete_in_less_than_fifty_lines() -> None:
    assert len(example()[0].splitlines()) < 50


def test_the_page_names_every_hook() -> None:
    hooks = {name for name in vars(MethodRun) if not name.startswith("_")}
    settings = {name for name in vars(Method) if not name.startswith("_")} - {"label"}
    assert {name for name in hooks | settings if f"`{name}" not in PAGE.read_text()} == set()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_zero_strength_is_dense_bit_for_bit(family: str) -> None:
    keep_detail, prompt, pipeline = example()[1], tiny.prompts(family, 2), tiny.shared_pipeline(family)
    tiny.assert_same_bits(pipeline(prompt, seed=3, method=keep_detail(share=1)), pipeline(prompt, seed=3))
    tiny.assert_same_bits(pipeline(prompt, seed=3, method=keep_detail(last=0)), pipeline(prompt, seed=3))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_batch_equals_its_images_alone(family: str) -> None:
    pipeline, method = tiny.shared_pipeline(family), example()[1](share=0.4)
    together = pipeline(tiny.prompts(family, 2), seed=[3, 9], method=method)
    assert {stage.tokens for stage in together.report.stages[-2:]} != {stage.cells for stage in tiny.schedule_of(family)}
    for image, seed in enumerate((3, 9)):
        alone = pipeline(tiny.one_prompt(family, image), seed=seed, method=method)
        tiny.assert_close(family, tiny.one_image(together, image), alone)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dropping_a_cfg_branch_at_guidance_one_changes_nothing(family: str) -> None:
    pipeline, stages = tiny.shared_pipeline(family), len(tiny.schedule_of(family))
    guidance = StageGuidance(values=(1.0,) * stages + (2.0,))
    method = example()[1](share=0.4)
    both = pipeline(tiny.prompts(family, 2), seed=4, guidance=guidance, method=method)
    one = pipeline(tiny.prompts(family, 2), seed=4, guidance=guidance, method=[method, keeping("cond", 1)])
    tiny.assert_close(family, one, both)


def test_it_is_known_by_name(registered: None) -> None:
    pipeline, method = tiny.shared_pipeline("var"), example()[1](share=0.3)
    tiny.assert_same_bits(pipeline(1, seed=2, method="keepdetail:share=0.3"), pipeline(1, seed=2, method=method))


@pytest.mark.parametrize("settings", [{"share": 0}, {"share": 1.5}])
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="share"):
        example()[1](**settings)


@pytest.mark.parametrize("last", [-1, 4])
def test_stages_that_do_not_exist_are_refused_before_anything_runs(last: int) -> None:
    with pytest.raises(SettingError, match="last"):
        tiny.fresh_pipeline("var").accelerate(example()[1](last=last))


def test_two_methods_that_reduce_stages_are_refused() -> None:
    with pytest.raises(SettingError, match="KeepDetail and SparseVAR"):
        tiny.fresh_pipeline("var").accelerate([example()[1](), "sparsevar"])


def test_a_stage_by_hand() -> None:
    """Of the cells 1, 2, 9, 4 the mean is 4: 9 is farthest, then 1."""
    schedule, model, method = Schedule([1, 2]), tiny.shared_pipeline("var").model, example()[1](share=0.5, last=1)
    plans = method.forecast(model, schedule)
    assert [plan.num_tokens for plan in plans] == [None, 2]
    run = method.start(RunSetup(model, schedule, 1, ImageRng([0], torch.device("cpu")), plans))
    x = torch.tensor([[[1.0], [2.0], [9.0], [4.0]], [[5.0], [6.0], [7.0], [8.0]]])
    kept, tokens = entered(run, x, Tokens(schedule[1]))
    assert tokens.index.tolist() == [[0, 2], [0, 2]]
    assert kept.flatten().tolist() == [1, 9, 5, 7]
