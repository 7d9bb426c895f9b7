"""Speed tables of the rows selected by `shown_rows`. A table without rows is an empty string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from nextscale.eval.results import DENSE, Row

from .cells import (
    BATCH,
    CASE,
    END_TO_END,
    ENERGY,
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
    gib,
    heads_of,
    line,
    machines,
    own_head,
    reference_note,
    repeats,
    roofline,
    roofline_note,
    shown_method,
    table,
    table_of,
)
from .shown_rows import (
    CaseKey,
    case_of,
    common,
    dense_rows,
    is_step,
    method_rows,
    one_run,
    reference_of,
    references,
    suite_rows,
    timed,
    with_kernels,
)
from .suites import SPARSE, step_of

SUMMARY_CASE: CaseKey = ("infinity-2b", "1024x1024", 1)
SUMMARY_METHODS = (DENSE, "skip the last two stages", SPARSE, "FastVAR", "StageVAR")
CHAIN = ("eager, plain torch", "graphs, plain torch", "graphs")  # steps of the step-by-step table; named steps follow
SPARSE_NOTE = (
    "Images of random weights are noise, with detail everywhere, so SparseVAR computes a quarter of the cells and its anchors instead of"
    " using a threshold. Its rows begin one stage before the current default."
)


def summary_table(rows: Sequence[Row]) -> str:
    """Returns the README's table: the reference implementation, dense generation and each published method."""
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
    first = [] if theirs is None else [[REFERENCE, f"{theirs['median_ms']:.0f}", "", "1.00", "", gib(theirs["peak_gb"])]]
    note = (
        f"Medians; {machines(shown)}, batch 1, guided, captured graphs, random weights, without decoding. Methods and dense generation"
        f" alternated, request by request. {SPARSE_NOTE}{reference_note(shown, known)}"
    )
    return table(*heads_of(columns), [*first, *(line(row, columns) for row in shown)], note)


def dense_table(rows: Sequence[Row]) -> str:
    shown = dense_rows(rows)
    if not shown:
        return ""
    known = references(rows)

    def theirs(row: Row, name: str) -> str:
        own = reference_of(row, known)
        return "" if own is None else gib(own[name]) if name == "peak_gb" else f"{own[name]:.0f}"

    columns = (
        MODEL,
        IMAGE,
        BATCH,
        Column("generate, ms", lambda row: f"**{row['median_ms']:.0f}**"),
        Column("reference, ms", lambda row: theirs(row, "median_ms")),
        Column("of which, ms", own_head),
        END_TO_END,
        ROOFLINE[1],
        ENERGY,
        MEMORY,
        Column("reference", lambda row: theirs(row, "peak_gb")),
    )
    note = (
        f"Median of {repeats(shown)} runs; {machines(shown)}; dense, guided, {engines(shown)}, random weights."
        f' "End to end" is from prompt features to pixels.{reference_note(shown, known)}{roofline_note(shown)}'
    )
    return table_of(columns, shown, note)


def engines(rows: Sequence[Row]) -> str:
    return " or ".join({"graphs": "captured graphs"}.get(name, name) for name in sorted({row["engine"] for row in rows}))


def method_speed_table(rows: Sequence[Row], name: str) -> str:
    """Returns the times of one method on every model, beside dense generation in the same run."""
    alone = [row for row in method_rows(rows) if case_of(row)[1:] == SUMMARY_CASE[1:] and "error" not in row]
    found = [row for row in alone if row["method"].startswith(name)]
    columns = (
        MODEL,
        METHOD,
        Column("generate, ms", lambda row: f"{row['median_ms']:.0f}"),
        Column("speedup", lambda row: f"**{row['speedup']['median']:.2f}**"),
        MACS,
        MEMORY,
    )
    note = f"Medians; {machines(found)}; one guided image of 1024x1024, captured graphs, random weights."
    return table_of(columns, found, note) if found else ""


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
        f"Median of {repeats(shown)} runs in which the methods alternate (20th–80th percentile); {machines(shown)}; guided, random"
        f" weights. {SPARSE_NOTE}{capture_note(shown)}{roofline_note(shown)}"
    )
    return table_of(columns, shown, note)


