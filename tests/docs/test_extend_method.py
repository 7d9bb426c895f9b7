"""The plug-in of docs/extend/method.md runs on every family."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from nextscale.errors import SettingError
from nextscale.guidance import StageGuidance
from nextscale.methods import METHODS, Method, MethodRun, RunSetup
from nextscale.methods.registry import ENTRY_POINTS
from nextscale.sampling import ImageRng
from nextscale.stage import Schedule, Tokens
from tests.helpers import tiny
from tests.helpers.toy_methods import entered
from tests.methods.test_method import keeping

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "extend" / "method.md"
FOLDER = PROJECT / "examples" / "plugin"


@cache
def example() -> type[Method]:
    spec = spec_from_file_location("keep_detail", FOLDER / "keep_detail.py")
    module = module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.KeepDetail


@pytest.fixture
def registered() -> Iterator[None]:
    METHODS["keepdetail"] = example()
    yield
    METHODS.pop("keepdetail")


def test_it_is_complete_in_less_than_fifty_lines() -> None:
    assert len((FOLDER / "keep_detail.py").read_text().splitlines()) < 55


def test_its_package_registers_its_name() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    name, where = next(iter(project["entry-points"][ENTRY_POINTS].items()))
    assert (name, where) == ("keepdetail", f"keep_detail:{example().__name__}")


def test_the_page_names_every_hook() -> None:
    hooks = {name for name in vars(MethodRun) if not name.startswith("_")}
    settings = {name for name in vars(Method) if not name.startswith("_")} - {"label"}
    assert {name for name in hooks | settings if f"`{name}" not in PAGE.read_text()} == set()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_zero_strength_is_dense_bit_for_bit(family: str) -> None:
    keep_detail, prompt, pipeline = example(), tiny.prompts(family, 2), tiny.shared_pipeline(family)
    tiny.assert_same_bits(pipeline(prompt, seed=3, method=keep_detail(share=1)), pipeline(prompt, seed=3))
    tiny.assert_same_bits(pipeline(prompt, seed=3, method=keep_detail(last=0)), pipeline(prompt, seed=3))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_batch_equals_its_images_alone(family: str) -> None:
    pipeline, method = tiny.shared_pipeline(family), example()(share=0.4)
    together = pipeline(tiny.prompts(family, 2), seed=[3, 9], method=method)
    assert {stage.tokens for stage in together.report.stages[-2:]} != {stage.cells for stage in tiny.schedule_of(family)}
    for image, seed in enumerate((3, 9)):
        alone = pipeline(tiny.one_prompt(family, image), seed=seed, method=method)
        tiny.assert_close(family, tiny.one_image(together, image), alone)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dropping_a_cfg_branch_at_guidance_one_changes_nothing(family: str) -> None:
    pipeline, stages = tiny.shared_pipeline(family), len(tiny.schedule_of(family))
    guidance = StageGuidance(values=(1.0,) * stages + (2.0,))
    method = example()(share=0.4)
    both = pipeline(tiny.prompts(family, 2), seed=4, guidance=guidance, method=method)
    one = pipeline(tiny.prompts(family, 2), seed=4, guidance=guidance, method=[method, keeping("cond", 1)])
    tiny.assert_close(family, one, both)


def test_it_is_known_by_name(registered: None) -> None:
    pipeline, method = tiny.shared_pipeline("var"), example()(share=0.3)
    tiny.assert_same_bits(pipeline(1, seed=2, method="keepdetail:share=0.3"), pipeline(1, seed=2, method=method))


@pytest.mark.parametrize("settings", [{"share": 0}, {"share": 1.5}])
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="share"):
        example()(**settings)


@pytest.mark.parametrize("last", [-1, 4])
def test_stages_that_do_not_exist_are_refused_before_anything_runs(last: int) -> None:
    with pytest.raises(SettingError, match="last"):
        tiny.fresh_pipeline("var").accelerate(example()(last=last))


def test_two_methods_that_reduce_stages_are_refused() -> None:
    with pytest.raises(SettingError, match="KeepDetail and SparseVAR"):
        tiny.fresh_pipeline("var").accelerate([example()(), "sparsevar"])


def test_a_stage_by_hand() -> None:
    """Of the cells 1, 2, 9, 4 the mean is 4: 9 is farthest, then 1."""
    schedule, model, method = Schedule([1, 2]), tiny.shared_pipeline("var").model, example()(share=0.5, last=1)
    plans = method.forecast(model, schedule)
    assert [plan.num_tokens for plan in plans] == [None, 2]
    run = method.start(RunSetup(model, schedule, 1, ImageRng([0], torch.device("cpu")), plans))
    x = torch.tensor([[[1.0], [2.0], [9.0], [4.0]], [[5.0], [6.0], [7.0], [8.0]]])
    kept, tokens = entered(run, x, Tokens(schedule[1]))
    assert tokens.index.tolist() == [[0, 2], [0, 2]]
    assert kept.flatten().tolist() == [1, 9, 5, 7]
