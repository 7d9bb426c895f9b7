"""Commands that measure constants of plug-ins, on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nextscale.cli.options import ModelOptions
from nextscale.loading import presets
from nextscale.stage import Schedule
from nextscale_research.__main__ import app
from tests.helpers import tiny

WIDE = "1,2,4,8,12,14"


@pytest.fixture
def calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command on a tiny model."""
    monkeypatch.setitem(presets.MODELS, "tiny", replace(tiny.SPECS["flexvar"], name="tiny"))
    monkeypatch.setattr(ModelOptions, "load", lambda self: tiny.shared_pipeline("flexvar"))
    monkeypatch.chdir(tmp_path)
    shared = ["-m", "tiny", "--size", WIDE, "--batch", "2", "--device", "cpu"]

    def run(*arguments: object) -> Result:
        return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments), *shared])

    return run


def test_decision_models(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    done = calibrate("calibrate-skipvar", 1, 2, 3, "--similarity", "0.9", "--out", "models.json")
    assert done.exit_code == 0, done.output
    assert "--method skipvar:models=models.json" in done.output
    content = json.loads((tmp_path / "models.json").read_text())
    assert (content["model"], content["images"], content["similarity"]) == ("tiny", 3, 0.9)
    sides = Schedule([int(side) for side in WIDE.split(",")])
    assert tiny.shared_pipeline("flexvar")([1], seed=1, size=sides, method="skipvar:models=models.json").pixels.isfinite().all()
    assert "--force" in calibrate("calibrate-skipvar", 1, "--out", "models.json").output


def test_drafters(calibrate: Callable[..., Result], tmp_path: Path) -> None:
    done = calibrate("calibrate-scalekv", 1, 2, "--share", "0.3", "--out", "roles.json")
    assert done.exit_code == 0 and done.output.count("loses") == 3 and done.output.count("drafter\n") == 1
    assert re.search(r"--method 'scalekv:drafters=\[\d\],share=0.3'", done.output)
    assert len(json.loads((tmp_path / "roles.json").read_text())["drafters"]) == 1
