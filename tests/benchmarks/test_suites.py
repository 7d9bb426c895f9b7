"""The cases of the speed tables: which are measured, and the columns that their rows have besides those of `nextscale bench`."""

from __future__ import annotations

import ctypes
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import energy, suites
from benchmarks.energy import EnergyMeter
from benchmarks.results import RESULTS, measure, record
from benchmarks.roofline import Rates, request_roofline
from benchmarks.shown_rows import CaseKey, case_of, dense_rows, method_rows, suite_rows
from benchmarks.suites import (
    APART,
    CASES,
    SPARSE,
    TIMED_METHODS,
    Case,
    Plan,
    chosen_cases,
    known_percentiles_ms,
    part_of,
    request_workload,
    rows_of,
    timed_methods,
)
from nextscale.errors import OutOfMemory, SettingError
from nextscale.eval.bench import WARM_ROUNDS
from nextscale.eval.results import read_rows
from nextscale.loading import presets
from nextscale.loading.presets import model_spec
from nextscale.methods import Method, MethodRun, RunSetup, resolve_method
from nextscale.pipeline import Pipeline
from nextscale.planning.cost import Workload, request_cost
from nextscale.stage import Schedule
from tests.eval.test_bench import CPU, SIDES, SPEC, pipeline
from tests.helpers.tiny import shared_pipeline

Row = dict[str, Any]
PLAN = Plan(CPU, torch.float32, "eager", 1, Rates(flops=1e12, bytes=1e11))
TINY = Case("tiny", "tiny", (32, 32))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.MODELS, "tiny", replace(SPEC, name="tiny"))
    monkeypatch.setattr(suites, "random_pipeline", lambda name, **_: pipeline())


@pytest.mark.parametrize("file", sorted(Path(suites.__file__).parent.glob("[!_]*.py")), ids=lambda file: file.stem)
def test_every_program_can_be_imported(file: Path) -> None:
    importlib.import_module(f"benchmarks.{file.stem}")


def test_a_benchmark_keeps_what_it_has_measured_and_what_failed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def measured() -> Any:
        yield measure("one", {"case": "first"}, lambda: {"ms": 1.0})
        assert [row["ms"] for row in read_rows(file)] == [1.0]  # before the next one is begun
        yield measure("one", {"case": "second"}, lambda: {"ms": 1 / 0})

    rows = record(measured(), file)
    assert rows == read_rows(file)
    assert rows[1]["error"] == "ZeroDivisionError: division by zero" and rows[1]["case"] == "second"


# --- cases


def test_cases_can_be_run() -> None:
    for case in CASES:
        model_spec(case.model).settings.schedules.choose(case.size, None)
        timed_methods(case.methods, case.stagevar)
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_row_of_the_tables_is_measured() -> None:
    """In parts, of which none is much longer than the others; those with tables of their own keep their suite."""
    measured: dict[CaseKey, set[str]] = {}
    for case in CASES:
        key = case_of({"model": case.model, "size": [*case.size], "batch": case.batch})
        measured.setdefault(key, {"dense"}).update(timed_methods(case.methods, case.stagevar))
    rows = read_rows(RESULTS)
    shown = [*dense_rows(rows), *method_rows(rows), *(row for name in APART for own in suite_rows(rows, name).values() for row in own)]
    for row in shown:
        assert row["method"] in measured[case_of(row)], row["case"]
    assert {case.suite for case in CASES} == {"current", *APART}
    total = sum(case.seconds for case in CASES)
    for parts in (1, 2, 3, 5):
        split = [part_of(CASES, part, parts) for part in range(parts)]
        assert [case for part in split for case in part] == [*CASES]
        assert max(sum(case.seconds for case in part) for part in split) < 1.3 * total / parts


def test_cases_are_chosen_by_name_suite_or_model() -> None:
    assert chosen_cases([]) == [*CASES]
    assert [case.name for case in chosen_cases(["8b-512", "throughput", "hart-0.7b"])] == [
        "2b-1024-batch8",
        "8b-512",
        "hart-1024",
        "hart-1024-batch4",
        "hart-1024-blocks",
    ]
    with pytest.raises(SystemExit, match="got 'al'"):
        chosen_cases(["al"])


