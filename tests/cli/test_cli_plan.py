"""`nextscale plan`: what a method would compute and cost, known without weights. The counting itself is tested in test_cost."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nextscale.cli.plan import short
from nextscale.loading.presets import build_model, model_spec
from nextscale.methods import DENSE, Method, Plans, StagePlan
from nextscale.methods.registry import METHODS
from nextscale.models import NextScaleModel
from nextscale.stage import Schedule
from tests.helpers.cli import run_cli
from tests.planning.test_cost import Thin

INFINITY_TOKENS = 10521


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No files to read; whatever is written would be seen."""
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path / "absent"))
    monkeypatch.chdir(tmp_path)


def table(*arguments: object) -> str:
    result = run_cli("plan", "-m", *arguments)
    assert result.exit_code == 0, result.stderr
    assert list(Path.cwd().iterdir()) == []
    return result.stdout


def facts(*arguments: object) -> dict[str, Any]:
    return json.loads(table(*arguments, "--json"))


def refused(*arguments: object) -> str:
    result = run_cli("plan", "-m", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    return result.stderr


@dataclass(frozen=True)
class Half(Method):
    """Is data-dependent in the last three stages, on half of the rows in the last two; thins some blocks in the last."""

    @property
    def data_dependent(self) -> bool:
        return True

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        plans = [DENSE] * (len(schedule) - 3)
        for late, stage in enumerate(schedule.stages[-3:]):
            spans = (Thin(range(4)),) if stage.last else ()
            plans.append(StagePlan(num_tokens=round(kept * stage.cells), cfg_branches="cond" if late > 0 else "both", spans=spans))
        return tuple(plans)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "half", Half)


def test_dense_is_everything() -> None:
    planned = facts("infinity-2b")
    assert (planned["model"], planned["method"], planned["batch"], planned["guided"]) == ("infinity-2b", "dense", 1, True)
    assert planned["share"] == 1
    assert planned["dense"] == planned["planned"]
    assert sum(stage["tokens"] for stage in planned["stages"]) == sum(stage["cells"] for stage in planned["stages"]) == INFINITY_TOKENS
    assert [stage["computed"] for stage in planned["stages"]] == [stage["cells"] for stage in planned["stages"]]
    assert sum(stage["planned"] for stage in planned["stages"]) == planned["planned"]["total"]
    assert [stage["key_share"] for stage in planned["stages"]] == [1.0] * 12 + [None]
    assert {stage["rows"] for stage in planned["stages"]} == {2}
    assert planned["keep_ratio"] is None
    assert round(planned["dense"]["total"] / 1e12, 1) == 57.7


def test_skipped_stages() -> None:
    planned = facts("infinity-2b", "--method", "skip:last=2")
    assert planned["method"] == "SkipStages(last=2)"
    assert [stage["skipped"] for stage in planned["stages"]] == [False] * 11 + [True] * 2
    assert planned["planned"]["total"] == sum(stage["dense"] for stage in planned["stages"][:11])
    assert planned["share"] == planned["planned"]["total"] / planned["dense"]["total"]
    assert (planned["stages"][11]["rows"], planned["stages"][11]["share"], planned["stages"][11]["key_share"]) == (0, 0, 0)


def test_data_dependent_methods_state_the_assumption(half: None) -> None:
    arguments = ("var-d16", "--method", "half", "--keep-ratio", 0.25)
    planned = facts(*arguments)
    assert planned["keep_ratio"] == 0.25
    assert [stage["tokens"] for stage in planned["stages"][-3:]] == [25, 42, 64]
    assert [stage["computed"] for stage in planned["stages"][-3:]] == [25, 42, (12 * 64 + 4 * 32) / 16]
    assert [stage["rows"] for stage in planned["stages"][-4:]] == [2, 2, 1, 1]
    assert planned["stages"][7]["key_share"] == 0.25
    assert 0.05 < planned["stages"][8]["share"] < 0.13  # a quarter of the tokens on half of the rows
    shown = table(*arguments)
    assert "25.0% of the tokens are computed where the method is data-dependent" in " ".join(shown.split())
    assert "9 16x16 256 56 1" in " ".join(shown.split())
    assert "some run fewer tokens than enter" in " ".join(shown.split())
    assert "some run fewer" not in table("var-d16", "--method", "skip:last=1")
    assert "--keep-ratio" not in table("var-d16", "--method", "skip:last=1", "--keep-ratio", 0.25)
    assert facts("var-d16", "--method", "half")["keep_ratio"] == 0.5
    assert facts("var-d16", "--method", "half", "--keep-ratio", 1)["keep_ratio"] == 1


