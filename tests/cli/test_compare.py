"""`nextscale compare`, mostly on a tiny model instead of the one in the package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from typer.testing import Result

from nextscale import Schedule
from nextscale.cli import compare as command
from nextscale.cli import parse
from nextscale.cli.compare import ON_CPU, PROMPTS, PUBLISHED, show_comparison, with_range
from nextscale.cli.show import FONT_SIZE, MARGIN, compared, computed_maps, wrapped
from nextscale.eval.compare import Comparison
from nextscale.eval.results import read_rows
from nextscale.io import to_pil
from nextscale.loading import presets
from nextscale.loading.presets import NANO
from nextscale.methods import resolve_method
from nextscale_research.quality.frontier import frontier_svg
from tests.eval import test_compare as comparing
from tests.helpers import tiny
from tests.helpers.cli import run_cli
from tests.helpers.tiny_profiles import FAST, NEAR, POINTS, point, profile_of

SPEC = tiny.SPECS["infinity"]
HEIGHT, WIDTH = 8, 6  # pixels of its images
SIZE = f"{WIDTH}x{HEIGHT}"


@pytest.fixture(autouse=True)
def tiny_nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model under nano's name, in an empty folder, on a machine without profiles."""
    monkeypatch.setitem(presets.MODELS, NANO.name, SPEC)
    monkeypatch.setattr("nextscale.loading.artifacts.profile_folders", lambda *_: [tmp_path / "weights"])
    monkeypatch.setattr("nextscale.loading.load", tiny_pipeline)
    monkeypatch.chdir(tmp_path)
    yield


def tiny_pipeline(*_: Any, **__: Any) -> Any:
    pipe = tiny.shared_pipeline("infinity")
    profiles = tuple(parse.named_profiles(SPEC).values())
    own = type(pipe)(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, "eager", None, profiles)
    return own


def run(*arguments: object) -> Result:
    return run_cli("compare", *arguments)


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    return result.stderr


SKIPPING = ("--method", "skip:last=1", "--device", "cpu")


def table(result: Result) -> list[list[str]]:
    """The rows of methods, split at two or more spaces."""
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    end = [" images of " in line for line in lines].index(True)
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:end]]


def test_a_table_and_a_picture() -> None:
    result = run(*SKIPPING, "--method", "skip:last=2", "--batch", 2)
    dense, *others = table(result)
    assert dense[0] == "dense" and dense[2:] == ["1.00", "100.0%", "100.0%"]  # nothing to compare with itself
    assert [row[0] for row in others] == ["skip:last=1", "skip:last=2"]
    assert " to " in others[0][2], "the range of the rounds"
    cells = [stage.cells for stage in tiny.INFINITY_SCHEDULE]
    assert [row[4] for row in others] == [f"{100 * sum(cells[:run]) / sum(cells):.1f}%" for run in (3, 2)]
    assert others[1][5].endswith("dB")
    assert f"{ON_CPU} images of {SIZE} per row, batch 2, eager" in result.stdout
    assert "where each method computed (yellow): compare.png" in result.stdout
    assert "Next: nextscale tune -m tiny-infinity" in result.stdout
    with Image.open("compare.png") as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")


def test_rows_show_the_images_of_the_same_seeds() -> None:
    Path("prompts.txt").write_text("a cat\na dog\na fish\na bird\na horse\n")
    assert run("--prompts", "prompts.txt", "--seed", 7, "--batch", 5, *SKIPPING).exit_code == 0
    with Image.open("compare.png") as picture:
        drawn = np.asarray(picture)
    pipeline, prompts = tiny.shared_pipeline("infinity"), ["a cat", "a dog", "a fish", "a bird", "a horse"]
    accelerated = pipeline(prompts, seed=7, method="skip:last=1", compute_mask=True)
    columns = (pipeline(prompts, seed=7).images, accelerated.images, computed_maps(accelerated.images, accelerated.compute_mask or ()))
    top = drawn.shape[0] - len(columns) * (HEIGHT + FONT_SIZE + 2 * MARGIN)
    for row, images in enumerate(columns):
        edge = top + (row + 1) * (FONT_SIZE + 2 * MARGIN) + row * HEIGHT
        for column, image in enumerate(images):
            shown = drawn[edge : edge + HEIGHT, column * WIDTH : (column + 1) * WIDTH].astype(int)
            assert abs(shown - np.asarray(image).astype(int)).max() <= 1  # a batch rounds as its images alone do, to a level
    assert np.asarray(columns[2][0]).mean() < np.asarray(columns[1][0]).mean()  # bluer: a stage was left out


