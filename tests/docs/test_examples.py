"""Every program of examples/ runs, as a user would run it, and does what it says."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nextscale
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import NANO
from nextscale.methods import METHODS
from nextscale.pipeline import Pipeline
from tests.helpers import tiny

PROJECT = Path(__file__).parents[2]
EXAMPLES = sorted((PROJECT / "examples").glob("*.py"))
LONGEST = 40  # lines: one idea each

EXPECTED = {
    "compare_methods": ("MACs 100%", "SkipStages(last=1)", "StageVAR"),
    "first_image": ("128x128 pixels", "stage 6: 16x16 tokens"),
    "own_method": ("dense", "Thrifty  ", "Thrifty(last=0)", "rows per stage [2, 2, 2, 1, 1, 1, 0]"),
    "plan_without_weights": ("infinity-2b, 4 images", "fastvar", "GiB"),
    "seeds_and_batches": ("has the codes of the tree alone: True", "seed = "),
    "watch_the_stages": ("stage 6: 16x16", "stopped after the fourth stage"),
}
WRITTEN = {
    "compare_methods": {f"{name}{kind}.png" for name in ("dense", "skip", "sparsevar", "fastvar", "stagevar") for kind in ("", "-mask")},
    "first_image": {"apple.png"},
    "seeds_and_batches": {f"rocket-{seed}.png" for seed in (1, 2, 3)},
    "watch_the_stages": {f"stage{index:02}.png" for index in range(7)},
}


AS_IT_IS = "first_image"  # with nano itself; the others take a smaller model of its sizes


def small_nano(name: str) -> Pipeline:
    assert name == NANO.name
    model = replace(NANO.model, depth=tiny.DEPTH, dim=tiny.WIDTH, heads=tiny.HEADS)  # type: ignore[type-var]
    tokenizer = replace(NANO.tokenizer, channels=32, multipliers=(1, 1, 1, 1))  # type: ignore[type-var]
    return tiny.with_ranks(random_pipeline(replace(NANO, model=model, tokenizer=tokenizer)))


@pytest.fixture
def methods_as_before() -> Iterator[None]:
    """One of the examples registers a method."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def test_all_examples_are_known() -> None:
    assert {example.stem for example in EXAMPLES} == set(EXPECTED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], methods_as_before: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if example.stem != AS_IT_IS:
        monkeypatch.setattr(nextscale, "load", small_nano)
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert all(text in shown for text in EXPECTED[example.stem]), shown
    assert {file.name for file in tmp_path.iterdir()} == WRITTEN.get(example.stem, set())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_is_short_and_says_what_it_shows(example: Path) -> None:
    lines = example.read_text().splitlines()
    assert len(lines) <= LONGEST and lines[0].startswith('"""')
