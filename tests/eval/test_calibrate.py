"""`nextscale calibrate`: constants of methods, measured on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from nextscale.cli.options import ModelOptions
from nextscale.loading import presets
from nextscale.methods.stagevar_ranks import read_rank_table
from tests.helpers import tiny
from tests.helpers.cli import run_cli

WIDE = "1,2,4,8,12,14"


@pytest.fixture
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command on a tiny model."""
    monkeypatch.setitem(presets.MODELS, "tiny", replace(tiny.SPECS["flexvar"], name="tiny"))
    monkeypatch.setattr(ModelOptions, "load", lambda self: tiny.shared_pipeline("flexvar"))
    monkeypatch.chdir(tmp_path)
    shared = ["-m", "tiny", "--size", WIDE, "--device", "cpu"]

    def run(*arguments: object) -> Result:
        method, *rest = map(str, arguments)
        return run_cli("calibrate", method, *rest, *shared, columns=300, catch=True)

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("skipvar", 1), "calibrate-skipvar"),
        (("scalekv", 1), "calibrate-scalekv"),
        (("stagevar", 1, "--set", "alphas=1.5"), "--set alphas must be above 0"),
        (("stagevar", 1, "--set", "share=0.5"), "--set must name alphas or sizes or centered"),
        (("stagevar", 1, "--set", "centered=yes"), "--set centered must be true or false"),
        (("stagevar", 1, "--out", "table.txt"), "--out must end in .json"),
        (("stagevar",), "no prompt"),
        (("fastvar", 1), "fastvar"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(
    arguments: tuple[object, ...], message: str, calibrate: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelOptions, "load", lambda self: pytest.fail("the model was loaded"))
    done = calibrate(*arguments)
    assert done.exit_code == 2 and message in done.output, done.output
    assert not list(tmp_path.iterdir())


def test_rank_tables(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    done = calibrate("stagevar", 1, 2, "--set", "alphas=0.9", "--set", "sizes=1,2,4,8+1,2,3,5", "--out", "own.json")
    assert done.exit_code == 0, done.output
    table = read_rank_table(tmp_path / "own.json")
    assert {row.alpha for row in table.rows} == {0.9} and {64, 25} <= {row.cells for row in table.rows}
    assert table.belongs_to(tiny.shared_pipeline("flexvar").model)
    assert "alpha 0.9 " in done.output and " ± " in done.output and "wrote own.json" in done.output
    done = calibrate("stagevar", 1, 2, "--set", "alphas=0.9", "--set", "sizes=1,2,4,8", "--set", "centered=true", "--out", "centered.json")
    assert done.exit_code == 0 and read_rank_table(tmp_path / "centered.json").about["centered"] is True
    centered = {row.cells: row.ratios for row in read_rank_table(tmp_path / "centered.json").rows}
    assert all(sum(centered[row.cells]) > sum(row.ratios) for row in table.rows if row.cells == 64)
    assert "--force" in calibrate("stagevar", 1, "--out", "own.json").output
    absent = calibrate("stagevar", 1)
    assert absent.exit_code == 2 and "weights of tiny" in absent.output  # beside which the table would be written
