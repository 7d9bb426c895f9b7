"""What each step of the engine brought, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from ..evals.methods import DENSE
from ..results import Row
from .cells import REFERENCE, ROOFLINE, machines, reference_note, roofline, roofline_note, table
from .shown_rows import CaseKey, case_of, common, is_step, one_run, reference_of, references, timed

CHAIN = ("eager, plain torch", "graphs, plain torch", "graphs")  # steps of a waterfall; those that were given a name follow


def waterfall_table(rows: Sequence[Row]) -> str:
    """What each step brought: dense generation step by step, then every method on top of the last step."""
    lines, shown, known = [], [], references(rows)
    cases: dict[CaseKey, dict[str, list[Row]]] = {}
    for row in common(timed(rows)):
        if is_step(row):
            cases.setdefault(case_of(row), {}).setdefault(row["step"], []).append(row)
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
            named = f"{last}, {row['method']}" + (" (eager)" if row["engine"] != row["engine_asked"] else "")
            lines.append([*start, named, f"{row['median_ms']:.0f}", gain, f"**{first / row['median_ms']:.2f}**", *roofline(row)])
        shown += [*dense.values(), *on_top]
    if not shown:
        return ""
    roofline_heads = [column.head for column in ROOFLINE]
    heads = ("model", "image", "batch", "step", "generate, ms", "speedup over the step before", "total speedup", *roofline_heads)
    note = (
        f"Medians; {machines(shown)}. Steps were measured one after another on machines of this kind, methods in turns with dense"
        f" generation of the last step, with which they are compared.{reference_note(shown, known)}{roofline_note(shown)}"
    )
    return table(heads, "llrlrrrrr", lines, note)