def test_tokens_that_the_blocks_of_published_methods_run() -> None:
    """All 4096 tokens of HART's last stage enter, and FastVAR runs a quarter of them."""
    fast, merged, low = (facts("hart-0.7b", "--method", name)["stages"][-1] for name in ("fastvar", "tome", "stagevar"))
    assert [stage["tokens"] for stage in (fast, merged, low)] == [4096] * 3
    assert [fast["computed"], merged["computed"]] == [1024, 2048]
    assert 0 < low["computed"] < 1024
    assert "13 64x64 4096 1024 2" in " ".join(table("hart-0.7b", "--method", "fastvar").split())


def test_several_methods(half: None) -> None:
    planned = facts("var-d16", "--method", "half", "--method", "skip:last=1")
    assert planned["method"] == "Half + SkipStages(last=1)"
    assert [stage["tokens"] for stage in planned["stages"][-3:]] == [50, 84, 0]


def test_batch_rows_and_text_tokens() -> None:
    one, three, alone = facts("star-256"), facts("star-256", "--batch", 3), facts("star-256", "--guidance", "constant:1")
    assert three["planned"]["total"] == 3 * one["planned"]["total"]
    assert {stage["rows"] for stage in three["stages"]} == {6}
    assert {stage["rows"] for stage in alone["stages"]} == {1}
    assert 2 * alone["planned"]["attention"] == one["planned"]["attention"]
    longer = facts("star-256", "--text-tokens", 77)
    assert (one["text_tokens"], longer["text_tokens"]) == (64, 77)
    assert longer["planned"]["linear"] == one["planned"]["linear"]
    assert longer["planned"]["attention"] - one["planned"]["attention"] == 13 * 2 * 680 * 2 * 30 * 1920
    assert facts("var-d16")["text_tokens"] == facts("hart-0.7b")["text_tokens"] == 0


def test_sizes() -> None:
    small = facts("infinity-2b", "--size", "0.25M", "--aspect", "2:1")
    last = small["stages"][-1]
    assert (last["height"], last["width"]) == (23, 46)
    sides = facts("flexvar-d16", "--size", "1,2,6x4")
    assert [(stage["height"], stage["width"]) for stage in sides["stages"]] == [(1, 1), (2, 2), (4, 6)]


def test_memory_is_reserved_for_what_is_planned(half: None) -> None:
    plain, reduced = facts("var-d16"), facts("var-d16", "--method", "half")
    with torch.device("meta"):
        model = build_model(model_spec("var-d16").model).bfloat16()
    reserved = model.cache_spec(model.schedule, rows=2).bytes
    assert plain["memory"]["reserved"] == reserved
    # Two rows of all stages but the last two: memory is for all cells, since images may keep them all.
    assert reduced["memory"]["reserved"] == 16 * 2 * 2 * (model.schedule[7].start + 100) * 1024 * 2
    early = model.schedule[-1].start
    assert plain["memory"]["dense"] == plain["memory"]["planned"] == reduced["memory"]["dense"] == 16 * 2 * 2 * early * 1024 * 2
    # Two rows of all stages but the last three, and half of the first of those: later stages have one row.
    assert reduced["memory"]["planned"] == 16 * 2 * 2 * (model.schedule[7].start + 50) * 1024 * 2
    assert facts("var-d16", "--dtype", "float32")["memory"]["reserved"] == 2 * reserved


