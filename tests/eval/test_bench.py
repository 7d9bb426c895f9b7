"""Measuring speed: whole runs on tiny random models, and ratios whose arithmetic is known."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from nextscale.eval import bench as runners
from nextscale.eval.bench import Runner, Timed, bench, choose_engines, own_captures, request_prompts
from nextscale.loading import presets
from nextscale.loading.load import random_pipeline
from nextscale.methods import Method, MethodRun, RunSetup, resolve_method
from nextscale.pipeline import Pipeline
from nextscale.stage import Schedule
from tests.conftest import PROJECT
from tests.helpers.cli import run_cli
from tests.helpers.tiny import FAMILIES, OneSchedule, infinity_spec, shared_pipeline

CPU = torch.device("cpu")
SIDES = (1, 2, 4, 8, 16)
SPEC = replace(infinity_spec(), settings=replace(infinity_spec().settings, schedules=OneSchedule(Schedule(SIDES))))
SKIP = {"skip:last=1": resolve_method("skip:last=1")}


@cache
def pipeline() -> Pipeline:
    return random_pipeline(SPEC)


class Failing(Method):
    def start(self, setup: RunSetup) -> MethodRun:
        raise RuntimeError("does not work here\nat all")


# --- whole runs


def test_rows_tell_time_work_and_memory() -> None:
    dense, skip, odd = bench(pipeline(), {**SKIP, "odd": Failing()}, batch=2, repeats=2, measure=lambda runner: {"seen": runner.name})
    assert (dense["method"], skip["method"], skip["settings"]) == ("dense", "skip:last=1", "SkipStages(last=1)")
    assert (dense["benchmark"], dense["model"], dense["size"], dense["batch"]) == ("bench", SPEC.name, [32, 32], 2)
    assert dense["cost_share"] == dense["speedup"]["median"] == dense["speedup_end_to_end"]["p80"] == 1
    assert 0 < skip["cost_share"] < 0.5
    for row in (dense, skip):
        assert row["repeats"] == 2 and row["engine"] == row["engine_asked"] == "eager" and row["kernels"] is False
        for times in (row, row["decode"], row["end_to_end"]):
            assert 0 < times["p20_ms"] <= times["median_ms"] <= times["p80_ms"]
        assert row["median_ms"] < row["end_to_end"]["median_ms"]
        assert row["images_per_second"] == pytest.approx(2000 / row["end_to_end"]["median_ms"], rel=1e-3)
        assert row["seen"] == row["method"] and row["capture"] is None and "not_captured" not in row
    assert odd["error"] == "RuntimeError: does not work here" and "median_ms" not in odd and "seen" not in odd
    assert dense["run"] == skip["run"] == odd["run"]
    json.dumps([dense, skip, odd], allow_nan=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_measured(family: str) -> None:
    [row] = bench(shared_pipeline(family), {}, repeats=1)
    assert row.get("error") is None and row["median_ms"] > 0
    assert row["size"] == [*shared_pipeline(family)(request_prompts(shared_pipeline(family), 1, 0), seed=0).report.size]


def test_what_cannot_be_captured_runs_eagerly_and_says_so() -> None:
    rows = bench(pipeline(), SKIP, engines=("eager", "graphs"), repeats=1)
    assert [(row["engine_asked"], row["method"], row["engine"]) for row in rows] == [
        ("eager", "dense", "eager"),
        ("eager", "skip:last=1", "eager"),
        ("graphs", "dense", "eager"),
        ("graphs", "skip:last=1", "eager"),
    ]
    assert "GPU" in rows[2]["not_captured"] and rows[2]["capture"] is None and "not_captured" not in rows[0]


def test_without_dense_there_are_times_but_no_ratio() -> None:
    dense, skip = bench(pipeline(), {"dense": Failing(), **SKIP}, repeats=2)
    assert "error" in dense
    assert skip["speedup"] is None and skip["median_ms"] > 0


def timed(stage_seconds: float, decode: float, whole: float, memory: int = 0) -> Timed:
    report = pipeline()(request_prompts(pipeline(), 1, 0), seed=0).report
    stages = tuple(replace(stage, seconds=stage_seconds) for stage in report.stages)
    return Timed(replace(report, stages=stages, condition_seconds=0, decode_seconds=decode), whole, memory)


def test_ratios_are_those_of_each_round() -> None:
    """Dense 1, 2 and 3 seconds, the method 0.5, 0.5 and 1 beside them: 2, 4 and 3 times faster, decoding left out."""
    dense, fast = (Runner(name, Method(), own_captures(pipeline(), "eager"), None) for name in ("dense", "fast"))
    dense.timed = [timed(seconds / 5, 1.0, seconds + 1) for seconds in (1, 2, 3)]
    fast.timed = [timed(seconds / 5, 1.0, seconds + 1, memory=10**9) for seconds in (0.5, 0.5, 1)]
    row = fast.row(dense, batch=1)
    assert (row["speedup"]["median"], row["median_ms"], row["decode"]["median_ms"]) == (3, 500, 1000)
    assert row["speedup_end_to_end"]["median"] == 2 and row["end_to_end"]["median_ms"] == 1500
    assert row["peak_gb"] == 1


def test_methods_take_turns() -> None:
    order: list[str] = []

    class Noted(Method):
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, setup: RunSetup) -> MethodRun:
            order.append(self.name)
            return MethodRun()

    bench(pipeline(), {"dense": Noted("dense"), "b": Noted("b")}, repeats=2)
    assert order == ["dense", "b"] * (2 + runners.WARM_ROUNDS)


def test_graphs_that_do_not_fit_together_are_measured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    monkeypatch.setattr(runners, "has_room", lambda several: len(several) < 3)
    monkeypatch.setattr(Runner, "capture", lambda runner, prompts: captured.append(runner.name))
    rows = bench(pipeline(), {name: resolve_method("skip:last=1") for name in "abc"}, repeats=1)
    assert [row["method"] for row in rows] == ["dense", "a", "b", "c"]
    assert captured == ["dense", "a", "b", "dense", "c"]
    assert all(row["speedup"] is not None for row in rows)


def test_runners_keep_the_smaller_models_that_code_refines_with() -> None:
    assert own_captures(pipeline(), "eager").partners is pipeline().partners


def test_engines_by_name() -> None:
    assert choose_engines(None, CPU) == choose_engines("eager", torch.device("cuda")) == ("eager",)
    assert choose_engines(None, torch.device("cuda")) == ("graphs",)
    assert choose_engines("both", CPU) == ("eager", "graphs")


# --- the command


def run(arguments: Sequence[str], code: int = 0) -> str:
    result = run_cli("bench", *arguments, catch=True)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.MODELS, "tiny", replace(SPEC, name="tiny"))


def test_the_command_adds_rows(tiny: None, tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    quick = ["-m", "tiny", "--repeats", "1", "--device", "cpu", "--out", str(out)]
    shown = run([*quick, "--method", "tome+skip:last=1", "--batch", "1", "--batch", "2"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["model"], row["batch"], row["method"], row["weights"]) for row in rows] == [
        ("tiny", batch, method, "random") for batch in (1, 2) for method in ("dense", "tome + skip:last=1")
    ]
    assert "tiny, 32x32, batch 2" in shown and "tome + skip:last=1" in shown
    shown = run([*quick, "--json"])
    assert [json.loads(line) for line in shown.splitlines()] == [json.loads(out.read_text().splitlines()[-1])]
    assert "cannot write into" in run(["-m", "tiny", "--device", "cpu", "--out", str(out / "below.jsonl")], 2)


def test_without_out_the_command_writes_nothing(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = PROJECT / "benchmarks" / "results.jsonl"
    before = results.read_bytes()
    monkeypatch.chdir(tmp_path)
    run(["-m", "tiny", "--repeats", "1", "--device", "cpu"])
    assert results.read_bytes() == before and not [*tmp_path.iterdir()]


def test_each_model_is_loaded_once(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def opening(name: str, **_: object) -> Pipeline:
        opened.append(name)
        return pipeline()

    monkeypatch.setattr(sys.modules["nextscale.loading.load"], "random_pipeline", opening)
    run(["-m", "tiny", "-m", "nano", "-m", "tiny", "--batch", "1", "--batch", "2", "--repeats", "1", "--device", "cpu"])
    assert opened == ["tiny", "nano"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-m", "nano", "--size", "100"], "got 100x100"),
        (["--size", "100"], "got 100x100"),  # of nano
        (["-m", "nano", "--method", "fasvar"], "did you mean fastvar"),
        (["-m", "nano", "--engine", "fast", "--device", "cpu"], "--engine"),
        (["-m", "nano", "-m", "var-d16", "--weights", "x"], "--weights"),
        (["-m", "nanp"], "did you mean nano"),
        (["-m", "nano", "--method", "auto:speedup=2"], "Add --weights"),
        (["--suite", "current"], "--suite"),
    ],
)
def test_refusals(arguments: list[str], told: str) -> None:
    assert told in run(arguments, 2)
