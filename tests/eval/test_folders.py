"""`nextscale evaluate`: folders of images, and their distances to dense images of the same names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import Result

from nextscale.eval.folders import ImageFolder
from nextscale.metrics import Lpips
from nextscale.metrics.pixels import psnr
from tests.helpers.cli import run_cli


def run(*arguments: object) -> Result:
    return run_cli("evaluate", *arguments, catch=True)


def picture_folder(folder: Path, count: int, seed: int = 0, side: int = 40) -> ImageFolder:
    folder.mkdir()
    random = np.random.default_rng(seed)
    for number in range(count):
        pixels = random.integers(0, 255, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((2 * side, 2 * side), Image.Resampling.BICUBIC).save(folder / f"{number:03d}.png")
    return ImageFolder(folder)


def test_only_regular_files_are_images(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "images", 2)
    (folder.path / "x.png").mkdir()
    os.mkfifo(folder.path / "y.png")
    (folder.path / "z.png").symlink_to(folder.path / "000.png")
    assert ImageFolder(folder.path).files == [Path("000.png"), Path("001.png"), Path("z.png")]


@pytest.mark.parametrize("twice", ["ours", "theirs"])
def test_a_stem_that_occurs_twice_is_not_paired(twice: str, tmp_path: Path) -> None:
    ours, theirs = picture_folder(tmp_path / "ours", 2), picture_folder(tmp_path / "theirs", 2)
    assert ours.partners(theirs) == theirs.files
    Image.new("RGB", (80, 80)).save(tmp_path / twice / "000.jpg")
    result = run(ours.path, "--dense", theirs.path, "--metric", "psnr", "--device", "cpu")
    assert result.exit_code == 2 and "000.jpg" in result.output and str(tmp_path / twice) in result.output


def test_pairs_into_a_results_file(tmp_path: Path) -> None:
    folder, other = picture_folder(tmp_path / "fast", 6, seed=1).path, picture_folder(tmp_path / "dense", 6, seed=2).path
    out = tmp_path / "results.jsonl"
    out.write_text('{"benchmark": "quality"}\n')
    result = run(folder, "--dense", other, "--out", out, "--device", "cpu")
    assert result.exit_code == 0, result.output
    earlier, row = (json.loads(line) for line in out.read_text().splitlines())
    assert earlier == {"benchmark": "quality"}
    assert row["benchmark"] == "evaluate" and row["folder"] == "fast" and row["dense"] == "dense" and row["size"] == [80, 80]
    pixels = [torch.stack([ImageFolder(each).load(Path(f"{n:03d}.png")) for n in range(6)]).float() / 127.5 - 1 for each in (folder, other)]
    lpips = Lpips.load()(*pixels)
    assert row["lpips"]["value"] == pytest.approx(float(lpips.mean()), abs=1e-5)
    assert row["psnr"]["value"] == pytest.approx(float(psnr(*pixels).mean()), abs=1e-4)
    assert row["ssim"]["low"] < row["ssim"]["value"] < row["ssim"]["high"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda folder: [], "Missing argument"),
        (lambda folder: [folder], "nothing to compare with"),
        (lambda folder: [folder, "--metric", "lpips"], "Add --dense"),
        (lambda folder: [folder, "--metric", "fid"], "Add --real"),
        (lambda folder: [folder, "--metric", "beauty", "--dense", folder], "must be one of"),
        (lambda folder: [folder.parent / "absent", "--dense", folder], "must be a directory"),
        (lambda folder: [folder, "--dense", folder.parent / "other", "--metric", "psnr"], "lacks 1 of the 3"),
    ],
)
def test_wrong_questions_are_refused(arguments: Callable[[Path], list[object]], said: str, tmp_path: Path) -> None:
    picture_folder(tmp_path / "other", 2)
    result = run(*arguments(picture_folder(tmp_path / "images", 3).path))
    assert result.exit_code == 2 and said in result.output
