"""`nextscale demo`, mostly on a tiny model in the place of the one in the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from typer.testing import CliRunner, Result

from nextscale.accel import resolve_method
from nextscale.cli import app, options
from nextscale.cli.demo import COMPARED, PROMPTS, MethodImages, comparison, decibels, sheet
from nextscale.cli.parse import settled_method
from nextscale.cli.sheet import LETTERS, MARGIN, wrapped
from nextscale.io import to_pil
from nextscale.lab.metrics.files import VARIABLE
from nextscale.loading import presets
from nextscale.loading.presets import NANO

from . import tiny

SPEC = tiny.SPECS["infinity"]
HEIGHT, WIDTH = 8, 6  # pixels of its images


@pytest.fixture(autouse=True)
def tiny_nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The demo runs a tiny model under nano's name, in an empty folder, on a machine without LPIPS."""
    monkeypatch.setitem(presets.MODELS, NANO.name, SPEC)
    monkeypatch.setattr(options, "load", lambda _name, **_: tiny.shared_pipeline("infinity"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no-metrics"))
    monkeypatch.chdir(tmp_path)
    yield


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)], catch_exceptions=False)


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    return result.stderr


SKIPPING = ("--method", "skip:last=1")


def test_a_table_and_a_picture() -> None:
    result = run(*SKIPPING, "--method", "skip:last=2", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    table = [line.split() for line in result.stdout.splitlines()[:4]]
    assert [row[0] for row in table] == ["method", "dense", "SkipStages(last=1)", "SkipStages(last=2)"]
    assert table[1][2:] == ["1.00", "100%", "100%"]  # nothing to compare with itself
    cells = [stage.cells for stage in tiny.INFINITY_SCHEDULE]
    assert [row[4] for row in table[1:]] == [f"{100 * sum(cells[:run]) / sum(cells):.0f}%" for run in (4, 3, 2)]
    assert table[3][-1] == "dB"
    assert f"8 images of {HEIGHT}x{WIDTH} per row, on cpu (eager)" in result.stdout
    assert "LPIPS is shown as well" in result.stdout
    assert "The images: demo.png" in result.stdout
    with Image.open("demo.png") as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")


def test_rows_show_the_images_of_the_same_seeds() -> None:
    Path("prompts.txt").write_text("a cat\na dog\na fish\na bird\na horse\n")
    assert run("--prompts", "prompts.txt", "--seed", 7, *SKIPPING).exit_code == 0
    with Image.open("demo.png") as picture:
        drawn = np.asarray(picture)
    pipeline, prompts = tiny.shared_pipeline("infinity"), ["a cat", "a dog", "a fish", "a bird", "a horse"]
    for row, method in enumerate(["skip:last=1", "dense"]):  # from below
        bottom = drawn.shape[0] - row * (HEIGHT + LETTERS + 2 * MARGIN)
        for column, image in enumerate(pipeline(prompts, seed=7, method=method).images):
            shown = drawn[bottom - HEIGHT : bottom, column * WIDTH : (column + 1) * WIDTH].astype(int)
            assert abs(shown - np.asarray(image).astype(int)).max() <= 1  # a batch rounds as its images alone do, to a level


def test_only_its_own_file_is_overwritten() -> None:
    Path("demo.png").write_text("of the last run")
    Path("mine.png").write_text("mine")
    assert run(*SKIPPING).exit_code == 0
    assert Path("demo.png").read_bytes().startswith(b"\x89PNG")
    assert "not overwriting mine.png" in refusal(*SKIPPING, "--out", "mine.png")
    assert Path("mine.png").read_text() == "mine"
    assert run(*SKIPPING, "--out", "mine.png", "--force").exit_code == 0
    assert Path("mine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "skp"), "unknown method 'skp'"),
        (("--method", "skip:last=4"), "cannot skip 4 of 4 stages"),
        (("--method", "skip:last=1+skip:last=9"), "cannot skip 9 of 4 stages"),
        (("--out", "demo.gif"), "--out demo.gif: give a name that ends in .png"),
        (("--prompts", "absent.txt"), "absent.txt"),
        (("--device", "gpu"), "choose cpu, cuda or cuda:N"),
        (("--seed", -1), "--seed"),
        (("--limit", 3), "add --prompts FILE"),
        (("--metrics", "nowhere"), "the metric network"),
        (("-m", "var-d16"), "var-d16 takes class numbers: pass --prompts FILE"),
        (("-m", "var-d17"), "did you mean var-d16"),
    ],
)
def test_refusals_leave_nothing_behind(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    assert message in refusal(*(arguments if "--method" in arguments else (*SKIPPING, *arguments)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("side", [256, 512])
def test_its_methods_fit_the_model_in_the_package(side: int) -> None:
    for method in COMPARED:
        settled_method(resolve_method(method), NANO, NANO.settings.schedules.choose(side, None))
    assert len(set(PROMPTS)) == 8


def test_joined_methods_are_one_row() -> None:
    result = run("--method", "tome+skip:last=1")
    assert result.exit_code == 0, result.stderr
    assert "ToMe + SkipStages(last=1)" in result.stdout
    assert len([line for line in result.stdout.splitlines() if "dB" in line]) == 1


def row(pixels: torch.Tensor, cost_shares: tuple[float, ...], batches: tuple[int, ...], padding: float = 0.0) -> MethodImages:
    """One whose calls took a second each and ran half of their tokens."""
    stages = (SimpleNamespace(height=2, width=2, computed=2.0),)
    reports = tuple(
        SimpleNamespace(
            method="m",
            seconds=1.0,
            cost_share=share,
            stages=stages,
            padding=padding,
            seeds=(0,) * images,
            size=tuple(pixels.shape[2:]),
        )
        for share, images in zip(cost_shares, batches, strict=True)
    )
    return MethodImages(pixels, reports)  # type: ignore[arg-type]


def test_numbers_are_means_over_images() -> None:
    five = row(torch.zeros(5, 3, 4, 4), (1.0, 0.5), (4, 1))
    assert (five.seconds, five.cost_share, five.tokens_share) == (0.4, 0.9, 0.5)


def test_likeness() -> None:
    assert decibels(torch.tensor([float("inf"), float("inf"), 20.0])) == "same"
    assert decibels(torch.tensor([float("inf"), 21.0, 20.0])) == "21.0 dB"


def test_lpips_is_a_column_where_it_is_known() -> None:
    rows = [row(torch.full((2, 3, 4, 4), level), (1.0,), (2,)) for level in (0.0, 0.5)]
    headings = [column.header for column in comparison(rows, None).columns]
    table = comparison(rows, lambda a, b: (a - b).abs().mean(dim=(1, 2, 3)))  # type: ignore[arg-type]
    assert [column.header for column in table.columns] == [*headings, "LPIPS"]
    assert list(table.columns[-1].cells) == ["", "0.500"]


def test_padding_is_a_column_where_there_is_any() -> None:
    rows = [row(torch.full((2, 3, 4, 4), level), (1.0,), (2,), padding=level) for level in (0.0, 0.25)]
    assert "padding" not in [column.header for column in comparison(rows[:1], None).columns]
    columns = {column.header: list(column.cells) for column in comparison(rows, None).columns}
    assert columns["padding"] == ["0%", "25%"]
    assert columns["PSNR to dense"][1].endswith("dB")


def test_headings_stay_in_their_columns() -> None:
    font = ImageFont.load_default(LETTERS)
    text = "a simple cartoon emoji of a penguin in twitter style"
    lines = wrapped(text, font, 150)
    assert len(lines) > 2
    assert " ".join(lines) == text
    assert all(font.getlength(line) <= 150 for line in lines)
    assert wrapped("unbreakable words", font, 10) == ["unbreakable", "words"]


def test_a_narrow_sheet_has_room_for_its_titles() -> None:
    pixels = torch.zeros(1, 3, 4, 4)
    picture = sheet(["x"], [row(pixels, (1.0,), (1,))])
    assert picture.width > 300
    assert picture.crop((0, picture.height - 4, 4, picture.height)).tobytes() == to_pil(pixels)[0].tobytes()
