"""Which rows of the results file the tables of speed show.

These are rows of `benchmarks.suites` and `nextscale bench` with random weights on a GPU, of one kind of GPU and one dtype; outside the
waterfall only those with kernels. Of equal rows the last one counts, of engines captured graphs, and of methods those of one run. Rows
"reference" are the models' reference implementations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from nextscale.eval.results import DENSE, Row

from .suites import APART, step_of

CaseKey = tuple[str, str, int]  # model, image, batch


def timed(rows: Iterable[Row]) -> list[Row]:
    """Returns rows about speed with random weights, not quantized, of the GPU and dtype that most have."""
    speed = [row for row in rows if row["benchmark"] == "bench" and row["weights"] == "random" and row.get("quantize") is None]
    found = [row for row in speed if not row["hardware"].startswith("CPU")]
    known = Counter((row["hardware"], row["dtype"]) for row in found if row["dtype"] is not None)
    if known:
        [((hardware, dtype), _)] = known.most_common(1)
        # What failed before there was a model tells no dtype.
        found = [row for row in found if row["hardware"] == hardware and row["dtype"] in (dtype, None)]
    return found


def with_kernels(rows: Iterable[Row]) -> list[Row]:
    """Those that show what a user gets; others are steps of the waterfall."""
    return [row for row in timed(rows) if row["kernels"] and step_of(row) == row["engine_asked"]]


def references(rows: Iterable[Row]) -> dict[tuple[str, CaseKey], Row]:
    """What the models' own programs took, by kind of GPU and case."""
    return {(row["hardware"], case_of(row)): row for row in rows if row["benchmark"] == "reference"}


def reference_of(row: Row, known: Mapping[tuple[str, CaseKey], Row]) -> Row | None:
    """The row of the reference implementation for the same case on the same kind of GPU."""
    return known.get((row["hardware"], case_of(row)))


def case_of(row: Row) -> CaseKey:
    return row["model"], image(row), row["batch"]


def image(row: Row) -> str:
    size = row["size"]
    return f"{size[0]}x{size[1]}" if isinstance(size, list) else str(size or "its own size")


def by_case(rows: Iterable[Row]) -> dict[CaseKey, list[Row]]:
    """In the order in which cases were first measured. Where graphs were asked for, rows of eager generation do not count."""
    found: dict[CaseKey, list[Row]] = {}
    for row in rows:
        found.setdefault(case_of(row), []).append(row)
    return {case: [row for row in own if row["engine_asked"] == "graphs"] or own for case, own in found.items()}


def one_run(rows: Iterable[Row]) -> list[Row]:
    """Rows of one case: those of the run that timed most methods, or the last such; then, from other runs, methods that it lacks."""
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
    """The rows of suites that have no table of their own."""
    return [row for row in rows if row.get("suite") not in APART]


def dense_rows(rows: Iterable[Row]) -> list[Row]:
    """Returns the last one of every model, size and batch."""
    usable = [row for row in common(with_kernels(rows)) if row["method"] == DENSE]
    return [own[-1] for own in by_case(usable).values()]


def method_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows of every model, size and batch that was measured with methods: dense generation and the methods that were measured beside it.

    Rows of eager generation do not count where a table of its own has graphs.
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
    """Eager generation with kernels is beside the chain; dense generation that could not be captured is no step of graphs."""
    ran_as_asked = row["engine"] == row["engine_asked"] or row["method"] != DENSE
    return row["benchmark"] == "bench" and "error" not in row and step_of(row) != "eager" and ran_as_asked