def test_stagevar_runs_with_ranks_where_none_are_published() -> None:
    [case] = chosen_cases(["var-d30"])
    assert timed_methods(case.methods, case.stagevar)["StageVAR"] == resolve_method("stagevar:ranks=0.177")
    assert timed_methods(case.methods)["StageVAR"] == resolve_method("stagevar")


def test_sparsevar_keeps_the_share_of_its_name() -> None:
    model = pipeline().model
    plans = timed_methods([SPARSE])[SPARSE].forecast(model, Schedule((1, 2, 4, 8, 16)))
    assert [plan.num_tokens for plan in plans] == [None, None, None, None, 16 + 60]  # 30 % of 256 cells; 64 are too few to begin with


def test_methods_by_name() -> None:
    assert list(timed_methods(["all"])) == [*TIMED_METHODS]
    assert timed_methods(["fastvar + skip:last=1"])["fastvar + skip:last=1"].label == "FastVAR + SkipStages(last=1)"
    with pytest.raises(SettingError, match="unknown method 'fastvra'; did you mean fastvar"):
        timed_methods(["fastvra"])


# --- rows


def test_rows_tell_stages_predictions_and_the_roofline(tiny: None) -> None:
    dense, skip = rows_of([replace(TINY, methods=("skip:last=1",))], PLAN)
    assert skip["tokens"] == [1, 4, 16, 64, 0] and skip["rows"] == [2, 2, 2, 2, 0] and skip["padding"] == [0] * 5
    assert dense["predicted_gb"] >= skip["predicted_gb"] and len(dense["stage_median_ms"]) == 5
    for row in (dense, skip):
        assert (row["suite"], row["case"], row["weights"], row["guided"]) == ("current", "tiny", "random", True)
        assert row["step"] == "eager, plain torch" and row["run"].endswith(" tiny")
        assert row["times_roofline"] == pytest.approx(row["median_ms"] / row["roofline_ms"], rel=0.1)
        assert row["roofline_ms"] >= row["roofline_arithmetic_ms"] > 0
        assert row["matmul_tflops"] == 1 and row["copy_tb_per_s"] == 0.1 and row["joules_per_image"] is None
    known = {name for row in read_rows(RESULTS) if row["benchmark"] == "bench" and "error" not in row for name in row}
    assert {*dense} == known - {"not_captured", "fp8_tflops"}
    json.dumps([dense, skip], allow_nan=False)
    [named] = rows_of([TINY], replace(PLAN, step="with tea"))
    assert named["step"] == "with tea"


def test_a_case_without_fused_attention_multiplies_and_normalizes(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[bool] = []

    def seen(*_: Any, **__: Any) -> list[Row]:
        fused.append(torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled())
        return []

    with monkeypatch.context() as patched:
        patched.setattr(suites, "bench", seen)
        assert [*rows_of([replace(TINY, unfused=flag) for flag in (False, True)], PLAN)] == []
    assert fused == [True, False] and torch.backends.cuda.flash_sdp_enabled()
    [row] = rows_of([replace(TINY, suite="papers", unfused=True)], PLAN)
    assert "error" not in row and row["suite"] == "papers"


def test_what_a_replay_cannot_tell_is_no_number() -> None:
    assert known_percentiles_ms([[0.1, 0.2], [0.3, 0.4]]) == {"median_ms": 500, "p20_ms": 380, "p80_ms": 620}
    assert known_percentiles_ms([[0.1, 0.2], [None, 0.4]]) == {"median_ms": 350, "p20_ms": 320, "p80_ms": 380}  # skipped stages
    assert known_percentiles_ms([[0.1, 0.2], [None, None]]) is None


def test_models_are_measured_one_by_one_and_one_that_fails_is_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str, **_: object) -> Pipeline:
        if name == "nano":
            raise OutOfMemory("too large")
        return pipeline()

    monkeypatch.setattr(suites, "random_pipeline", opened)
    cases = [TINY, Case("b", "nano", (512, 512), 2, ("fastvar",)), replace(TINY, name="c", methods=("skip:last=1",), suite="growth")]
    rows = [*rows_of(cases, PLAN)]
    assert [(row["case"], row["suite"], row["method"], row.get("error")) for row in rows] == [
        ("tiny", "current", "dense", None),
        ("c", "growth", "dense", None),
        ("c", "growth", "skip:last=1", None),
        ("b", "current", "dense", "OutOfMemory: too large"),
        ("b", "current", "fastvar", "OutOfMemory: too large"),
    ]
    assert rows[-1]["size"] == [512, 512] and rows[-1]["dtype"] is None


