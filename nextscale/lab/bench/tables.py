"""Tables and a picture of speed, from the rows of the results file.

Read are rows of `nextscale bench` and of the programs that it replaced ("dense", "methods"): their rows have fewer columns. Only rows of
random weights on a GPU count, of one kind of GPU and one dtype; outside the waterfall only those with kernels. Of rows that are alike the
last one counts, of engines captured graphs, and of methods those of one run. Rows "reference" are the models' reference implementations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from ..evals.methods import DENSE
from ..results import Row
from .suites import APART, SPARSE

CaseKey = tuple[str, str, int]  # model, image, batch

REFERENCE = "reference implementation"
OLD_NAMES = {"SparseVAR": SPARSE, "SparseVAR + guidance off": f"{SPARSE} + guidance off"}  # as benchmarks before this one called them
CHAIN = ("eager, plain torch", "graphs, plain torch", "graphs")  # steps of a waterfall; those that were given a name follow
SPEED = ("dense", "methods", "bench")
SUMMARY_CASE: CaseKey = ("infinity-2b", "1024x1024", 1)
SUMMARY_METHODS = (DENSE, "skip the last two stages", SPARSE, "FastVAR", "StageVAR")


# --- which rows count


def on_gpu(rows: Iterable[Row]) -> list[Row]:
    """Rows about speed with random weights on a GPU."""
    return [row for row in rows if row["benchmark"] in SPEED and row["weights"] == "random" and not row["hardware"].startswith("CPU")]


def timed(rows: Iterable[Row]) -> list[Row]:
    """Those on the GPU and in the dtype that most of them have, without quantised ones, old ones in the words of new ones."""
    found = [row for row in on_gpu(rows) if row.get("quantize") is None]
    known = Counter((row["hardware"], row["dtype"]) for row in found if row["dtype"] is not None)
    if known:
        [((hardware, dtype), _)] = known.most_common(1)
        # What failed before there was a model tells no dtype.
        found = [row for row in found if row["hardware"] == hardware and row["dtype"] in (dtype, None)]
    return [row if row["benchmark"] == "bench" else renewed(row) for row in found]


def renewed(row: Row) -> Row:
    """Old runs differ by their day and commit."""
    engine, run = row["engine"], f"{row['date']} {row['commit']} {row['case']}"
    return row | {
        "engine_asked": engine,
        "step": engine,
        "run": run,
        "kernels": True,
        "method": OLD_NAMES.get(row["method"], row["method"]),
    }


def with_kernels(rows: Iterable[Row]) -> list[Row]:
    """Those that show what a user gets; others are steps of the waterfall."""
    return [row for row in timed(rows) if row["kernels"] and row["step"] == row["engine_asked"]]


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
    """Those of no table of its own."""
    return [row for row in rows if row.get("suite") not in APART]


def dense_rows(rows: Iterable[Row]) -> list[Row]:
    """The last one of every model, size and batch. Old runs of methods had dense rows too, of fewer repeats: they do not count."""
    usable = [row for row in common(with_kernels(rows)) if row["method"] == DENSE and row["benchmark"] != "methods"]
    return [own[-1] for own in by_case(usable).values()]


def method_rows(rows: Iterable[Row]) -> list[Row]:
    """Rows of every model, size and batch that was measured with methods: dense generation and the methods that were measured beside it.

    Rows of eager generation do not count where a table of its own has graphs.
    """
    usable = with_kernels(rows)
    replayed = {case_of(row) for row in usable if row.get("suite") in APART and row["engine_asked"] == "graphs"}
    cases = by_case(row for row in common(usable) if row["benchmark"] != "dense")
    known = [own for case, own in cases.items() if case not in replayed or own[0]["engine_asked"] == "graphs"]
    return [row for own in known if any(row["method"] != DENSE for row in own) for row in one_run(own)]


# --- tables

SPARSE_NOTE = (
    "Random weights generate noise, which has detail everywhere, so a share takes the place of SparseVAR's threshold: a quarter of the"
    " cells and the anchors."
)


def table(heads: str, aligned: str, lines: Iterable[Sequence[str]], note: str) -> str:
    """aligned: l or r for each column."""
    marks = {"l": "---|", "r": "---:|"}
    return "\n".join(
        [f"| {heads} |", f"|{''.join(marks[one] for one in aligned)}", *(f"| {' | '.join(line)} |" for line in lines), "", note]
    )


def failed(row: Row, start: Sequence[str], columns: int) -> list[str]:
    return [*start, row["error"].replace("|", "/"), *[""] * (columns - len(start) - 1)]


def summary_table(rows: Sequence[Row]) -> str:
    """A row for the reference implementation, for dense generation and for each published method: what a visitor asks first.

    Empty where nothing was measured; the same holds for all tables.
    """
    found = {row["method"]: row for row in method_rows(rows) if case_of(row) == SUMMARY_CASE}
    shown = [found[name] for name in SUMMARY_METHODS if name in found]
    if DENSE not in found:
        return ""
    known = references(rows)
    theirs = reference_of(found[DENSE], known)
    lines = [] if theirs is None else [[REFERENCE, f"{theirs['median_ms']:.0f}", "", "1.00", "", f"{theirs['peak_gb']:.1f} GB"]]
    for row in shown:
        if "error" in row:
            lines.append(failed(row, [row["method"]], 6))
            continue
        against = "" if theirs is None else f"{theirs['median_ms'] / row['median_ms']:.2f}"
        gain = "" if row["speedup"] is None else f"**{row['speedup']['median']:.2f}**"
        lines.append([row["method"], f"{row['median_ms']:.0f}", gain, against, f"{row['cost_share']:.0%}", f"{row['peak_gb']:.1f} GB"])
    model, size, _ = SUMMARY_CASE
    heads = f"`{model}`, {size} px | generate, ms | speedup over dense | over the reference implementation | MACs | peak memory"
    note = (
        f"Medians; {machines(shown)}, batch 1, guided, captured graphs, random weights, decoding not included. Methods were measured in"
        f" turns with dense generation. {SPARSE_NOTE}{reference_note(shown, known)}"
    )
    return table(heads, "lrrrrr", lines, note)


def dense_table(rows: Sequence[Row]) -> str:
    shown = dense_rows(rows)
    if not shown:
        return ""
    known = references(rows)
    heads = (
        "model | image | batch | engine | generate, ms | reference implementation, ms | of which, ms | decode, ms | end to end, ms"
        " | roofline, ms | x roofline | peak memory | reference implementation"
    )
    lines = []
    for row in shown:
        start = [row["model"], image(row), str(row["batch"]), row["engine"]]
        if "error" in row:
            lines.append(failed(row, start, 13))
            continue
        theirs = reference_of(row, known)
        decode = theirs and theirs["decode"]
        cells = (
            f"**{row['median_ms']:.0f}** ({row['p20_ms']:.0f}–{row['p80_ms']:.0f})",
            f"{theirs['median_ms']:.0f}" if theirs else "",
            own_head(row),
            f"{row['decode']['median_ms']:.0f}" + (f" (reference {decode['median_ms']:.0f})" if decode else ""),
            median(row, "end_to_end"),
            *roofline(row),
            f"{row['peak_gb']:.1f} GB",
            f"{theirs['peak_gb']:.1f} GB" if theirs else "",
        )
        lines.append([*start, *cells])
    note = (
        f"Median of {repeats(shown)} runs (20th–80th percentile); {machines(shown)}; dense, guided, random weights, so no quality column."
        f' "End to end" is from prompt features to pixels.{reference_note(shown, known)}{roofline_note(shown)}'
    )
    return table(heads, "llrlrrrrrrrrr", lines, note)


def methods_table(rows: Sequence[Row]) -> str:
    shown = method_rows(rows)
    if not shown:
        return ""
    heads = (
        "model | image | batch | method | engine | generate, ms | speedup | end to end, ms | end-to-end speedup"
        " | MACs | roofline, ms | x roofline | peak memory"
    )
    lines = []
    for row in shown:
        start = [row["model"], image(row), str(row["batch"]), row["method"], row["engine"]]
        if "error" in row:
            lines.append(failed(row, start, 13))
            continue
        cells = (
            f"{row['median_ms']:.0f}",
            faster(row, "speedup"),
            median(row, "end_to_end"),
            faster(row, "speedup_end_to_end"),
            f"{row['cost_share']:.0%}",
            *roofline(row),
            f"{row['peak_gb']:.1f} GB",
        )
        lines.append([*start, *cells])
    note = (
        f"Median of {repeats(shown)} runs in which the methods take turns (20th–80th percentile); {machines(shown)}; guided, random"
        f" weights, so no quality column. {SPARSE_NOTE}{capture_note(shown)}{roofline_note(shown)}"
    )
    return table(heads, "llrllrrrrrrrr", lines, note)


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
    heads = "model | image | batch | step | generate, ms | speedup over the step before | total speedup | roofline, ms | x roofline"
    note = (
        f"Medians; {machines(shown)}. Steps were measured one after another on machines of this kind, methods in turns with dense"
        f" generation of the last step, with which they are compared.{reference_note(shown, known)}{roofline_note(shown)}"
    )
    return table(heads, "llrlrrrrr", lines, note)


def is_step(row: Row) -> bool:
    """Eager generation with kernels is beside the chain; dense generation that could not be captured is no step of graphs."""
    ran_as_asked = row["engine"] == row["engine_asked"] or row["method"] != DENSE
    return row["benchmark"] == "bench" and "error" not in row and row["step"] != "eager" and ran_as_asked


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
    return table(f"model | image | {' | '.join(methods)}", "ll" + "r" * len(methods), lines, note)


def suite_rows(rows: Iterable[Row], suite: str) -> dict[CaseKey, list[Row]]:
    cases = by_case(row for row in with_kernels(rows) if row.get("suite") == suite)
    return {case: one_run(own) for case, own in cases.items()}


def growth_cell(row: Row) -> str:
    if "error" in row:
        return "refused" if row["error"].startswith("SettingError") else row["error"].partition(":")[0]
    ratio = row["speedup"]
    return f"{row['median_ms']:.0f}" + ("" if row["method"] == DENSE or ratio is None else f" (**{ratio['median']:.2f}**)")


def throughput_table(rows: Sequence[Row]) -> str:
    shown = [row for own in suite_rows(rows, "throughput").values() for row in own]
    if not shown:
        return ""
    lines = []
    for row in shown:
        start = [row["model"], image(row), str(row["batch"]), row["method"], row["engine"]]
        if "error" in row:
            lines.append(failed(row, start, 9))
            continue
        energy = row.get("joules_per_image")
        cells = (f"**{row['images_per_second']:.2f}**", faster(row, "speedup_end_to_end"), f"{energy:.0f} J" if energy else "")
        lines.append([*start, *cells, f"{row['peak_gb']:.1f} GB"])
    heads = "model | image | batch | method | engine | images per second | relative throughput | energy per image | peak memory"
    note = f"From prompt features to pixels; medians of {repeats(shown)} runs; {machines(shown)}; guided, random weights."
    return table(heads, "llrllrrrr", lines, note)


TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "dense": dense_table,
    "waterfall": waterfall_table,
    "methods": methods_table,
    "growth": growth_table,
    "throughput": throughput_table,
}
"""Under the names of their places on a page."""


def speed_tables(rows: Iterable[Row]) -> dict[str, str]:
    """Those for which something was measured."""
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


# --- cells and notes


def median(row: Row, name: str) -> str:
    return f"{row[name]['median_ms']:.0f}" if row.get(name) else ""


def faster(row: Row, name: str) -> str:
    ratio = row.get(name)
    return "" if ratio is None else f"**{ratio['median']:.2f}** ({ratio['p20']:.2f}–{ratio['p80']:.2f})"


def roofline(row: Row) -> tuple[str, str]:
    return (f"{row['roofline_ms']:.0f}", f"{row['times_roofline']:.1f}x") if row.get("roofline_ms") else ("", "")


def own_head(row: Row) -> str:
    """What a model computes after its transformer: HART's diffusion, STAR's refinement. Not known of captured graphs."""
    residual, choice = ((row.get(name) or {}).get("median_ms") for name in ("residual", "choice"))
    if residual:
        return f"diffusion head {residual:.0f}"
    return f"refinement {choice:.0f}" if choice and "sampler" in row["model"] else ""


def repeats(rows: Sequence[Row]) -> str:
    found = sorted({row["repeats"] for row in rows if "error" not in row})
    return " or ".join(str(number) for number in found) or "no"


def machines(rows: Sequence[Row]) -> str:
    """Rows that failed before there was a model tell no dtype."""
    return "; ".join(sorted({f"{row['hardware']}, torch {row['torch']}, {row['dtype']}" for row in rows if row["dtype"]}))


def roofline_note(rows: Sequence[Row]) -> str:
    rates = {(row["matmul_tflops"], row["copy_tb_per_s"]) for row in rows if row.get("roofline_ms")}
    if not rates:
        return ""
    flops, copied = zip(*rates, strict=True)
    return (
        " The roofline is generation without decoding if all its arithmetic ran at the speed of one large matrix product"
        f" ({between(flops, 0)} TFLOP/s), or, in stages where that takes longer, if the weights came from memory once at the speed of a"
        f" copy ({between(copied, 2)} TB/s); both speeds are measured."
    )


def between(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}–{high}"


def capture_note(rows: Sequence[Row]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.get("not_captured"):
            reasons.setdefault(row["not_captured"], []).append(row["method"])
    given = (f"{', '.join(dict.fromkeys(methods))} ({reason})" for reason, methods in reasons.items())
    return f" Not captured, so run eagerly: {'; '.join(given)}." if reasons else ""


def reference_note(rows: Sequence[Row], known: Mapping[tuple[str, CaseKey], Row]) -> str:
    found = [theirs for row in rows if (theirs := reference_of(row, known)) is not None]
    if not found:
        return ""
    remarks = dict.fromkeys(f"at batch {row['batch']} {row['remark']}" for row in found if row.get("remark"))
    return f" The reference implementation ran on the same kind of GPU with random weights{''.join(f'; {one}' for one in remarks)}."


# --- the picture


def stages_svg(row: Row) -> str:
    """Bars: time of every stage of one image."""
    times, tokens = row["stage_median_ms"], row["tokens"]
    width, height, left, top = 760, 240, 16, 44
    step, tallest = (width - 2 * left) / len(times), max(times)
    bars = []
    for i, (time, count) in enumerate(zip(times, tokens, strict=True)):
        size = max(time / tallest * (height - top - 46), 1)
        x, y = left + i * step, height - 36 - size
        bars.append(f'<rect x="{x + 4:.1f}" y="{y:.1f}" width="{step - 8:.1f}" height="{size:.1f}" rx="2" fill="#3b6fb6"/>')
        bars.append(f'<text x="{x + step / 2:.1f}" y="{y - 5:.1f}" text-anchor="middle">{time:.0f} ms</text>')
        bars.append(f'<text x="{x + step / 2:.1f}" y="{height - 20}" text-anchor="middle">{count}</text>')
    share = sum(times[-3:]) / sum(times)
    title = f"{row['model']}, {image(row)}, one image: the last three of {len(times)} stages take {share:.0%} of the time"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#333">'
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="22" font-size="14">{title}</text>'
        f'{"".join(bars)}<text x="{left}" y="{height - 4}">tokens per stage; {row["hardware"]}, {row["engine"]}, dense</text></svg>\n'
    )


def pictured_row(rows: Iterable[Row]) -> Row | None:
    """The row of the model and size that the README shows first."""
    found = [row for row in dense_rows(rows) if case_of(row) == SUMMARY_CASE and "error" not in row]
    return found[0] if found else None
