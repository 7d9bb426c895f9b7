"""Tables of speed from the rows of the results file; `shown_rows` says which rows count. A table of nothing is empty."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ..evals.methods import DENSE
from ..results import Row
from .cells import (
    BATCH,
    CASE,
    END_TO_END,
    ENERGY,
    ENGINE,
    IMAGE,
    MACS,
    MEMORY,
    METHOD,
    MODEL,
    REFERENCE,
    ROOFLINE,
    Column,
    capture_note,
    faster,
    heads_of,
    line,
    machines,
    own_head,
    reference_note,
    repeats,
    roofline_note,
    table,
    table_of,
)
from .shown_rows import CaseKey, case_of, dense_rows, method_rows, reference_of, references, suite_rows
from .suites import SPARSE
from .waterfall import waterfall_table

SUMMARY_CASE: CaseKey = ("infinity-2b", "1024x1024", 1)
SUMMARY_METHODS = (DENSE, "skip the last two stages", SPARSE, "FastVAR", "StageVAR")
SPARSE_NOTE = (
    "Random weights generate noise, which has detail everywhere, so a share takes the place of SparseVAR's threshold: a quarter of the"
    " cells and the anchors."
)


def summary_table(rows: Sequence[Row]) -> str:
    """A row for the reference implementation, for dense generation and for each published method: what a visitor asks first."""
    found = {row["method"]: row for row in method_rows(rows) if case_of(row) == SUMMARY_CASE}
    shown = [found[name] for name in SUMMARY_METHODS if name in found]
    if DENSE not in found:
        return ""
    known = references(rows)
    theirs = reference_of(found[DENSE], known)
    model, size, _ = SUMMARY_CASE
    columns = (
        Column(f"`{model}`, {size} px", METHOD.cell, "l", config=True),
        Column("generate, ms", lambda row: f"{row['median_ms']:.0f}"),
        Column("speedup over dense", lambda row: "" if row["speedup"] is None else f"**{row['speedup']['median']:.2f}**"),
        Column("over the reference implementation", lambda row: "" if theirs is None else f"{theirs['median_ms'] / row['median_ms']:.2f}"),
        MACS,
        MEMORY,
    )
    first = [] if theirs is None else [[REFERENCE, f"{theirs['median_ms']:.0f}", "", "1.00", "", f"{theirs['peak_gb']:.1f} GB"]]
    note = (
        f"Medians; {machines(shown)}, batch 1, guided, captured graphs, random weights, decoding not included. Methods were measured in"
        f" turns with dense generation. {SPARSE_NOTE}{reference_note(shown, known)}"
    )
    return table(*heads_of(columns), [*first, *(line(row, columns) for row in shown)], note)


def dense_table(rows: Sequence[Row]) -> str:
    shown = dense_rows(rows)
    if not shown:
        return ""
    known = references(rows)

    def theirs(row: Row, name: str, form: str) -> str:
        own = reference_of(row, known)
        return "" if own is None else form.format(own[name])

    def decoding(row: Row) -> str:
        own = reference_of(row, known)
        beside = f" (reference {own['decode']['median_ms']:.0f})" if own and own["decode"] else ""
        return f"{row['decode']['median_ms']:.0f}{beside}"

    columns = (
        MODEL,
        IMAGE,
        BATCH,
        ENGINE,
        Column("generate, ms", lambda row: f"**{row['median_ms']:.0f}** ({row['p20_ms']:.0f}–{row['p80_ms']:.0f})"),
        Column(f"{REFERENCE}, ms", lambda row: theirs(row, "median_ms", "{:.0f}")),
        Column("of which, ms", own_head),
        Column("decode, ms", decoding),
        END_TO_END,
        *ROOFLINE,
        ENERGY,
        MEMORY,
        Column(REFERENCE, lambda row: theirs(row, "peak_gb", "{:.1f} GB")),
    )
    note = (
        f"Median of {repeats(shown)} runs (20th–80th percentile); {machines(shown)}; dense, guided, random weights, so no quality column."
        f' "End to end" is from prompt features to pixels.{reference_note(shown, known)}{roofline_note(shown)}'
    )
    return table_of(columns, shown, note)


def methods_table(rows: Sequence[Row]) -> str:
    shown = method_rows(rows)
    if not shown:
        return ""
    columns = (
        *CASE,
        Column("generate, ms", lambda row: f"{row['median_ms']:.0f}"),
        Column("speedup", lambda row: faster(row, "speedup")),
        END_TO_END,
        Column("end-to-end speedup", lambda row: faster(row, "speedup_end_to_end")),
        MACS,
        *ROOFLINE,
        ENERGY,
        MEMORY,
    )
    note = (
        f"Median of {repeats(shown)} runs in which the methods take turns (20th–80th percentile); {machines(shown)}; guided, random"
        f" weights, so no quality column. {SPARSE_NOTE}{capture_note(shown)}{roofline_note(shown)}"
    )
    return table_of(columns, shown, note)


def growth_table(rows: Sequence[Row]) -> str:
    """Time against the size of the image."""
    found = suite_rows(rows, "growth")
    shown = [row for own in found.values() for row in own]
    if not shown:
        return ""
    methods = list(dict.fromkeys(row["method"] for row in shown))
    lines = []
    for (model, size, _), own in found.items():
        cells = {row["method"]: growth_cell(row) for row in own}
        lines.append([model, size, *(cells.get(method, "") for method in methods)])
    note = (
        f"Generation in ms and speedup over dense; medians of {repeats(shown)} runs; {machines(shown)}; guided, batch 1, random"
        f" weights.{capture_note(shown)} Images above 1024 px are larger than what the models were trained for."
    )
    return table(["model", "image", *methods], "ll" + "r" * len(methods), lines, note)


def growth_cell(row: Row) -> str:
    if "error" in row:
        return "refused" if row["error"].startswith("SettingError") else row["error"].partition(":")[0]
    ratio = row["speedup"]
    return f"{row['median_ms']:.0f}" + ("" if row["method"] == DENSE or ratio is None else f" (**{ratio['median']:.2f}**)")


def throughput_table(rows: Sequence[Row]) -> str:
    shown = [row for own in suite_rows(rows, "throughput").values() for row in own]
    if not shown:
        return ""
    columns = (
        *CASE,
        Column("images per second", lambda row: f"**{row['images_per_second']:.2f}**"),
        Column("relative throughput", lambda row: faster(row, "speedup_end_to_end")),
        ENERGY,
        MEMORY,
    )
    note = f"From prompt features to pixels; medians of {repeats(shown)} runs; {machines(shown)}; guided, random weights."
    return table_of(columns, shown, note)


TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "dense": dense_table,
    "waterfall": waterfall_table,
    "methods": methods_table,
    "growth": growth_table,
    "throughput": throughput_table,
}
"""Under the names of their places on a page."""


def speed_tables(rows: Iterable[Row]) -> dict[str, str]:
    """The tables for which something was measured."""
    known = list(rows)
    return {name: made for name, make in TABLES.items() if (made := make(known))}


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with each table in its place, between <!-- NAME:begin --> and <!-- NAME:end -->."""
    for name, made in tables.items():
        block = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        assert block.search(page), f"the page has no place for the table {name!r}"
        page = block.sub(partial(_filled, made), page)
    return page


def _filled(made: str, place: re.Match[str]) -> str:
    return f"{place[1]}{made}\n{place[2]}"