def test_what_was_measured_is_left_out_when_a_run_goes_on(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another commit do not count."""
    monkeypatch.setattr(suites, "CASES", tuple(replace(TINY, name=name, seconds=10) for name in "abcd"))
    out = tmp_path / "rows.jsonl"

    def measured(*words: str) -> list[str]:
        return [row["case"] for row in suites.main(["--repeats", "1", "--device", "cpu", "--out", str(out), *words])]

    assert measured("--shard", "1/4") == ["b"]
    assert measured("--resume", "--shard", "0/2") == ["a"]
    assert measured("--resume") == ["c", "d"]
    assert [row["case"] for row in read_rows(out)] == ["b", "a", "c", "d"]
    monkeypatch.setenv("NEXTSCALE_COMMIT", "another")
    assert measured("--resume", "--shard", "3/4") == ["d"]


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
        if self.runs > WARM_ROUNDS + PLAN.repeats:
            raise RuntimeError("worn out")
        return MethodRun()


def meter(broken: bool = False) -> EnergyMeter:
    return EnergyMeter(Library(broken), ctypes.c_void_p())  # type: ignore[arg-type]


def test_energy_is_shared_among_the_images(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "METERED_SECONDS", 0)  # so two requests
    [row] = rows_of([replace(TINY, batch=2)], replace(PLAN, meter=meter()))
    assert row["joules_per_image"] == 0.2  # 1 J for 4 images, rounded
    [row] = rows_of([replace(TINY, batch=2)], replace(PLAN, meter=meter(broken=True)))
    assert row["joules_per_image"] is None
    assert EnergyMeter.of(CPU) is None


def test_a_failure_while_energy_is_metered_leaves_the_times(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suites.TIMED_METHODS, "failing", (FailingLater(),))  # type: ignore[misc]
    _, row = rows_of([replace(TINY, methods=("failing",))], replace(PLAN, meter=meter()))
    assert "error" not in row and row["median_ms"] > 0
    assert row["joules_per_image"] is None and row["not_metered"] == "RuntimeError: worn out"


# --- rooflines


def test_the_roofline_is_arithmetic_or_reading_whichever_takes_longer() -> None:
    model, work = pipeline().model, request_workload(pipeline(), TINY)
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
    model, work = pipeline().model, request_workload(pipeline(), TINY)
    roofline = request_roofline(model, work, [1.0] * 5, Rates(flops=1e9, bytes=1e8))
    assert max(roofline.arithmetic, roofline.reading) < roofline.both < roofline.arithmetic + roofline.reading


def test_rates_are_measured() -> None:
    rates = Rates.measured(CPU, torch.float32)
    assert 1e6 < rates.flops < 1e15 and 1e6 < rates.bytes < 1e14


def test_text_counts_in_the_work() -> None:
    any_size = replace(TINY, size=None)  # type: ignore[arg-type]
    assert request_workload(shared_pipeline("var"), any_size).text_tokens == 0
    assert request_workload(shared_pipeline("star"), replace(any_size, batch=3)).text_tokens == 77
    assert request_workload(pipeline(), TINY) == Workload(Schedule(SIDES), text_tokens=24)  # this model reads no more


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_graphs_are_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setitem(presets.MODELS, "tiny", replace(SPEC, name="tiny"))
    rates = Rates.measured(cuda, torch.bfloat16)
    plan = Plan(cuda, torch.bfloat16, "both", 2, rates, EnergyMeter.of(cuda))
    rows = [*rows_of([replace(TINY, methods=(SPARSE, "stagevar_variants:ranks=measured"))], plan)]
    engines = [(row["engine_asked"], row["engine"]) for row in rows]
    assert engines == [("eager", "eager")] * 3 + [("graphs", "graphs")] * 2 + [("graphs", "eager")]
    for row in rows:
        assert row.get("error") is None and row["peak_gb"] >= row["weights_gb"] and row["times_roofline"] > 1
        assert (row["capture"] is not None) == (row["engine"] == "graphs")
    assert rows[3]["capture"]["gb"] >= 0 and "not_captured" in rows[5]