def test_peak_memory_is_weights_and_the_larger_of_generating_and_decoding() -> None:
    memory = facts("infinity-2b", "--method", "stagevar")["memory"]
    method, dense = memory["method_peak"], memory["dense_peak"]
    for peak in (method, dense):
        assert peak["peak"] == peak["weights"] + max(peak["generating"], peak["decoding"])
        assert peak["generating"] > peak["cache"] + peak["text"] + peak["stored"]
    assert dense["weights"] == method["weights"] == pytest.approx(4.7e9, rel=0.01)
    assert dense["peak"] == pytest.approx(8.5e9, rel=0.01)  # 8.81 were measured on an H200 when the last stage freed no keys
    assert method["peak"] < 7e9
    assert memory["reserved"] == method["cache"] + method["text"]
    batch = facts("infinity-2b", "--batch", 4)["memory"]["dense_peak"]
    assert batch["peak"] == pytest.approx(19.65e9, rel=0.01)  # 21.05 likewise


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table(columns: int) -> None:
    shown = run_cli("plan", "-m", "infinity-2b", "--method", "skip:last=2", columns=columns).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "infinity-2b, batch 1, guided (two rows per image); method: SkipStages(last=2)"
    assert "stage grid tokens computed rows keys dense planned share" in lines
    assert "10 40x40 1600 1600 2 100.0% 7.77 T 7.77 T 100.0%" in lines
    assert "11 48x48 2304 skipped 0 0.0% 12.6 T 0 0.0%" in lines
    assert "12 64x64 4096 skipped 0 26.8 T 0 0.0%" in lines
    assert "all 10521 4121 64.1% 57.7 T 18.3 T 31.8%" in lines
    words = " ".join(shown.split())
    assert "linear layers 39.2%, attention 15.7%, heads 39.2%" in words
    assert "1.33 GiB are reserved, text included" in words
    assert re.search(r"Peak memory: about 5\.\d+ GiB, dense 7\.\d+ GiB: weights 4\.4\d GiB", words)
    assert re.search(r"later stages read 1\.23 GiB of it, with dense generation 3\.14 GiB", words)
    assert "64 text tokens" in words
    assert "Not counted: text encoder, canvas, decoding" in words
    assert "SparseVAR's search for anchors" in words
    assert max(len(line) for line in shown.splitlines() if not line.startswith("Next: ")) <= columns


def test_short_numbers() -> None:
    assert [short(number) for number in (0, 7, 999, 1000, 123_456, 999_600, 10**9, 57_671_740_817_408, 10**19)] == [
        "0",
        "7.00",
        "999",
        "1.00 k",
        "123 k",
        "1.00 M",
        "1.00 G",
        "57.7 T",
        "1.00e+04 P",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("var-d17",), "did you mean var-d16"),
        (("var-d16", "--method", "skp"), "did you mean skip"),
        (("var-d16", "--method", "skip:last=10"), "cannot skip 10 of 10 stages"),
        (("var-d16", "--size", "1,2"), "positions are learned"),
        (("star-256", "--size", ",".join(["1"] * 11)), "schedule must have at most 10 stages"),
        (("var-d16", "--size", 512), "got 512x512"),
        (("var-d16", "--keep-ratio", 1.5), "--keep-ratio"),
        (("var-d16", "--batch", 0), "--batch"),
        (("var-d16", "--batch", 10**30), "less than or equal to 1000000"),
        (("star-256", "--text-tokens", 10**400), "less than or equal to 1000000"),
        (("infinity-8b", "--method", "code:refiner=infinity-2b"), "must share a tokenizer"),
        (("var-d30", "--method", "code:refiner=star-256-d16"), "do not have the same codes"),
        (("var-d36", "--method", "code:refiner=var-d16"), "positions are learned"),
        (("var-d30", "--method", "code + skip:last=1"), "cannot be combined"),
        (("infinity-2b", "--method", "code"), "none has its family, tokenizer and stages"),
        (("infinity-1b", "--method", "code"), "as in code:refiner=infinity-125m"),
        (("star-512", "--method", "stagevar"), "no ranks for star with 30 blocks"),
    ],
)
def test_refusals(arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(*arguments)
