"""Measuring speed: whole runs on tiny random models, ratios and limits whose arithmetic is known, tables from made-up rows."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.results import RESULTS, measure, record
from nextscale import kernels
from nextscale.accel import Method, MethodRun, RunSetup, resolve_method
from nextscale.cli import app
from nextscale.cli import bench as bench_command
from nextscale.errors import OutOfMemory, SettingError
from nextscale.lab.bench import runner as runners
from nextscale.lab.bench.bench import bench_case
from nextscale.lab.bench.energy import EnergyMeter
from nextscale.lab.bench.picture import pictured_row, stages_svg
from nextscale.lab.bench.plan import Plan, chosen_engines
from nextscale.lab.bench.requests import request_prompts, request_workload
from nextscale.lab.bench.roofline import Rates, request_roofline
from nextscale.lab.bench.rows import failed_rows, known_percentiles_ms, row_of
from nextscale.lab.bench.runner import Runner, Timed
from nextscale.lab.bench.shown_rows import CaseKey, case_of, dense_rows, method_rows, suite_rows
from nextscale.lab.bench.suites import APART, SPARSE, SUITES, TIMED_METHODS, Case, part_of, suite, timed_methods
from nextscale.lab.bench.tables import (
    TABLES,
    dense_table,
    growth_table,
    methods_table,
    speed_tables,
    summary_table,
    throughput_table,
    waterfall_table,
)
from nextscale.lab.results import read_rows
from nextscale.loading import presets
from nextscale.loading.presets import model_spec
from nextscale.loading.random_weights import random_pipeline
from nextscale.pipeline import Pipeline
from nextscale.planning.cost import Workload, request_cost
from nextscale.stage import Schedule

from .tiny import FAMILIES, OneSchedule, infinity_spec, shared_pipeline

CPU = torch.device("cpu")
RATES = Rates(flops=1e12, bytes=1e11)
PLAN = Plan(CPU, ("eager",), 2, RATES)
SIDES = (1, 2, 4, 8, 16)
SPEC = replace(infinity_spec(), settings=replace(infinity_spec().settings, schedules=OneSchedule(Schedule(SIDES))))

Row = dict[str, Any]


@cache
def pipeline() -> Pipeline:
    return random_pipeline(SPEC)


class Failing(Method):
    def start(self, setup: RunSetup) -> MethodRun:
        raise RuntimeError("does not work here\nat all")


# --- whole runs


def test_rows_tell_time_work_and_memory() -> None:
    case = Case("tiny", "tiny-infinity", batch=2, suite="required")
    dense, skip, odd = bench_case(pipeline(), case, {**timed_methods(["skip:last=1"]), "odd": Failing()}, PLAN)
    assert (dense["method"], skip["method"], skip["settings"]) == ("dense", "skip:last=1", "SkipStages(last=1)")
    assert (dense["benchmark"], dense["suite"], dense["case"], dense["size"], dense["batch"]) == ("bench", "required", "tiny", [32, 32], 2)
    assert dense["cost_share"] == dense["speedup"]["median"] == dense["speedup_end_to_end"]["p80"] == 1
    assert skip["tokens"] == [1, 4, 16, 64, 0] and skip["rows"] == [4, 4, 4, 4, 0] and skip["padding"] == [0] * 5
    assert 0 < skip["cost_share"] < 0.5
    assert dense["predicted_gb"] >= skip["predicted_gb"] >= dense["weights_gb"]
    for row in (dense, skip):
        assert row["repeats"] == 2 and row["engine"] == row["engine_asked"] == "eager"
        assert row["kernels"] is False and row["step"] == "eager, plain torch"
        for times in (row, row["decode"], row["end_to_end"]):
            assert 0 < times["p20_ms"] <= times["median_ms"] <= times["p80_ms"]
        assert row["median_ms"] < row["end_to_end"]["median_ms"]
        assert row["images_per_second"] == pytest.approx(2000 / row["end_to_end"]["median_ms"], rel=1e-3)
        assert row["times_roofline"] == pytest.approx(row["median_ms"] / row["roofline_ms"], rel=0.1)
        assert row["roofline_ms"] >= row["roofline_arithmetic_ms"] > 0
        assert row["joules_per_image"] is None and row["capture"] is None and "not_captured" not in row
        assert row["matmul_tflops"] == 1 and row["copy_tb_per_s"] == 0.1
    assert odd["error"] == "RuntimeError: does not work here" and "median_ms" not in odd
    assert dense["run"] == skip["run"] == odd["run"] and dense["run"].endswith(" tiny")
    json.dumps([dense, skip, odd], allow_nan=False)


def test_steps_are_named_after_the_engine_and_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(plan: Plan) -> list[str]:
        return [row["step"] for row in failed_rows(Case("tiny", "tiny-infinity"), timed_methods([]), plan, OutOfMemory("no"))]

    both = replace(PLAN, engines=("eager", "graphs"))
    assert steps(both) == ["eager, plain torch", "graphs, plain torch"]
    monkeypatch.setattr(kernels, "enabled", lambda device: True)
    assert steps(both) == ["eager", "graphs"]
    assert steps(replace(PLAN, step="with tea")) == ["with tea"]


def test_what_a_replay_cannot_tell_is_no_number() -> None:
    assert known_percentiles_ms([[0.1, 0.2], [0.3, 0.4]]) == {"median_ms": 500, "p20_ms": 380, "p80_ms": 620}
    assert known_percentiles_ms([[0.1, 0.2], [None, 0.4]]) == {"median_ms": 350, "p20_ms": 320, "p80_ms": 380}  # skipped stages
    assert known_percentiles_ms([[0.1, 0.2], [None, None]]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_measured(family: str) -> None:
    [row] = bench_case(shared_pipeline(family), Case(family, family), timed_methods([]), replace(PLAN, repeats=1))
    assert row.get("error") is None and row["median_ms"] > 0 and row["roofline_ms"] > 0


def test_what_cannot_be_captured_runs_eagerly_and_says_so() -> None:
    rows = bench_case(pipeline(), Case("tiny", "tiny-infinity"), timed_methods([]), replace(PLAN, engines=("eager", "graphs"), repeats=1))
    assert [(row["engine"], row["engine_asked"], row["step"]) for row in rows] == [
        ("eager", "eager", "eager, plain torch"),
        ("eager", "graphs", "graphs, plain torch"),
    ]
    assert "captured on a GPU" in rows[1]["not_captured"] and rows[1]["capture"] is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_graphs_are_measured_on_a_gpu() -> None:
    cuda = torch.device("cuda")
    pipe = random_pipeline(SPEC, device=cuda, dtype=torch.bfloat16)
    plan = Plan(cuda, ("eager", "graphs"), 2, Rates.measured(cuda, torch.bfloat16), meter=EnergyMeter.of(cuda))
    rows = bench_case(pipe, Case("tiny", "tiny-infinity"), timed_methods([SPARSE, "stagevar:ranks=measured"]), plan)
    engines = [(row["engine_asked"], row["engine"]) for row in rows]
    assert engines == [("eager", "eager")] * 3 + [("graphs", "graphs")] * 2 + [("graphs", "eager")]
    for row in rows:
        assert row.get("error") is None and row["peak_gb"] >= row["weights_gb"] and row["times_roofline"] > 1
        assert (row["capture"] is not None) == (row["engine"] == "graphs")
    assert rows[3]["capture"]["gb"] >= 0 and "not_captured" in rows[5]


def test_without_dense_there_are_times_but_no_ratio() -> None:
    methods = {"dense": Failing(), "skip": resolve_method("skip:last=1")}
    dense, skip = bench_case(pipeline(), Case("tiny", "tiny-infinity"), methods, PLAN)
    assert "error" in dense
    assert skip["speedup"] is None and skip["median_ms"] > 0


def timed(stage_seconds: float, decode: float, whole: float, memory: int = 0) -> Timed:
    report = pipeline()(request_prompts(pipeline(), 1, 0), seed=0).report
    stages = tuple(replace(stage, seconds=stage_seconds) for stage in report.stages)
    return Timed(replace(report, stages=stages, condition_seconds=0, decode_seconds=decode), whole, memory)


def test_ratios_are_those_of_each_round() -> None:
    """Dense 1, 2 and 3 seconds, the method 0.5, 0.5 and 1 beside them: 2, 4 and 3 times faster, decoding left out."""
    case = Case("tiny", "tiny-infinity")
    dense, fast = (Runner(name, Method(), pipeline(), case, "eager") for name in ("dense", "fast"))
    dense.timed = [timed(seconds / 5, 1.0, seconds + 1) for seconds in (1, 2, 3)]
    fast.timed = [timed(seconds / 5, 1.0, seconds + 1, memory=10**9) for seconds in (0.5, 0.5, 1)]
    row = row_of(fast, dense, PLAN)
    assert (row["speedup"]["median"], row["median_ms"], row["decode"]["median_ms"]) == (3, 500, 1000)
    assert row["speedup_end_to_end"]["median"] == 2 and row["end_to_end"]["median_ms"] == 1500
    assert row["stage_median_ms"] == [100.0] * 5
    assert row["peak_gb"] == 1


def test_methods_take_turns() -> None:
    order: list[str] = []

    class Noted(Method):
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, setup: RunSetup) -> MethodRun:
            order.append(self.name)
            return MethodRun()

    bench_case(pipeline(), Case("tiny", "tiny-infinity"), {"dense": Noted("dense"), "b": Noted("b")}, PLAN)
    assert order == ["dense", "b"] * (2 + runners.WARM_ROUNDS)


def test_graphs_that_do_not_fit_together_are_measured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    monkeypatch.setattr(runners, "has_room", lambda several: len(several) < 3)
    monkeypatch.setattr(Runner, "capture", lambda runner: captured.append(runner.name))
    methods = {"dense": Method(), **{name: resolve_method("skip:last=1") for name in "abc"}}
    rows = bench_case(pipeline(), Case("tiny", "tiny-infinity"), methods, replace(PLAN, repeats=1))
    assert [row["method"] for row in rows] == ["dense", "a", "b", "c"]
    assert captured == ["dense", "a", "b", "dense", "c"]
    assert all(row["speedup"] is not None for row in rows)


# --- energy


class Library:
    """Stands for the driver's: every read is one joule more."""

    def __init__(self, broken: bool = False) -> None:
        self.millijoules, self.broken = 0, broken

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, found: Any) -> int:
        self.millijoules += 1000
        found._obj.value = self.millijoules
        return 3 if self.broken else 0


