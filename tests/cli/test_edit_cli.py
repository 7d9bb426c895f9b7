"""`nextscale edit`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.cli import run_cli


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A picture, and a mask that says the same in white and in transparency."""
    levels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    Image.fromarray(levels).save(tmp_path / "picture.png")
    mask = Image.new("L", (128, 128))
    mask.paste(255, (40, 40, 90, 90))
    mask.save(tmp_path / "white.png")
    return tmp_path / "picture.png", tmp_path / "white.png"


def test_an_edit_changes_what_the_mask_shows(files: tuple[Path, Path], tmp_path: Path) -> None:
    picture, mask = files
    out, words = tmp_path / "out.png", ("a red apple", "--seed", 3, "--set", "feather=0", "--set", "grow=1")
    done = run_cli("edit", picture, *words, "--mask", mask, "--out", out)
    assert done.exit_code == 0, done.output
    assert "the white part changes" in done.output and "NearMask" in done.output
    assert "17% of the pixels may change" in done.output
    changed = (np.asarray(Image.open(out)) != np.asarray(Image.open(picture))).any(axis=2)
    rows, columns = np.nonzero(changed)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (39, 90, 39, 90)
    image = Image.open(picture).convert("RGBA")
    image.putalpha(Image.open(mask).point(lambda level: 255 - level))
    image.save(tmp_path / "erased.png")
    again = run_cli("edit", picture, *words, "--mask", tmp_path / "erased.png", "--out", tmp_path / "again.png")
    assert "the transparent part changes" in again.output
    assert np.array_equal(np.asarray(Image.open(tmp_path / "again.png")), np.asarray(Image.open(out)))


def test_an_edit_without_a_mask_and_one_beyond_the_edges(files: tuple[Path, Path], tmp_path: Path) -> None:
    picture, _ = files
    done = run_cli("edit", picture, "a red apple", "--strength", 0.1, "-n", 2, "--out", tmp_path / "all")
    assert done.exit_code == 0, done.output
    assert "100% of the pixels may change, from stage 6 of 7 on" in done.output and len(list((tmp_path / "all").iterdir())) == 2
    wide = tmp_path / "wide.png"
    done = run_cli("edit", picture, "a red apple", "--expand", "0,0,64,0", "--size", "192x128", "--out", wide)
    assert done.exit_code == 2 and "192x128" in done.output
    done = run_cli("edit", picture, "a red apple", "--expand", "0,0,64,0", "--size", "0.02M", "--aspect", "3:2", "--out", wide)
    assert done.exit_code == 0, done.output
    assert Image.open(wide).width > Image.open(wide).height


@pytest.mark.parametrize(
    "words, complaint",
    [
        (("--set", "color=red"), "from_stage"),
        (("--set", "grow"), "KEY=VALUE"),
        (("--set", "grow=-1"), "grow"),
        (("--expand", "1,2,3"), "LEFT,TOP,RIGHT,BOTTOM"),
        (("--expand", "1,2,3,4", "--mask", "white.png"), "one of them"),
        (("--mask", "text.png"), "--mask must be a whole PNG"),
        (("--mask", "none.png"), "none.png"),
        (("--mask", "small.png"), "size of its image, 128x128; got 5x5"),
        (("--strength", "2"), "strength"),
        (("--set", "from_stage=7"), "0 to 6"),
        (("--method", "stagevar:first=1"), "stagevar"),
        (("-m", "no-such"), "no-such"),
    ],
)
def test_what_does_not_fit_is_one_message(
    words: tuple[str, ...], complaint: str, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files[0].parent)
    Path("text.png").write_text("no picture")
    Image.new("L", (5, 5)).save("small.png")
    done = run_cli("edit", "picture.png", "a red apple", *words)
    assert done.exit_code == 2 and done.output.count("error: ") == 1 and complaint in done.output
    assert not Path("out").exists()


def test_a_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:])
    (tmp_path / "half.png").write_bytes((tmp_path / "moving.webp").read_bytes()[:40])
    for name, complaint in (("moving.webp", "2 frames"), ("half.png", "IMAGE must be a whole PNG"), ("none.png", "none.png")):
        done = run_cli("edit", tmp_path / name, "a red apple")
        assert done.exit_code == 2 and complaint in done.output