@pytest.fixture
def profile_beside(tmp_path: Path) -> Path:
    """A profile of the model, beside its weights."""
    file = tmp_path / "weights" / "a.profile.json"
    profile_of(tiny.shared_pipeline("infinity"), points=(*POINTS, point("skip:last=2", 4.0, 0.4))).save(file)
    return file


def names(result: Result) -> list[str]:
    return [row[0] for row in table(result)[1:]]


def test_two_points_of_the_profile_on_few_images(profile_beside: Path) -> None:
    result = run("--device", "cpu")
    assert names(result) == ["auto:lpips=0.05", "auto:speedup=3"]
    assert f"{ON_CPU} images of {SIZE} per row, batch 1" in result.stdout
    assert "1.50x at LPIPS 0.030 in the profile of tiny-infinity" in result.stdout
    assert f"as {resolve_method(NEAR).label}\n" in result.stdout


def test_the_largest_profile_gives_the_size(profile_beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    larger = Schedule(((1, 1), (2, 2), (6, 4), (8, 6)))
    asked = []

    class TwoSizes:
        def choose(self, size: object, aspect: object) -> Schedule:
            asked.append(size)
            return larger if size == (16, 12) else tiny.INFINITY_SCHEDULE

    profile_of(tiny.shared_pipeline("infinity"), schedule=larger).save(profile_beside.with_name("b.profile.json"))
    monkeypatch.setitem(presets.MODELS, NANO.name, replace(SPEC, settings=replace(SPEC.settings, schedules=TwoSizes())))
    assert f"{ON_CPU} images of 12x16 per row" in run("--device", "cpu").stdout
    assert asked == [(16, 12)]
    assert f"{ON_CPU} images of {SIZE} per row" in run("--device", "cpu", "--size", SIZE).stdout


def test_without_a_profile_it_says_so_and_shows_published_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PUBLISHED", ("skip:last=1", "skip:last=2"))
    result = run("--device", "cpu")
    assert "Published settings" in result.stdout and "nextscale tune" in result.stdout
    assert result.stdout.count(" dB") == 2


def test_a_profile_with_one_point_near_enough(profile_beside: Path) -> None:
    profile_of(tiny.shared_pipeline("infinity"), points=(point(FAST, 2.5, 0.09), point("skip:last=2", 4.0, 0.4))).save(profile_beside)
    assert names(run("--device", "cpu")) == ["auto:speedup=3"]


def test_a_profile_without_a_fast_point_shows_its_fastest(profile_beside: Path) -> None:
    profile_of(tiny.shared_pipeline("infinity"), points=POINTS).save(profile_beside)
    assert names(run("--device", "cpu")) == ["auto:lpips=0.05", "auto:lpips=1"]
    profile_of(tiny.shared_pipeline("infinity"), points=POINTS[:1]).save(profile_beside)
    assert names(run("--device", "cpu")) == ["auto:lpips=0.05"]


def test_rows_and_a_plot() -> None:
    result = run(*SKIPPING, "--out", "rows.jsonl", "--plot", "plot.svg")
    assert result.exit_code == 0, result.stderr
    dense, skip = read_rows(Path("rows.jsonl"))
    assert (dense["method"], skip["method"], skip["benchmark"]) == ("dense", "skip:last=1", "quality")
    assert run(*SKIPPING, "--out", "rows.jsonl").exit_code == 0
    assert len(read_rows(Path("rows.jsonl"))) == 4, "rows are added"
    assert Path("plot.svg").read_text() == frontier_svg([dense, skip])


def test_the_standard_list_has_a_row_for_methods_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.methods.registry.standard_methods", lambda stages: {"one": "skip:last=1", "all": f"skip:last={stages}"})
    result = run("--method", "standard", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "one" in result.stdout and "all did not run: SettingError: cannot skip" in result.stdout


def test_only_its_own_file_is_overwritten() -> None:
    Path("compare.png").write_text("of the last run")
    Path("mine.png").write_text("mine")
    assert run(*SKIPPING).exit_code == 0
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")
    assert "mine.png exists already" in refusal(*SKIPPING, "--sheet", "mine.png")
    assert Path("mine.png").read_text() == "mine"
    assert run(*SKIPPING, "--sheet", "mine.png", "--force").exit_code == 0
    assert Path("mine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "skp"), "unknown method 'skp'"),
        (("--method", "skip:last=4"), "cannot skip 4 of 4 stages"),
        (("--method", "skip:last=1+skip:last=9"), "cannot skip 9 of 4 stages"),
        (("--sheet", "compare.gif"), "--sheet must end in"),
        (("--prompts", "absent.txt"), "absent.txt"),
        (("--device", "gpu"), "cpu, cuda, cuda:N"),
        (("--seed", -1), "--seed"),
        (("--limit", 3), "--prompts FILE"),
        (("-m", "var-d16"), "var-d16 takes class numbers"),
        (("-m", "var-d17"), "did you mean var-d16"),
    ],
)
def test_refusals_leave_nothing_behind(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    assert message in refusal(*(arguments if "--method" in arguments else ("--method", "skip:last=1", *arguments)))
    assert list(tmp_path.iterdir()) == []


def test_rows_are_not_added_to_other_files(tmp_path: Path) -> None:
    captions = tmp_path / "captions.jsonl"
    captions.write_text('{"caption": "a bee"}\n')
    assert "--out" in refusal("--prompts", captions, *SKIPPING, "--out", captions)
    assert captions.read_text() == '{"caption": "a bee"}\n'


@pytest.mark.parametrize("side", [256, 512])
def test_its_methods_fit_the_model_in_the_package(side: int) -> None:
    for method in PUBLISHED:
        parse.resolved_method(resolve_method(method), NANO, NANO.settings.schedules.choose(side, None), 1, torch.device("cpu"))
    assert len(set(PROMPTS)) == 8


def test_joined_methods_are_one_row() -> None:
    assert names(run("--method", "tome+skip:last=1", "--device", "cpu")) == ["tome + skip:last=1"]


def test_uneven_rounds_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    def steady(value: float) -> dict[str, float]:
        return dict.fromkeys(("median", "p20", "p80", "low", "high"), value)

    found = comparing.comparison()
    dense, skip = ({**row, "ms_per_image": steady(1000.0), "speedup": steady(2.0)} for row in found.rows[:2])
    show_comparison(Comparison([dense, skip], found.prompts, found.results))
    quiet = capsys.readouterr().out
    uneven = skip | {"speedup": {"median": 2.0, "low": 1.5, "high": 2.1}}
    show_comparison(Comparison([dense, uneven, found.rows[-1]], found.prompts, found.results))
    noisy = capsys.readouterr().out
    assert "Rounds differ" not in quiet and "Rounds differ by more than 33%" in noisy
    assert "2.00 (1.50 to 2.10)" in noisy and "LPIPS" in noisy
    assert "odd did not run: RuntimeError: does not work here" in noisy
    assert with_range(steady(2.0)) == "2.00"
    json.dumps(found.rows, allow_nan=False)


def test_headings_stay_in_their_columns() -> None:
    font = ImageFont.load_default(FONT_SIZE)
    text = "a simple cartoon emoji of a penguin in twitter style"
    lines = wrapped(text, font, 150)
    assert len(lines) > 2
    assert " ".join(lines) == text
    assert all(font.getlength(line) <= 150 for line in lines)
    assert wrapped("unbreakable words", font, 10) == ["unbreakable", "words"]


def test_a_narrow_sheet_has_room_for_its_titles() -> None:
    images = to_pil(torch.zeros(1, 3, 4, 4))
    picture = compared(["a prompt that is longer than its images are wide"], {"a title that is wider than its images": images})
    assert picture.width > 250
    assert picture.crop((0, picture.height - 4, 4, picture.height)).tobytes() == images[0].tobytes()