class FailingLater(Method):
    """Runs its timed requests and no other."""

    def __init__(self) -> None:
        self.runs = 0

    def start(self, setup: RunSetup) -> MethodRun:
        self.runs += 1
        if self.runs > runners.WARM_ROUNDS + PLAN.repeats:
            raise RuntimeError("worn out")
        return MethodRun()


def meter(broken: bool = False) -> EnergyMeter:
    return EnergyMeter(Library(broken), ctypes.c_void_p())  # type: ignore[arg-type]


def test_energy_is_shared_among_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "METERED_SECONDS", 0)  # so two requests
    case = Case("tiny", "tiny-infinity", batch=2)
    [row] = bench_case(pipeline(), case, timed_methods([]), replace(PLAN, repeats=1, meter=meter()))
    assert row["joules_per_image"] == 0.2  # 1 J for 4 images, rounded
    [row] = bench_case(pipeline(), case, timed_methods([]), replace(PLAN, repeats=1, meter=meter(broken=True)))
    assert row["joules_per_image"] is None
    assert EnergyMeter.of(CPU) is None


def test_a_failure_while_energy_is_metered_leaves_the_times() -> None:
    [row] = bench_case(pipeline(), Case("tiny", "tiny-infinity"), {"dense": FailingLater()}, replace(PLAN, meter=meter()))
    assert "error" not in row and row["median_ms"] > 0
    assert row["joules_per_image"] is None and row["not_metered"] == "RuntimeError: worn out"


