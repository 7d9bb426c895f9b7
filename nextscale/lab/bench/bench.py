"""How fast requests are: methods and engines take turns, so that a ratio compares what ran side by side.

Small stages wait for the host in eager generation, and a host's speed varies by the minute; so speedups over dense generation of the
same round say more than times. Times of stages and decoding are those of the pipeline's own report, from device events; "end to end" is
what a caller waits who has prompt features and wants pixels.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...accel.method import Method
from ...pipeline import Pipeline
from ..evals.methods import DENSE
from ..results import Row
from .plan import Plan
from .rows import row_of, run_name
from .runner import Runner, release, rounds, take_turns, with_engine
from .suites import Case


def bench_case(pipe: Pipeline, case: Case, methods: Mapping[str, Method], plan: Plan) -> list[Row]:
    """A row per engine and method. What fails is a row that says so."""
    runners = [Runner(name, method, with_engine(pipe, engine), case, engine) for engine in plan.engines for name, method in methods.items()]
    rows: list[Row] = []
    run = run_name(case)
    for together in rounds(runners):
        take_turns(together, plan)
        references = {runner.engine: runner for runner in together if runner.name == DENSE}
        known = {(row["engine_asked"], row["method"]) for row in rows}
        new = [runner for runner in together if (runner.engine, runner.name) not in known]
        rows += [row_of(runner, references.get(runner.engine), plan) | {"run": run} for runner in new]
        for runner in together:
            runner.pipe.captures.clear()
        release(pipe.model.device)
    return rows