def growth_table(rows: Sequence[Row]) -> str:
    """Returns a table of time by image size."""
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
        f"Generation in ms and speedup over dense; medians of {repeats(shown)} runs; {machines(shown)}; with CFG, batch 1, random"
        f" weights.{capture_note(shown)} Images above 1024 px are larger than the models were trained for."
    )
    return table(["model", "image", *map(shown_method, methods)], "ll" + "r" * len(methods), lines, note)


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
        MODEL,
        IMAGE,
        BATCH,
        METHOD,
        Column("images per second", lambda row: f"**{row['images_per_second']:.2f}**"),
        Column("relative throughput", lambda row: faster(row, "speedup_end_to_end")),
        ENERGY,
        MEMORY,
    )
    note = f"From prompt features to pixels; medians of {repeats(shown)} runs; {machines(shown)}; guided, {engines(shown)}, random weights."
    return table_of(columns, shown, note)


def papers_table(rows: Sequence[Row]) -> str:
    """Returns the papers' other comparisons by case, each from its last run."""
    found: dict[str, list[Row]] = {}
    for row in with_kernels(rows):
        if row.get("suite") == "papers":
            found.setdefault(row["case"], []).append(row)
    shown = [row for own in found.values() for row in one_run(own)]
    if not shown:
        return ""
    columns = (
        Column("case", lambda row: row["case"], "l", config=True),
        *CASE,
        Column("generate, ms", lambda row: f"{row['median_ms']:.0f}"),
        Column("speedup", lambda row: faster(row, "speedup")),
        MACS,
        MEMORY,
    )
    note = (
        f'Medians of {repeats(shown)} runs; {machines(shown)}; with CFG and random weights.{capture_note(shown)} In the case "unfused",'
        " attention runs as matrix product, softmax and matrix product."
    )
    return table_of(columns, shown, note)


def waterfall_table(rows: Sequence[Row]) -> str:
    """Returns the step-by-step table: the gain of each step for dense generation, then of every method after the last step."""
    lines, shown, known = [], [], references(rows)
    cases: dict[CaseKey, dict[str, list[Row]]] = {}
    for row in common(timed(rows)):
        if is_step(row):
            cases.setdefault(case_of(row), {}).setdefault(step_of(row), []).append(row)
    for case, found in cases.items():
        steps = {step: one_run(found[step]) for step in sorted(found, key=lambda step: CHAIN.index(step) if step in CHAIN else len(CHAIN))}
        dense = {step: row for step, own in steps.items() for row in own if row["method"] == DENSE}
        if len(dense) < 2:
            continue
        start = [case[0], case[1], str(case[2])]
        last, last_row = [*dense.items()][-1]
        theirs = reference_of(last_row, known)
        first = before = (theirs or next(iter(dense.values())))["median_ms"]
        if theirs:
            lines.append([*start, REFERENCE, f"{first:.0f}", "", "", "", ""])
        for step, row in dense.items():
            own = row["median_ms"]
            lines.append([*start, step, f"{own:.0f}", f"{before / own:.2f}", f"**{first / own:.2f}**", *roofline(row)])
            before = own
        on_top = [row for row in steps[last] if row["method"] != DENSE]
        for row in on_top:
            gain = "" if row["speedup"] is None else f"{row['speedup']['median']:.2f}"
            named = f"{last}, {shown_method(row['method'])}" + (" (eager)" if row["engine"] != row["engine_asked"] else "")
            lines.append([*start, named, f"{row['median_ms']:.0f}", gain, f"**{first / row['median_ms']:.2f}**", *roofline(row)])
        shown += [*dense.values(), *on_top]
    if not shown:
        return ""
    roofline_heads = [column.head for column in ROOFLINE]
    heads = ("model", "image", "batch", "step", "generate, ms", "speedup over the step before", "total speedup", *roofline_heads)
    note = (
        f"Medians; {machines(shown)}. Steps were measured one after another on machines of this kind, methods alternating with dense"
        f" generation of the last step, with which they are compared.{reference_note(shown, known)}{roofline_note(shown)}"
    )
    return table(heads, "llrlrrrrr", lines, note)


TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "dense": dense_table,
    "waterfall": waterfall_table,
    "methods": methods_table,
    "growth": growth_table,
    "throughput": throughput_table,
    "papers": papers_table,
}
"""By the names of their places on the page."""


def speed_tables(rows: Iterable[Row]) -> dict[str, str]:
    """Returns the tables that have rows."""
    known = list(rows)
    return {name: made for name, make in TABLES.items() if (made := make(known))}


def pictured_row(rows: Iterable[Row]) -> Row | None:
    """Returns the row of the README's model and size."""
    found = [row for row in dense_rows(rows) if case_of(row) == SUMMARY_CASE and "stage_median_ms" in row]
    return found[0] if found else None
