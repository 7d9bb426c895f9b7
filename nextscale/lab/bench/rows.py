"""Rows of results from what runners have seen: times, ratios, MACs, tokens, the roofline and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from ... import kernels
from ...accel.method import Method
from ...pipeline import Engine
from ...planning.memory import ASSUMED_KEPT, request_memory, weights_bytes
from ...report import Report
from ..machine import where
from ..results import Row, short_error
from ..timing import percentiles, percentiles_ms
from .plan import Plan
from .requests import request_workload
from .roofline import request_roofline
from .runner import Runner, Timed
from .suites import Case

BENCHMARK = "bench"


def run_name(case: Case) -> str:
    """One name for everything that is measured in turns."""
    return f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {case.name}"


def failed_rows(case: Case, methods: Mapping[str, Method], plan: Plan, error: Exception) -> list[Row]:
    """The rows of a model that could not be built."""
    failure = {"error": short_error(error), "run": run_name(case)}
    return [config(case, name, method, engine, plan) | failure for engine in plan.engines for name, method in methods.items()]


def row_of(runner: Runner, dense: Runner | None, plan: Plan) -> Row:
    row = config(runner.case, runner.name, runner.method, runner.engine, plan) | {
        "dtype": str(runner.pipe.model.dtype).removeprefix("torch."),
        **plan.rates.to_row(),
    }
    if runner.timed:
        row |= {"size": [*runner.timed[0].report.size], "engine": runner.timed[0].report.engine}
    if runner.not_captured is not None:
        row["not_captured"] = runner.not_captured
    if runner.not_metered is not None:
        row["not_metered"] = runner.not_metered
    if runner.error is not None:
        return row | {"error": runner.error}
    return row | time_numbers(runner, dense) | stage_numbers(runner) | roofline_numbers(runner, plan) | memory_numbers(runner)


def config(case: Case, name: str, method: Method, engine: Engine, plan: Plan) -> Row:
    """What a row is about, known before anything has run."""
    asked = [*case.size] if isinstance(case.size, tuple) else [case.size, case.size] if isinstance(case.size, int) else None
    with_kernels = kernels.enabled(plan.device)
    return {
        "benchmark": BENCHMARK,
        "suite": case.suite,
        "case": case.name,
        "model": case.model,
        "size": asked,
        "batch": case.batch,
        "dtype": None,
        "quantize": plan.quantize,
        "engine": engine,
        "engine_asked": engine,
        "kernels": with_kernels,
        "step": plan.step or (engine if with_kernels else f"{engine}, plain torch"),
        "method": name,
        "settings": method.label,
        "guided": True,
        "weights": plan.weights,
        "quality": None,
        **where(plan.device),
    }


def time_numbers(runner: Runner, dense: Runner | None) -> Row:
    timed, reports = runner.timed, reports_of(runner)

    def speedup(seconds: Callable[[Timed], float]) -> Row | None:
        if dense is None or dense.error is not None:
            return None
        return percentiles([seconds(before) / seconds(after) for before, after in zip(dense.timed, timed, strict=True)])

    end_to_end = percentiles_ms([one.seconds for one in timed])
    return {
        "repeats": len(timed),
        **percentiles_ms([one.generate_seconds for one in timed]),
        "decode": percentiles_ms([report.decode_seconds for report in reports]),
        "end_to_end": end_to_end,
        "speedup": speedup(lambda one: one.generate_seconds),
        "speedup_end_to_end": speedup(lambda one: one.seconds),
        "images_per_second": round(1000 * runner.case.batch / end_to_end["median_ms"], 3),
        "choice": known_percentiles_ms([[stage.sampling_seconds for stage in report.stages] for report in reports]),
        "residual": known_percentiles_ms([[stage.residual_seconds for stage in report.stages] for report in reports]),
        "joules_per_image": None if runner.energy is None else round(runner.energy, 1),
    }


def stage_numbers(runner: Runner) -> Row:
    reports = reports_of(runner)
    first, stages = reports[0].stages, range(len(reports[0].stages))
    return {
        "cost_share": round(statistics.fmean(report.cost_share for report in reports), 4),
        "tokens": [stage.tokens for stage in first],
        "computed": [round(stage.computed, 1) for stage in first],
        "padding": [round(statistics.fmean(report.stages[i].padding for report in reports), 4) for i in stages],
        "rows": [stage.rows for stage in first],
        "stage_median_ms": [percentiles_ms([report.stages[i].seconds for report in reports])["median_ms"] for i in stages],
    }


def roofline_numbers(runner: Runner, plan: Plan) -> Row:
    """The least time at the measured rates, and how far generation is from it."""
    reports, pipe = reports_of(runner), runner.pipe
    shares = [statistics.fmean(report.stages[i].cost_share for report in reports) for i in range(len(reports[0].stages))]
    roofline = request_roofline(pipe.model, request_workload(pipe, runner.case), shares, plan.rates)
    median = percentiles_ms([one.generate_seconds for one in runner.timed])["median_ms"]
    return {
        "roofline_ms": round(1000 * roofline.both, 3),
        "roofline_arithmetic_ms": round(1000 * roofline.arithmetic, 3),
        "roofline_reading_ms": round(1000 * roofline.reading, 3),
        "times_roofline": round(median / (1000 * roofline.both), 3),
    }


def memory_numbers(runner: Runner) -> Row:
    """Measured and predicted peaks, and what captured graphs keep."""
    pipe, workload, captured = runner.pipe, request_workload(runner.pipe, runner.case), runner.warm_up
    weights = weights_bytes(pipe.model) + weights_bytes(pipe.tokenizer)
    peak = max(one.memory for one in runner.timed) + runner.captured_bytes + (weights if runner.device.type == "cuda" else 0)
    plans = pipe.settled(runner.method, workload.schedule, workload.images).forecast(
        pipe.model, workload.schedule, workload.guided, ASSUMED_KEPT
    )
    predicted = request_memory(pipe.model, pipe.tokenizer, workload, plans)
    return {
        "peak_gb": round(peak / 1e9, 2),
        "predicted_gb": round(predicted.peak / 1e9, 2),  # of eager generation
        "weights_gb": round(weights / 1e9, 2),
        "planned_gb": round(runner.timed[0].report.planned_memory / 1e9, 2),
        "capture": captured
        and {"seconds": round(captured.seconds, 2), "graphs": captured.graphs, "gb": round(runner.captured_bytes / 1e9, 2)},
    }


def reports_of(runner: Runner) -> list[Report]:
    return [one.report for one in runner.timed]


def known_percentiles_ms(reports: Sequence[Sequence[float | None]]) -> dict[str, float] | None:
    """Percentiles of sums over the measured stages of every report; None where a report has none, as those of captured graphs."""
    known = [[seconds for seconds in stages if seconds is not None] for stages in reports]
    return percentiles_ms([sum(stages) for stages in known]) if all(known) else None