# --- rooflines


def test_the_roofline_is_arithmetic_or_reading_whichever_takes_longer() -> None:
    model, work = pipeline().model, request_workload(pipeline(), Case("tiny", "tiny-infinity"))
    total = request_cost(model, work).total
    slow = request_roofline(model, work, [1.0] * 5, Rates(flops=1.0, bytes=1e30))
    assert slow.both == slow.arithmetic == pytest.approx(2 * total)
    halves = request_roofline(model, work, [1.0, 1.0, 1.0, 1.0, 0.0], Rates(flops=1e30, bytes=1.0))
    block = sum(linear.weight.numel() for linear in linears(model.stack[0]))
    ends = sum(linear.weight.numel() for part in (model.head, model.word_embed) for linear in linears(part))
    assert halves.both == halves.reading == pytest.approx(4 * 4 * (len(model.blocks) * block + ends))  # stages that run, bytes each


def linears(module: torch.nn.Module) -> list[torch.nn.Linear]:
    """Without those that read the text once per request, and what is made of the condition."""
    found = [(name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    return [part for name, part in found if not any(word in name for word in ("text_attention.kv", "text_attention.k", "modulation"))]


def test_reading_counts_each_stage_alone() -> None:
    model, work = pipeline().model, request_workload(pipeline(), Case("tiny", "tiny-infinity"))
    roofline = request_roofline(model, work, [1.0] * 5, Rates(flops=1e9, bytes=1e8))
    assert max(roofline.arithmetic, roofline.reading) < roofline.both < roofline.arithmetic + roofline.reading


def test_rates_are_measured() -> None:
    rates = Rates.measured(CPU, torch.float32)
    assert 1e6 < rates.flops < 1e15 and 1e6 < rates.bytes < 1e14


def test_text_counts_in_the_work() -> None:
    assert request_workload(shared_pipeline("var"), Case("", "")).text_tokens == 0
    assert request_workload(shared_pipeline("star"), Case("", "", batch=3)).text_tokens == 77
    assert request_workload(pipeline(), Case("", "")) == Workload(Schedule(SIDES), text_tokens=24)  # this model reads no more


# --- suites


def test_suites_can_be_run() -> None:
    for cases in SUITES.values():
        for case in cases:
            model_spec(case.model).settings.schedules.choose(case.size, None)
            assert next(iter(timed_methods(case.methods, case.ranks))) == "dense"
        assert len({case.name for case in cases}) == len(cases)
    assert {case.model for case in SUITES["families"]} == {"hart-0.7b", "star-1024", "var-d30", "infinity-8b"}
    first = SUITES["required"][0]
    assert (first.model, first.size, first.batch) == ("infinity-2b", (1024, 1024), 1)
    assert {SPARSE, "FastVAR", "StageVAR"} <= set(first.methods)


def test_one_suite_measures_every_case_of_the_tables() -> None:
    """In parts, of which none is much longer than the others; those with tables of their own keep their suite."""
    cases = suite("current")
    measured: dict[CaseKey, set[str]] = {}
    for case in cases:
        key = case_of({"model": case.model, "size": [*case.size], "batch": case.batch})  # type: ignore[misc]
        measured.setdefault(key, set()).update(timed_methods(case.methods, case.ranks))
    rows = read_rows(RESULTS)
    shown = [*dense_rows(rows), *method_rows(rows), *(row for name in APART for own in suite_rows(rows, name).values() for row in own)]
    for row in shown:
        assert row["method"] in measured[case_of(row)], row["case"]
    assert {case.suite for case in cases} == {"current", *APART}
    total = sum(case.seconds for case in cases)
    for parts in (1, 2, 3, 5):
        split = [part_of(cases, part, parts) for part in range(parts)]
        assert [case for part in split for case in part] == [*cases]
        assert max(sum(case.seconds for case in part) for part in split) < 1.3 * total / parts


def test_stagevar_runs_with_ranks_where_none_are_published() -> None:
    [case] = [case for case in suite("families") if case.model == "var-d30"]
    assert timed_methods(case.methods, case.ranks)["StageVAR"] == resolve_method("stagevar:ranks=0.177")
    assert timed_methods(case.methods)["StageVAR"] == resolve_method("stagevar")


def test_sparsevar_keeps_the_share_of_its_name() -> None:
    model = pipeline().model
    plans = timed_methods([SPARSE])[SPARSE].forecast(model, Schedule((1, 2, 4, 8, 16)))
    assert [plan.num_tokens for plan in plans] == [None, None, None, None, 16 + 60]  # 30 % of 256 cells; 64 are too few to begin with


def test_methods_by_name() -> None:
    assert list(timed_methods(["all"])) == ["dense", *TIMED_METHODS]
    assert timed_methods(["fastvar + skip:last=1"])["fastvar + skip:last=1"].label == "FastVAR + SkipStages(last=1)"
    with pytest.raises(SettingError, match="unknown method 'fastvra'; did you mean fastvar"):
        timed_methods(["fastvra"])


def test_engines_by_name() -> None:
    assert chosen_engines(None, CPU) == chosen_engines("eager", torch.device("cuda")) == ("eager",)
    assert chosen_engines(None, torch.device("cuda")) == ("graphs",)
    assert chosen_engines("both", CPU) == ("eager", "graphs")
    with pytest.raises(SettingError, match="'graph': choose one of graphs, eager, both"):
        chosen_engines("graph", CPU)
    with pytest.raises(SettingError, match="one by one"):
        Plan(CPU, ("eager", "graphs"), 1, RATES, step="kernels")


# --- tables


def test_a_benchmark_keeps_what_it_has_measured_and_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def measured() -> Iterator[Row]:
        yield measure("one", {"case": "first"}, lambda: {"ms": 1.0})
        assert [row["ms"] for row in read_rows(file)] == [1.0]  # before the next one is begun
        yield measure("one", {"case": "second"}, lambda: {"ms": 1 / 0})

    rows = record(measured(), file)
    assert rows == read_rows(file)
    assert rows[1]["error"] == "ZeroDivisionError: division by zero" and rows[1]["case"] == "second"


def made(method: str = "dense", milliseconds: float = 100, **changes: Any) -> Row:
    """A row of a GPU; dense generation takes 100 ms."""
    ratio = {"median": 100 / milliseconds, "p20": 100 / milliseconds, "p80": 100 / milliseconds}
    times = {"median_ms": milliseconds, "p20_ms": milliseconds, "p80_ms": milliseconds}
    row = {
        "benchmark": "bench",
        "suite": None,
        "case": "2b-1024",
        "model": "infinity-2b",
        "size": [1024, 1024],
        "batch": 1,
        "dtype": "bfloat16",
        "engine": "graphs",
        "engine_asked": "graphs",
        "kernels": True,
        "step": "graphs",
        "run": "first",
        "method": method,
        "weights": "random",
        "commit": "0123456",
        "date": "2026-11-16",
        "hardware": "NVIDIA H200",
        "torch": "2.11",
        "matmul_tflops": 788.0,
        "copy_tb_per_s": 4.3,
        "repeats": 10,
        **times,
        "decode": times | {"median_ms": 80},
        "end_to_end": times | {"median_ms": milliseconds + 80},
        "speedup": ratio,
        "speedup_end_to_end": ratio,
        "images_per_second": 1000 / (milliseconds + 80),
        "cost_share": 0.5,
        "tokens": [1, 4],
        "stage_median_ms": [10, milliseconds - 10],
        "roofline_ms": milliseconds / 2,
        "times_roofline": 2.0,
        "peak_gb": 8.8,
        "joules_per_image": 50.0,
    }
    return row | changes


EAGER = {"engine": "eager", "engine_asked": "eager", "step": "eager"}
OLD = {"benchmark": "dense", "engine": "eager", "repeats": 20}


def old(**changes: Any) -> Row:
    """As the program before this one wrote it."""
    row = made(**OLD, **changes)
    for name in (
        "suite",
        "engine_asked",
        "kernels",
        "run",
        "step",
        "end_to_end",
        "speedup",
        "roofline_ms",
        "times_roofline",
        "matmul_tflops",
        "images_per_second",
    ):
        del row[name]
    return row


def theirs(**changes: Any) -> Row:
    """A row of the reference implementation."""
    known = {"benchmark": "reference", "model": "infinity-2b", "size": [1024, 1024], "batch": 1, "hardware": "NVIDIA H200"}
    return {**known, "median_ms": 790, "decode": {"median_ms": 99}, "peak_gb": 13.0, "remark": "it needs tea", **changes}


def lines_of(table: str) -> list[str]:
    return [line for line in table.splitlines()[2:] if line.startswith("|")]


def test_the_dense_table_shows_the_last_row_of_graphs() -> None:
    rows = [old(milliseconds=400), made(milliseconds=300, **EAGER), made(milliseconds=200), made(milliseconds=250, **EAGER)]
    [line] = lines_of(dense_table([*rows, theirs()]))
    assert "| graphs | **200** (200–200) | 790 |" in line and "| 280 | 100 | 2.0x |" in line
    [line] = lines_of(dense_table(rows[:2]))
    assert "| eager | **300**" in line
    [line] = lines_of(dense_table([*rows[:1], theirs()]))
    assert "| eager | **400** (400–400) | 790 |  | 80 (reference 99) |  |  |  | 50 J | 8.8 GB | 13.0 GB |" in line
    note = dense_table(rows).splitlines()[-1]
    assert "788 TFLOP/s" in note and "4.30 TB/s" in note and "Median of 10 runs" in note
    assert "TFLOP" not in dense_table(rows[:1])


def test_tables_leave_out_other_machines_and_suites_with_tables_of_their_own() -> None:
    assert speed_tables([made(hardware="CPU x86_64")]) == {}
    assert set(speed_tables([made(suite="growth")])) == {"growth"}
    assert set(speed_tables([made(suite="throughput")])) == {"throughput"}
    assert set(speed_tables([made(), made("FastVAR", 50)])) == {"dense", "methods"}
    assert set(TABLES) == {"dense", "methods", "waterfall", "growth", "throughput"}


def test_the_methods_table_compares_what_was_measured_together() -> None:
    before = [made(name, 80, benchmark="methods", **EAGER) for name in ("dense", "SparseVAR", "ToMe")]
    assert [row["method"] for row in method_rows(before)] == ["dense", SPARSE, "ToMe"]
    rows = [*before, made(), made(SPARSE, 50, engine="eager", not_captured="SettingError: no")]
    first, second = lines_of(methods_table(rows))
    assert "| dense | graphs | 100 | **1.00** (1.00–1.00) |" in first
    assert f"| {SPARSE} | eager | 50 | **2.00** (2.00–2.00) | 130 | **2.00** (2.00–2.00) | 50% | 25 | 2.0x | 50 J | 8.8 GB |" in second
    assert f"Not captured, so run eagerly: {SPARSE} (SettingError: no)." in methods_table(rows)


def test_eager_rows_give_way_to_graphs_in_a_table_of_their_own() -> None:
    before = [made(name, 80, benchmark="methods", **EAGER) for name in ("dense", "ToMe")]
    assert len(method_rows(before)) == 2
    growth = [made(suite="growth"), made("ToMe", 50, suite="growth")]
    assert not method_rows([*before, *growth])
    assert len(method_rows([*before, *growth, made(run="c"), made("ToMe", 50, run="c")])) == 2


def test_methods_stand_beside_dense_generation_of_their_own_run() -> None:
    """The run that timed most of them; what only another has keeps the ratio of that one."""
    before = [made(run="a", milliseconds=400), made("ToMe", 200, run="a"), made("FastVAR", 100, run="a")]
    most = [made(run="b"), made("FastVAR", 50, run="b"), made("StageVAR", 25, run="b")]
    after = [made(run="c", milliseconds=70), made("FastVAR", 60, run="c", error="OutOfMemory: no")]
    found = method_rows([*before, *most, *after])
    assert [(row["method"], row["run"], row["median_ms"]) for row in found] == [
        ("dense", "b", 100),
        ("FastVAR", "b", 50),
        ("StageVAR", "b", 25),
        ("ToMe", "a", 200),
    ]
    again = [row | {"run": "d", "median_ms": 90} for row in most]
    assert {row["run"] for row in method_rows([*before, *most, *again])} == {"d", "a"}


def test_rows_without_kernels_and_named_steps_are_only_in_the_waterfall() -> None:
    plain = {"kernels": False, "step": "graphs, plain torch"}
    rows = [made(), made("FastVAR", 50), made(milliseconds=300, **plain), made("FastVAR", 200, **plain), made(milliseconds=77, step="tea")]
    for show in (dense_table, methods_table):
        assert show(rows) == show(rows[:2])
    assert pictured_row(rows) == rows[0]
    for name in APART:
        assert speed_tables([row | {"suite": name} for row in rows]) == speed_tables([row | {"suite": name} for row in rows[:2]])


@pytest.mark.parametrize("other", [{"hardware": "NVIDIA L4"}, {"dtype": "float32"}, {"weights": "checkpoint"}])
def test_rows_of_another_machine_dtype_or_checkpoint_replace_nothing(other: Row) -> None:
    rows = [made(), made("FastVAR", 50), made(milliseconds=300, **other)]
    assert speed_tables(rows) == speed_tables(rows[:2])
    failed = made(dtype=None, error="OutOfMemory: no")
    assert "OutOfMemory" in dense_table([*rows, failed])


def test_the_reference_implementation_is_that_of_the_same_machine() -> None:
    here = [made(), theirs()]
    assert "| 790 |" in dense_table(here) and "at batch 1 it needs tea." in dense_table(here)
    elsewhere = [made(hardware="NVIDIA L4"), made(hardware="NVIDIA L4", step="tea"), theirs()]
    assert "790" not in dense_table(elsewhere) and "tea." not in dense_table(elsewhere)
    assert "790" not in waterfall_table(elsewhere)


def test_the_summary_has_a_row_for_the_reference_implementation_and_for_each_published_method() -> None:
    rows = [made(), made("FastVAR", 50), made("ToMe", 80), made("StageVAR", error="OutOfMemory: no"), made("FastVAR", 20, batch=4)]
    assert lines_of(summary_table([*rows, theirs()])) == [
        "| reference implementation | 790 |  | 1.00 |  | 13.0 GB |",
        "| dense | 100 | **1.00** | 7.90 | 50% | 8.8 GB |",
        "| FastVAR | 50 | **2.00** | 15.80 | 50% | 8.8 GB |",
        "| StageVAR | OutOfMemory: no |  |  |  |  |",
    ]
    assert lines_of(summary_table(rows))[0] == "| dense | 100 | **1.00** |  | 50% | 8.8 GB |"
    assert summary_table([made(batch=4), theirs()]) == ""


def test_failures_are_lines() -> None:
    error = {"error": "OutOfMemory: no | room"}
    broken = {name: value for name, value in made("StageVAR").items() if not name.endswith("_ms")} | error
    line = lines_of(methods_table([made(), broken]))[1]
    assert line.startswith("| infinity-2b | 1024x1024 | 1 | StageVAR | graphs | OutOfMemory: no / room |")
    assert line.count("|") == lines_of(methods_table([made(), broken]))[0].count("|")
    failed = made(dtype=None, size=None, **error)
    assert "its own size" in dense_table([failed])
    assert "OutOfMemory" in throughput_table([made(suite="throughput", **error)])
    refused = made("StageVAR", suite="growth", error="SettingError: no")
    assert lines_of(growth_table([made(suite="growth"), refused])) == ["| infinity-2b | 1024x1024 | 100 | refused |"]


def test_the_waterfall_says_what_each_step_brought() -> None:
    assert waterfall_table([made(), made("FastVAR", 50)]) == ""
    assert waterfall_table([made(), made(milliseconds=150, **EAGER)]) == ""  # eager with kernels is beside the chain
    plain = {"kernels": False}
    rows = [
        made(milliseconds=200, run="b"),
        made(milliseconds=300, step="graphs, plain torch", **plain),
        made(milliseconds=400, **EAGER | {"step": "eager, plain torch"} | plain),
        made(milliseconds=250, **EAGER),
        made("StageVAR", 60, run="b"),
        made(milliseconds=50, run="c", engine="eager"),  # could not be captured
        theirs(),
    ]
    start = "| infinity-2b | 1024x1024 | 1 |"
    chain = [
        f"{start} reference implementation | 790 |  |  |  |  |",
        f"{start} eager, plain torch | 400 | 1.98 | **1.98** | 200 | 2.0x |",
        f"{start} graphs, plain torch | 300 | 1.33 | **2.63** | 150 | 2.0x |",
        f"{start} graphs | 200 | 1.50 | **3.95** | 100 | 2.0x |",
    ]
    assert lines_of(waterfall_table(rows)) == [*chain, f"{start} graphs, StageVAR | 60 | 1.67 | **13.17** | 30 | 2.0x |"]
    note = waterfall_table(rows).splitlines()[-1]
    assert "one after another on machines of this kind" in note and "reference implementation ran on the same kind of GPU" in note
    named = [
        made(milliseconds=100, step="tea"),
        made("StageVAR", 25, step="tea"),
        made(SPARSE, 50, engine="eager", step="tea"),
    ]
    assert lines_of(waterfall_table([*named, *rows])) == [
        *chain,
        f"{start} tea | 100 | 2.00 | **7.90** | 50 | 2.0x |",
        f"{start} tea, StageVAR | 25 | 4.00 | **31.60** | 12 | 2.0x |",
        f"{start} tea, {SPARSE} (eager) | 50 | 2.00 | **15.80** | 25 | 2.0x |",
    ]


def test_a_head_of_its_own_is_told_where_it_was_timed() -> None:
    times = {"median_ms": 14.0}
    assert "| diffusion head 14 |" in dense_table([made(residual=times, choice=None)])
    assert "| refinement 14 |" in dense_table([made(model="star-1024-sampler", residual=None, choice=times)])
    assert "head" not in dense_table([made(residual=None, choice=times)])


def test_growth_and_throughput() -> None:
    sizes = [
        made(name, 100 / gain, suite="growth", size=[side, side]) for side in (256, 2048) for name, gain in (("dense", 1), ("FastVAR", 2))
    ]
    assert lines_of(growth_table(sizes)) == [
        "| infinity-2b | 256x256 | 100 | 50 (**2.00**) |",
        "| infinity-2b | 2048x2048 | 100 | 50 (**2.00**) |",
    ]
    [line] = lines_of(throughput_table([made(suite="throughput", batch=8, joules_per_image=None)]))
    assert line == "| infinity-2b | 1024x1024 | 8 | dense | graphs | **5.56** | **1.00** (1.00–1.00) |  | 8.8 GB |"


def test_the_picture_is_that_of_the_row_in_the_table() -> None:
    rows = [made(milliseconds=400, **EAGER), made(milliseconds=200)]
    row = pictured_row(rows)
    assert row is not None and "H200, graphs, dense" in stages_svg(row) and "190 ms" in stages_svg(row)
    assert pictured_row([made(batch=4)]) is None


# --- the command


def run(arguments: Sequence[str], code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_adds_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.MODELS, "tiny", replace(SPEC, name="tiny"))
    out = tmp_path / "new" / "rows.jsonl"
    shown = run(
        [
            "-m",
            "tiny",
            "--method",
            "tome+skip:last=1",
            "--batch",
            "1",
            "--batch",
            "2",
            "--repeats",
            "1",
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["case"], row["batch"], row["method"]) for row in rows] == [
        (name, batch, method) for name, batch in (("tiny", 1), ("tiny-batch2", 2)) for method in ("dense", "tome + skip:last=1")
    ]
    assert "tiny, 32x32, batch 2" in shown and "tome + skip:last=1" in shown
    run(["-m", "tiny", "--step", "with tea", "--repeats", "1", "--device", "cpu", "--out", str(out)])
    assert json.loads(out.read_text().splitlines()[-1])["step"] == "with tea"
    assert "no row measured on a GPU" in run(["--table", "--out", str(out)], 2)
    assert "cannot write into" in run(["-m", "tiny", "--device", "cpu", "--out", str(out / "below.jsonl")], 2)
    assert "these are random: add --weights" in run(["-m", "tiny", "--method", "auto:speedup=2", "--out", str(out)], 2)


def test_a_suite_is_run_model_by_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.MODELS, "tiny", replace(SPEC, name="tiny"))
    cases = (Case("a", "tiny"), Case("b", "nano", batch=2), Case("c", "tiny", methods=("skip:last=1",)))
    monkeypatch.setitem(SUITES, "odd", cases)  # type: ignore[misc]

    def opened(name: str, **_: object) -> Pipeline:
        if name == "nano":
            raise OutOfMemory("too large")
        return pipeline()

    monkeypatch.setattr(bench_command, "random_pipeline", opened)
    out = tmp_path / "rows.jsonl"
    run(["--suite", "odd", "--repeats", "1", "--device", "cpu", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["case"], row["suite"], row.get("error")) for row in rows] == [
        ("a", "odd", None),
        ("c", "odd", None),
        ("c", "odd", None),
        ("b", "odd", "OutOfMemory: too large"),
    ]


def test_what_was_measured_is_left_out_when_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another commit do not count."""
    monkeypatch.setitem(presets.MODELS, "tiny", replace(SPEC, name="tiny"))
    cases = tuple(Case(name, "tiny", seconds=10) for name in "abcd")
    monkeypatch.setitem(SUITES, "odd", cases)  # type: ignore[misc]
    monkeypatch.setattr(bench_command, "random_pipeline", lambda name, **_: pipeline())
    out = tmp_path / "rows.jsonl"

    def measured(*arguments: str) -> list[str]:
        before = len(out.read_text().splitlines()) if out.exists() else 0
        run(["--suite", "odd", "--repeats", "1", "--device", "cpu", "--out", str(out), *arguments])
        return [json.loads(line)["case"] for line in out.read_text().splitlines()[before:]]

    assert measured("--shard", "1/4") == ["b"]
    assert measured("--resume", "--shard", "0/2") == ["a"]
    assert measured("--resume") == ["c", "d"]
    monkeypatch.setenv("NEXTSCALE_COMMIT", "another")
    assert measured("--resume", "--shard", "3/4") == ["d"]


def test_tables_are_written_into_a_page(tmp_path: Path) -> None:
    results, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(row) + "\n" for row in (made(), made("FastVAR", 50))))
    page.write_text("before\n<!-- dense:begin -->\nold\n<!-- dense:end -->\nafter\n")
    assert "no place for methods" in run(["--table", "--out", str(results), "--page", str(page)], 2)
    page.write_text(page.read_text() + "<!-- methods:begin -->\n<!-- methods:end -->\n")
    run(["--table", "--out", str(results), "--page", str(page)])
    written = page.read_text()
    assert written.startswith("before\n<!-- dense:begin -->\n| model |") and "\nold\n" not in written and "FastVAR | graphs" in written
    run(["--table", "--out", str(results), "--page", str(page)])
    assert page.read_text() == written
    assert "| FastVAR | graphs |" in run(["--table", "--out", str(results)])


def test_the_tables_of_a_checkout_go_into_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, docs = tmp_path / "benchmarks" / "results.jsonl", tmp_path / "docs"
    page, picture = docs / "benchmarks.md", docs / "stages.svg"
    results.parent.mkdir()
    docs.mkdir()
    results.write_text(json.dumps(made()) + "\n")
    page.write_text("<!-- dense:begin -->\n<!-- dense:end -->\n")
    monkeypatch.setattr(bench_command, "OWN_RESULTS", results)
    monkeypatch.setattr(bench_command, "CHECKOUT", tmp_path)
    run(["--table"])
    assert "| infinity-2b | 1024x1024 | 1 | graphs | **100**" in page.read_text()
    assert "90 ms" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to measure"),
        (["--suite", "al"], "choose one of required"),
        (["--suite", "dense", "--batch", "2"], "already fixes"),
        (["-m", "nano", "--size", "100"], "no schedule generates 100x100"),
        (["--size", "100"], "no schedule generates 100x100"),  # of nano
        (["-m", "nano", "--method", "fasvar"], "did you mean fastvar"),
        (["-m", "nano", "--engine", "fast", "--device", "cpu"], "choose one of graphs, eager, both"),
        (["-m", "nano", "--page", "x.md"], "add --table"),
        (["--suite", "dense", "--weights", "x"], "of one model"),
        (["-m", "nanp"], "did you mean nano"),
        (["--suite", "dense", "--shard", "3/3"], "give i/N"),
    ],
)
def test_refusals(arguments: list[str], told: str) -> None:
    assert told in run(arguments, 2)
