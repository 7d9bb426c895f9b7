"""`nextscale demo`, mostly on a tiny model in the place of the one in the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nextscale.cli.demo import ON_CPU, PROMPTS, PUBLISHED, MethodImages, RowMaker, decibels, row_table, sheet
from PIL import Image, ImageFont
from typer.testing import CliRunner, Result

from nextscale import Schedule
from nextscale.cli import app
from nextscale.cli import old_options as options
from nextscale.cli import old_parse as parse
from nextscale.cli.old_parse import settled_method
from nextscale.cli.show import FONT_SIZE, MARGIN, darkened, wrapped
from nextscale.io import to_pil
from nextscale.loading import presets
from nextscale.loading.presets import NANO
from nextscale.methods import Method, resolve_method
from nextscale.output import Output
from tests.helpers import tiny
from tests.helpers.tiny_profiles import FAST, NEAR, POINTS, point, profile_of

SPEC = tiny.SPECS["infinity"]
HEIGHT, WIDTH = 8, 6  # pixels of its images


@pytest.fixture(autouse=True)
def tiny_nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The demo runs a tiny model under nano's name, in an empty folder, on a machine without profiles."""
    monkeypatch.setitem(presets.MODELS, NANO.name, SPEC)
    monkeypatch.setattr(parse, "profile_folders", lambda *_: [tmp_path / "weights"])
    monkeypatch.setattr(options, "load", lambda _name, **_: tiny.shared_pipeline("infinity"))
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
    assert table[2][3].startswith("(") and table[2][4] == "to", "the range of the rounds"
    cells = [stage.cells for stage in tiny.INFINITY_SCHEDULE]
    assert [row[-3 if "dB" in row else -1] for row in table[1:]] == [f"{100 * sum(cells[:run]) / sum(cells):.0f}%" for run in (4, 3, 2)]
    assert table[3][-1] == "dB"
    assert f"8 images of {HEIGHT}x{WIDTH} per row, on cpu (eager)" in result.stdout
    assert "The images, and where each method computed (bright): demo.png" in result.stdout
    with Image.open("demo.png") as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")


def test_rows_show_the_images_of_the_same_seeds() -> None:
    Path("prompts.txt").write_text("a cat\na dog\na fish\na bird\na horse\n")
    assert run("--prompts", "prompts.txt", "--seed", 7, *SKIPPING).exit_code == 0
    with Image.open("demo.png") as picture:
        drawn = np.asarray(picture)
    pipeline, prompts = tiny.shared_pipeline("infinity"), ["a cat", "a dog", "a fish", "a bird", "a horse"]
    accelerated = pipeline(prompts, seed=7, method="skip:last=1", compute_mask=True)
    columns = (pipeline(prompts, seed=7).images, accelerated.images, darkened(accelerated.images, accelerated.compute_mask or ()))
    for column, images in enumerate(columns):
        for row, image in enumerate(reversed(images)):  # from below
            bottom = drawn.shape[0] - row * (HEIGHT + FONT_SIZE + 2 * MARGIN)
            shown = drawn[bottom - HEIGHT : bottom, column * WIDTH : (column + 1) * WIDTH].astype(int)
            assert abs(shown - np.asarray(image).astype(int)).max() <= 1  # a batch rounds as its images alone do, to a level
    assert np.asarray(columns[2][0]).mean() < np.asarray(columns[1][0]).mean()  # darker: a stage was left out


@pytest.fixture
def profile_beside(tmp_path: Path) -> Path:
    """A profile of the demo's model, beside its weights."""
    file = tmp_path / "weights" / "a.profile.json"
    profile_of(tiny.shared_pipeline("infinity"), points=(*POINTS, point("skip:last=2", 4.0, 0.4))).save(file)
    return file


def shown_rows(result: Result) -> list[str]:
    """The names of the rows besides dense."""
    assert result.exit_code == 0, result.stderr
    return [re.split(r"\s{2,}", line)[0] for line in result.stdout.splitlines() if line.endswith("dB")]


def test_two_points_of_the_profile_on_few_images(profile_beside: Path) -> None:
    result = run("--device", "cpu")
    assert shown_rows(result) == ["auto:lpips=0.05", "auto:speedup=3"]
    assert f"{ON_CPU} images of {HEIGHT}x{WIDTH} per row" in result.stdout
    assert f"auto:lpips=0.05 is {resolve_method(NEAR).label}: 1.50x at LPIPS 0.030 in the profile.\n" in result.stdout
    assert "auto:speedup=3 is SkipStages(last=2): 4.00x at LPIPS 0.400 in the profile.\n" in result.stdout
    assert "measured on tiny-infinity at 8x6, batch 2" in result.stdout
    assert "speedups above are measured here and now" in result.stdout


