"""Tables of speed from made-up rows: which rows they show, and their cells."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cells import shown_method, with_tables
from benchmarks.shown_rows import method_rows
from benchmarks.speed_tables import (
    TABLES,
    dense_table,
    growth_table,
    methods_table,
    papers_table,
    pictured_row,
    speed_tables,
    summary_table,
    throughput_table,
    waterfall_table,
)
from benchmarks.suites import APART, SPARSE

Row = dict[str, Any]


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


def theirs(**changes: Any) -> Row:
    """A row of the reference implementation."""
    known = {"benchmark": "reference", "model": "infinity-2b", "size": [1024, 1024], "batch": 1, "hardware": "NVIDIA H200"}
    return {**known, "median_ms": 790, "decode": {"median_ms": 99}, "peak_gb": 13.0, "remark": "it needs tea", **changes}


def lines_of(table: str) -> list[str]:
    return [line for line in table.splitlines()[2:] if line.startswith("|")]


def test_the_dense_table_shows_the_last_row_of_graphs() -> None:
    rows = [made(milliseconds=400, **EAGER), made(milliseconds=300, **EAGER), made(milliseconds=200), made(milliseconds=250, **EAGER)]
    [line] = lines_of(dense_table([*rows, theirs()]))
    assert "| 1 | **200** | 790 | 280 | 2.0x |" in line
    [line] = lines_of(dense_table(rows[:2]))
    assert "| **300** |" in line
    [line] = lines_of(dense_table([*rows[:1], theirs()]))
    assert "| **400** | 790 |" in line and line.endswith("| 50 J | 8.2 GiB | 12.1 GiB |")
    note = dense_table(rows).splitlines()[-1]
    assert "788 TFLOP/s" in note and "4.30 TB/s" in note and "Median of 10 runs" in note


def test_tables_leave_out_other_machines_and_suites_with_tables_of_their_own() -> None:
    assert speed_tables([made(hardware="CPU x86_64")]) == {}
    assert set(speed_tables([made(suite="growth")])) == {"growth"}
    assert set(speed_tables([made(suite="throughput")])) == {"throughput"}
    assert set(speed_tables([made(), made("FastVAR", 50)])) == {"dense", "methods"}
    assert set(TABLES) == {"dense", "methods", "waterfall", "growth", "throughput", "papers"}


def test_the_methods_table_compares_what_was_measured_together() -> None:
    before = [made(name, 80, **EAGER) for name in ("dense", SPARSE, "ToMe")]
    assert [row["method"] for row in method_rows(before)] == ["dense", SPARSE, "ToMe"]
    rows = [*before, made(), made(SPARSE, 50, engine="eager", not_captured="SettingError: no")]
    first, second = lines_of(methods_table(rows))
    assert "| dense | graphs | 100 | **1.00** (1.00–1.00) |" in first
    name = shown_method(SPARSE)
    assert f"| {name} | eager | 50 | **2.00** (2.00–2.00) | 130 | **2.00** (2.00–2.00) | 50% | 25 | 2.0x | 50 J | 8.2 GiB |" in second
    assert f"because they cannot be captured: {name} (SettingError: no)." in methods_table(rows)


def test_eager_rows_give_way_to_graphs_in_a_table_of_their_own() -> None:
    before = [made(name, 80, **EAGER) for name in ("dense", "ToMe")]
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
        "| reference implementation | 790 |  | 1.00 |  | 12.1 GiB |",
        "| dense | 100 | **1.00** | 7.90 | 50% | 8.2 GiB |",
        "| FastVAR | 50 | **2.00** | 15.80 | 50% | 8.2 GiB |",
        "| StageVAR | OutOfMemory: no |  |  |  |  |",
    ]
    assert lines_of(summary_table(rows))[0] == "| dense | 100 | **1.00** |  | 50% | 8.2 GiB |"
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
        f"{start} tea, {shown_method(SPARSE)} (eager) | 50 | 2.00 | **15.80** | 25 | 2.0x |",
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
    assert line == "| infinity-2b | 1024x1024 | 8 | dense | **5.56** | **1.00** (1.00–1.00) | 8.2 GiB |"


def test_cases_of_the_papers_stay_apart_though_model_and_size_are_equal() -> None:
    rows = [
        made(name, milliseconds, suite="papers", case=case)
        for case, slower in (("2b-1024-unfused", 3), ("2b-1024-tome", 1))
        for name, milliseconds in (("dense", 100 * slower), ("FastVAR", 50 * slower))
    ]
    found = lines_of(papers_table(rows))
    assert [line.split(" | ")[0].strip("| ") for line in found] == ["2b-1024-unfused"] * 2 + ["2b-1024-tome"] * 2
    assert [line.split(" | ")[6] for line in found] == ["300", "150", "100", "50"]
    assert papers_table([made()]) == ""


def test_the_picture_is_that_of_the_row_in_the_table() -> None:
    rows = [made(milliseconds=400, **EAGER), made(milliseconds=200)]
    row = pictured_row(rows)
    assert row is not None and row["stage_median_ms"][-1] == 190
    assert pictured_row([made(batch=4)]) is None


def test_rows_of_the_command_alone_have_a_line() -> None:
    """`nextscale bench --out` writes no suite, step, stages, roofline or energy."""
    more = ("suite", "step", "tokens", "stage_median_ms", "roofline_ms", "times_roofline", "joules_per_image", "matmul_tflops")
    rows = [{name: value for name, value in row.items() if name not in more} for row in (made(), made("FastVAR", 50), made(kernels=False))]
    [line] = lines_of(dense_table(rows))
    assert line.endswith("| **100** | 180 | 8.2 GiB |")
    assert len(lines_of(methods_table(rows))) == 2
    assert pictured_row(rows) is None


def test_tables_are_written_into_a_page() -> None:
    page = "before\n<!-- dense:begin -->\nold\n<!-- dense:end -->\nafter\n"
    written = with_tables(page, {"dense": "new \\1"})
    assert written == "before\n<!-- dense:begin -->\nnew \\1\n<!-- dense:end -->\nafter\n"
    assert with_tables(written, {"dense": "new \\1"}) == written
    with pytest.raises(AssertionError, match="no place for the table 'methods'"):
        with_tables(page, {"methods": "new"})
