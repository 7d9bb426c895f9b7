"""Selection of the rows that the speed tables show.

They are rows of `benchmarks.suites` and `nextscale bench` with random weights, of one kind of GPU and one dtype; outside the step-by-step
table, only rows with kernels. Among equal rows the last one is used, CUDA graphs are preferred to eager mode, and methods should come from
one run. Rows named "reference" belong to the models' reference implementations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from nextscale.eval.results import DENSE, Row

from .suites import APART, step_of

CaseKey = tuple[str, str, int]  # model, image, batch


def timed(rows: Iterable[Row]) -> list[Row]:
    """Returns speed rows with random weights that are not quantized, of the most frequent GPU and dtype."""
    speed = [row for row in rows if row["benchmark"] == "bench" and row["weights"] == "random" and row.get("quantize") is None]
    found = [row for row in speed if not row["hardware"].startswith("CPU")]
    known = Counter((row["hardware"], row["dtype"]) for row in found if row["dtype"] is not None)
    if known:
        [((hardware, dtype), _)] = known.most_common(1)
        # Rows that failed before loading have no dtype.
        found = [row for row in found if row["hardware"] == hardware and row["dtype"] in (dtype, None)]
    return found


def with_kernels(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of user-visible configurations; others are steps of the step-by-step table."""
    return [row for row in timed(rows) if row["kernels"] and step_of(row) == row["engine_asked"]]


def references(rows: Iterable[Row]) -> dict[tuple[str, CaseKey], Row]:
    """Returns the rows of the reference implementations, by kind of GPU and case."""
    return {(row["hardware"], case_of(row)): row for row in rows if row["benchmark"] == "reference"}


def reference_of(row: Row, known: Mapping[tuple[str, CaseKey], Row]) -> Row | None:
    """Returns the row of the reference implementation for the same case on the same kind of GPU."""
    return known.get((row["hardware"], case_of(row)))


def case_of(row: Row) -> CaseKey:
    return row["model"], image(row), row["batch"]


def image(row: Row) -> str:
    """Returns the size as WIDTHxHEIGHT."""
    size = row["size"]  # [height, width]
    return f"{size[1]}x{size[0]}" if isinstance(size, list) else str(size or "its own size")


def by_case(rows: Iterable[Row]) -> dict[CaseKey, list[Row]]:
    """Groups rows by case, in the order of their first measurement. If a case has rows with graphs, its eager rows are dropped."""
    found: dict[CaseKey, list[Row]] = {}
    for row in rows:
        found.setdefault(case_of(row), []).append(row)
    return {case: [row for row in own if row["engine_asked"] == "graphs"] or own for case, own in found.items()}


def one_run(rows: Iterable[Row]) -> list[Row]:
    """Selects rows of one case: the last of the runs with most methods, completed by methods of other runs."""
    runs: dict[str, dict[str, Row]] = {}
    for row in rows:
        runs.setdefault(row["run"], {})[row["method"]] = row
    latest_first = [*reversed(runs.values())]
    numbers = [sum("error" not in row for row in run.values()) for run in latest_first]
    shown = dict(latest_first[numbers.index(max(numbers))])
    for row in (row for run in latest_first for row in run.values()):
        shown.setdefault(row["method"], row)
    return [*shown.values()]


def common(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of suites without separate tables."""
    return [row for row in rows if row.get("suite") not in APART]


def dense_rows(rows: Iterable[Row]) -> list[Row]:
    """Returns the last dense row of every model, size and batch."""
    usable = [row for row in common(with_kernels(rows)) if row["method"] == DENSE]
    return [own[-1] for own in by_case(usable).values()]


def method_rows(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of every model, size and batch with methods: dense generation and all methods.

    Eager rows are dropped if a separate table has rows with graphs.
    """
    usable = with_kernels(rows)
    replayed = {case_of(row) for row in usable if row.get("suite") in APART and row["engine_asked"] == "graphs"}
    cases = by_case(common(usable))
    known = [own for case, own in cases.items() if case not in replayed or own[0]["engine_asked"] == "graphs"]
    return [row for own in known if any(row["method"] != DENSE for row in own) for row in one_run(own)]


def suite_rows(rows: Iterable[Row], suite: str) -> dict[CaseKey, list[Row]]:
    cases = by_case(row for row in with_kernels(rows) if row.get("suite") == suite)
    return {case: one_run(own) for case, own in cases.items()}


def is_step(row: Row) -> bool:
    """Returns True for rows of the step-by-step table. Eager mode with kernels is not a step, nor is dense generation that failed to
    capture."""
    ran_as_asked = row["engine"] == row["engine_asked"] or row["method"] != DENSE
    return row["benchmark"] == "bench" and "error" not in row and step_of(row) != "eager" and ran_as_asked