def test_the_largest_profile_gives_the_size(profile_beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    larger = Schedule(((1, 1), (2, 2), (6, 4), (8, 6)))
    asked = []

    class TwoSizes:
        def choose(self, size: object, aspect: object) -> Schedule:
            asked.append(size)
            return larger if size == (16, 12) else tiny.INFINITY_SCHEDULE

    profile_of(tiny.shared_pipeline("infinity"), schedule=larger).save(profile_beside.with_name("b.profile.json"))
    spec = replace(SPEC, settings=replace(SPEC.settings, schedules=TwoSizes()))
    monkeypatch.setitem(presets.MODELS, NANO.name, spec)
    assert f"{ON_CPU} images of 16x12 per row" in run("--device", "cpu").stdout
    assert asked == [(16, 12)]
    assert f"{ON_CPU} images of 8x6 per row" in run("--device", "cpu", "--size", "8x6").stdout


def test_without_a_profile_it_says_so_and_shows_published_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.cli.demo.PUBLISHED", ("skip:last=1", "skip:last=2"))
    result = run("--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert len([line for line in result.stdout.splitlines() if line.endswith("dB")]) == 2
    assert "These are published settings, which were found for other models" in result.stdout
    assert "`nextscale tune tiny-infinity --size 8x6 --batch 8 --device cpu`" in result.stdout


def test_a_profile_with_one_point_near_enough(profile_beside: Path) -> None:
    profile_of(tiny.shared_pipeline("infinity"), points=(point(FAST, 2.5, 0.09), point("skip:last=2", 4.0, 0.4))).save(profile_beside)
    assert shown_rows(run("--device", "cpu")) == ["auto:speedup=3"]


def test_a_profile_without_a_fast_point_shows_its_fastest(profile_beside: Path) -> None:
    profile_of(tiny.shared_pipeline("infinity"), points=POINTS).save(profile_beside)
    assert shown_rows(run("--device", "cpu")) == ["auto:lpips=0.05", "the fastest point"]
    profile_of(tiny.shared_pipeline("infinity"), points=POINTS[:1]).save(profile_beside)
    assert shown_rows(run("--device", "cpu")) == ["auto:lpips=0.05"]


def test_batches_are_those_of_the_profile_unless_given(profile_beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    monkeypatch.setattr("nextscale.cli.demo.RowMaker.warm_up", lambda maker, _: batches.append(maker.batch))
    run("--device", "cpu")
    run("--device", "cpu", "--batch", 3)
    profile_beside.unlink()
    run(*SKIPPING)
    assert batches == [2, 3, 4]


def test_prompts_of_a_file_are_all_shown(profile_beside: Path) -> None:
    Path("prompts.txt").write_text("a cat\na dog\na fish\n")
    assert "3 images of 8x6 per row" in run("--device", "cpu", "--prompts", "prompts.txt").stdout


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
        (("-m", "var-d16"), "var-d16 takes class numbers: pass --prompts FILE"),
        (("-m", "var-d17"), "did you mean var-d16"),
    ],
)
def test_refusals_leave_nothing_behind(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    assert message in refusal(*(arguments if "--method" in arguments else (*SKIPPING, *arguments)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("side", [256, 512])
def test_its_methods_fit_the_model_in_the_package(side: int) -> None:
    for method in PUBLISHED:
        settled_method(resolve_method(method), NANO, NANO.settings.schedules.choose(side, None))
    assert len(set(PROMPTS)) == 8


def test_joined_methods_are_one_row() -> None:
    result = run("--method", "tome+skip:last=1")
    assert result.exit_code == 0, result.stderr
    assert "ToMe + SkipStages(last=1)" in result.stdout
    assert len([line for line in result.stdout.splitlines() if "dB" in line]) == 1


def row(
    pixels: torch.Tensor,
    cost_shares: tuple[float, ...],
    batches: tuple[int, ...],
    padding: float = 0.0,
    seconds: tuple[float, ...] | None = None,
) -> MethodImages:
    """One whose calls ran half of their tokens, and took a second each where it is not said."""
    stages = (SimpleNamespace(height=2, width=2, computed=2.0),)
    reports = tuple(
        SimpleNamespace(
            method="m",
            seconds=took,
            cost_share=share,
            stages=stages,
            padding=padding,
            seeds=(0,) * images,
            size=tuple(pixels.shape[2:]),
        )
        for share, images, took in zip(cost_shares, batches, seconds or (1.0,) * len(batches), strict=True)
    )
    masks = (torch.full((len(pixels), 2, 2), 0.5),)
    return MethodImages(pixels, masks, reports)  # type: ignore[arg-type]


def test_shares_are_means_over_images_and_times_medians_of_rounds() -> None:
    five = row(torch.zeros(5, 3, 4, 4), (1.0, 0.5), (4, 1))
    assert (five.cost_share, five.tokens_share) == (0.9, 0.5)
    dense = row(torch.zeros(2, 3, 4, 4), (1.0,) * 3, (2,) * 3, seconds=(8.0, 40.0, 8.0))
    quick = row(torch.zeros(2, 3, 4, 4), (0.5,) * 3, (2,) * 3, seconds=(4.0, 20.0, 2.0))
    assert (dense.seconds["median"], dense.seconds["high"]) == (4, 20), "of an image"
    assert [quick.speedup(dense)[name] for name in ("low", "median", "high")] == [2, 2, 4], "each with the dense call of its round"
    assert list(row_table([dense, quick], None).columns[2].cells) == ["1.00", "2.00 (2.00 to 4.00)"]


@pytest.mark.parametrize(("slow", "said"), [(1.2, False), (1.5, True)])
def test_uneven_rounds_are_said(slow: float, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    even = row(torch.zeros(8, 3, HEIGHT, WIDTH), (1.0,) * 3, (1,) * 3)
    uneven = row(torch.ones(8, 3, HEIGHT, WIDTH), (0.5,) * 3, (1,) * 3, seconds=(1.0, slow, 1.0))
    for one in (even, uneven):
        for report in one.reports:
            vars(report).update(device="cpu", engine="eager")
    monkeypatch.setattr("nextscale.cli.demo.RowMaker.rows", lambda *_: [even, uneven])
    assert ("Rounds differ by more than a third" in run(*SKIPPING, "--device", "cpu").stdout) == said


@pytest.mark.parametrize(("prompts", "batch", "calls"), [(2, 1, [0, 1, 0, 1]), (1, 4, [0, 0, 0]), (5, 1, [0, 1, 2, 3, 4])])
def test_methods_take_turns_in_three_rounds_or_more_after_a_warm_up(prompts: int, batch: int, calls: list[int]) -> None:
    pipeline, told, made = tiny.shared_pipeline("infinity"), [], []

    class Counted(SimpleNamespace):
        def __call__(self, *given: object, seed: int, method: Method, **more: object) -> Output:
            made.append((seed, method.label))
            return pipeline(*given, seed=seed, method=method, **more)  # type: ignore[arg-type]

    maker = RowMaker(
        Counted(model=pipeline.model),  # type: ignore[arg-type]
        ["a cat"] * prompts,
        tiny.INFINITY_SCHEDULE,
        0,
        batch,
        lambda name, share: told.append(share),
    )
    dense, skip = maker.rows([("", Method()), ("fast", resolve_method("skip:last=1"))])
    (warm, _), *turns = [(seed, label) for seed, label in made]
    assert warm == 0 and made[0][1] == "SkipStages(last=1)"
    assert [seed for seed, _ in turns] == [seed for seed in calls for _ in range(2)]
    assert [label for _, label in turns] == ["dense", "SkipStages(last=1)"] * len(calls)
    assert len(dense.pixels) == len(skip.pixels) == prompts and len(dense.reports) == len(calls)
    assert told == sorted(told) and told[0] == 0 and told[-1] < 1


def test_likeness() -> None:
    assert decibels(torch.tensor([float("inf"), float("inf"), 20.0])) == "same"
    assert decibels(torch.tensor([float("inf"), 21.0, 20.0])) == "21.0 dB"


def test_lpips_is_a_column_where_it_is_known() -> None:
    rows = [row(torch.full((2, 3, 4, 4), level), (1.0,), (2,)) for level in (0.0, 0.5)]
    headings = [column.header for column in row_table(rows, None).columns]
    table = row_table(rows, lambda a, b: (a - b).abs().mean(dim=(1, 2, 3)))  # type: ignore[arg-type]
    assert [column.header for column in table.columns] == [*headings, "LPIPS"]
    assert list(table.columns[-1].cells) == ["", "0.500"]


def test_padding_is_a_column_where_there_is_any() -> None:
    rows = [row(torch.full((2, 3, 4, 4), level), (1.0,), (2,), padding=level) for level in (0.0, 0.25)]
    assert "padding" not in [column.header for column in row_table(rows[:1], None).columns]
    columns = {column.header: list(column.cells) for column in row_table(rows, None).columns}
    assert columns["padding"] == ["0%", "25%"]
    assert columns["PSNR to dense"][1].endswith("dB")


def test_headings_stay_in_their_columns() -> None:
    font = ImageFont.load_default(FONT_SIZE)
    text = "a simple cartoon emoji of a penguin in twitter style"
    lines = wrapped(text, font, 150)
    assert len(lines) > 2
    assert " ".join(lines) == text
    assert all(font.getlength(line) <= 150 for line in lines)
    assert wrapped("unbreakable words", font, 10) == ["unbreakable", "words"]


def test_a_narrow_sheet_has_room_for_its_titles() -> None:
    pixels = torch.zeros(1, 3, 4, 4)
    picture = sheet(["a prompt that is longer than its images are wide"], [row(pixels, (1.0,), (1,))])
    assert picture.width > 300
    assert picture.crop((0, picture.height - 4, 4, picture.height)).tobytes() == to_pil(pixels)[0].tobytes()
