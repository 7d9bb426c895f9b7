"""Tables and a picture of speed, from the rows of the results file.

Read are rows of `nextscale bench` and of the programs that it replaced ("dense", "methods"): their rows have fewer columns. Only rows of
GPUs count: absolute times of other machines mean nothing. Of rows that are alike the last one counts, and of engines recorded graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .methods import DENSE
from .suites import APART, SPARSE

Row = dict[str, Any]
Key = tuple[str, str, int, str]  # model, image, batch, method

AUTHORS = {
    ("infinity-2b", "1024x1024", 1): (790, 13.0, 99),
    ("infinity-2b", "1024x1024", 4): (1684, 38.0, None),
    ("infinity-8b", "1024x1024", 1): (1367, 34.3, None),
}
"""The authors' program on the same kind of GPU, same sizes, random weights: generation in ms, peak memory in GB, decoding in ms."""
OLD_NAMES = {"SparseVAR": SPARSE, "SparseVAR + guidance off": f"{SPARSE} + guidance off"}  # as benchmarks before this one called them
FIRST_STEPS = ("eager, plain torch", "eager", "graphs, plain torch", "graphs")  # of a waterfall; others follow as they were measured
SPEED = ("dense", "methods", "bench")


# --- which rows count


def timed(rows: Iterable[Row]) -> list[Row]:
    """Rows about speed on a GPU, old ones in the words of new ones."""
    found = [row for row in rows if row["benchmark"] in SPEED and not row["hardware"].startswith("CPU")]
    return [row if row["benchmark"] == "bench" else renewed(row) for row in found]


def renewed(row: Row) -> Row:
    return row | {"engine_asked": row["engine"], "method": OLD_NAMES.get(row["method"], row["method"])}


def key(row: Row) -> Key:
    return row["model"], image(row), row["batch"], row["method"]


def image(row: Row) -> str:
    size = row["size"]
    return f"{size[0]}x{size[1]}" if isinstance(size, list) else str(size or "its own size")


def latest(rows: Iterable[Row]) -> dict[Key, Row]:
    """In the order in which things were first measured; a row of graphs is not replaced by one of eager generation."""
    found: dict[Key, Row] = {}
    for row in rows:
        before = found.get(key(row))
        if before is None or row["engine_asked"] == "graphs" or before["engine_asked"] != "graphs":
            found[key(row)] = row
    return found


def common(rows: Sequence[Row]) -> list[Row]:
    """Those of no table of its own."""
    return [row for row in rows if row.get("suite") not in APART]


def dense_rows(rows: Iterable[Row]) -> list[Row]:
    """The last one of every model, size and batch. Old runs of methods had dense rows too, of fewer repeats: they do not count."""
    usable = [row for row in common(timed(rows)) if row["method"] == DENSE and row["benchmark"] != "methods"]
    return list(latest(usable).values())


def method_rows(rows: Iterable[Row]) -> list[Row]:
    """Of every model, size and batch that was drawn with methods; where graphs were tried, only what was measured against these."""
    usable = [row for row in common(timed(rows)) if row["benchmark"] != "dense"]
    found = list(latest(usable).values())
    recorded = {key(row)[:3] for row in found if row["engine_asked"] == "graphs"}
    found = [row for row in found if row["engine_asked"] == "graphs" or key(row)[:3] not in recorded]
    cases = dict.fromkeys(key(row)[:3] for row in found if row["method"] != DENSE)
    return [row for case in cases for row in found if key(row)[:3] == case]


# --- tables


def table(heads: str, aligned: str, lines: Iterable[Sequence[str]], note: str) -> str:
    """aligned: l or r for each column."""
    marks = {"l": "---|", "r": "---:|"}
    return "\n".join(
        [f"| {heads} |", f"|{''.join(marks[one] for one in aligned)}", *(f"| {' | '.join(line)} |" for line in lines), "", note]
    )


def failed(row: Row, start: Sequence[str], columns: int) -> list[str]:
    return [*start, row["error"].replace("|", "/"), *[""] * (columns - len(start) - 1)]


def dense_table(rows: Iterable[Row]) -> str:
    """Empty where nothing was measured; the same holds for all tables."""
    shown = dense_rows(rows)
    if not shown:
        return ""
    heads = (
        "model | image | batch | engine | generate, ms | authors' program | of this, ms | decode, ms | end to end, ms | least possible, ms"
        " | peak memory | authors' program"
    )
    lines = []
    for row in shown:
        start = [row["model"], image(row), str(row["batch"]), row["engine"]]
        if "error" in row:
            lines.append(failed(row, start, 12))
            continue
        time, memory, decode = AUTHORS.get(key(row)[:3], (None, None, None))
        cells = (
            f"**{row['median_ms']:.0f}** ({row['p20_ms']:.0f}–{row['p80_ms']:.0f})",
            f"{time} ms" if time else "",
            own_head(row),
            f"{row['decode']['median_ms']:.0f}" + (f" (authors {decode})" if decode else ""),
            median(row, "end_to_end"),
            of_limit(row),
            f"{row['peak_gb']:.1f} GB",
            f"{memory:.1f} GB" if memory else "",
        )
        lines.append([*start, *cells])
    note = (
        f"Median of {repeats(shown)} runs (20th–80th percentile); {machines(shown)}; dense, guided, random weights, so no quality column."
        ' "End to end" is from prompt features to pixels. The authors\' program ran on the same kind of GPU; at batch 4 it fails as'
        f" released and was measured with its recompile limit raised.{limit_note(shown)}"
    )
    return table(heads, "llrlrrrrrrrr", lines, note)


def methods_table(rows: Iterable[Row]) -> str:
    shown = method_rows(rows)
    if not shown:
        return ""
    heads = (
        "model | image | batch | method | engine | generate, ms | times faster than dense | end to end, ms | multiply-adds"
        " | least possible, ms | peak memory"
    )
    lines = []
    for row in shown:
        start = [row["model"], image(row), str(row["batch"]), row["method"], row["engine"]]
        if "error" in row:
            lines.append(failed(row, start, 11))
            continue
        cells = (
            f"{row['median_ms']:.0f}",
            faster(row, "speedup"),
            median(row, "end_to_end"),
            f"{row['cost_share']:.0%}",
            of_limit(row),
            f"{row['peak_gb']:.1f} GB",
        )
        lines.append([*start, *cells])
    note = (
        f"Median of {repeats(shown)} runs in which the methods take turns (20th–80th percentile); {machines(shown)}; guided, random"
        " weights, so no quality column. Noise has detail everywhere, so SparseVAR's threshold is replaced by a share there: a quarter of"
        f" the cells and the anchors.{recording_note(shown)}{limit_note(shown)}"
    )
    return table(heads, "llrllrrrrrr", lines, note)


def waterfall_table(rows: Iterable[Row]) -> str:
    """What each step brought: dense generation step by step, then every method on top of the last step."""
    usable = [row for row in common(timed(rows)) if row["benchmark"] == "bench" and "error" not in row]
    steps: dict[tuple[Key, str], Row] = {(key(row), row["step"]): row for row in usable}
    lines, shown = [], []
    for case in dict.fromkeys(key(row)[:3] for row in usable):
        dense = [row for (found, _), row in steps.items() if found == (*case, DENSE)]
        dense.sort(key=lambda row: FIRST_STEPS.index(row["step"]) if row["step"] in FIRST_STEPS else len(FIRST_STEPS))
        if len(dense) < 2:
            continue
        first = before = AUTHORS.get(case, (None,))[0] or dense[0]["median_ms"]
        start = [case[0], case[1], str(case[2])]
        if case in AUTHORS:
            lines.append([*start, "authors' program", f"{first:.0f}", "", "", ""])
        for row in dense:
            own = row["median_ms"]
            lines.append([*start, row["step"], f"{own:.0f}", f"{before / own:.2f}", f"**{first / own:.2f}**", of_limit(row)])
            before = own
        last = dense[-1]["step"]
        on_top = [row for (found, step), row in steps.items() if found[:3] == case and found[3] != DENSE and step == last]
        for row in on_top:
            gain = "" if row["speedup"] is None else f"{row['speedup']['median']:.2f}"
            named = f"{last}, {row['method']}" + (" (eager)" if row["engine"] != row["engine_asked"] else "")
            lines.append([*start, named, f"{row['median_ms']:.0f}", gain, f"**{first / row['median_ms']:.2f}**", of_limit(row)])
        shown += [*dense, *on_top]
    if not shown:
        return ""
    heads = "model | image | batch | step | generate, ms | times faster than the step before | in all | least possible, ms"
    note = f"Medians; {machines(shown)}. Methods are compared with dense generation of the last step, in the same run.{limit_note(shown)}"
    return table(heads, "llrlrrrr", lines, note)


def growth_table(rows: Iterable[Row]) -> str:
    """Time against the size of the image."""
    found = latest(row for row in timed(rows) if row.get("suite") == "growth")
    if not found:
        return ""
    methods = list(dict.fromkeys(method for *_, method in found))
    lines = []
    for case in dict.fromkeys((model, size, batch) for model, size, batch, _ in found):
        lines.append([case[0], case[1], *(growth_cell(found.get((*case, method))) for method in methods)])
    shown = list(found.values())
    note = (
        f"Generation in ms and times faster than dense; medians of {repeats(shown)} runs; {machines(shown)}; guided, batch 1, random"
        " weights, engines as in the table of methods. Images above 1024 px are larger than what the models were trained for."
    )
    return table(f"model | image | {' | '.join(methods)}", "ll" + "r" * len(methods), lines, note)


def growth_cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "refused" if row["error"].startswith("SettingError") else row["error"].partition(":")[0]
    ratio = row["speedup"]
    return f"{row['median_ms']:.0f}" + ("" if row["method"] == DENSE or ratio is None else f" (**{ratio['median']:.2f}**)")


def throughput_table(rows: Iterable[Row]) -> str:
    shown = list(latest(row for row in timed(rows) if row.get("suite") == "throughput").values())
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
    heads = "model | image | batch | method | engine | images per second | times dense | energy per image | peak memory"
    note = f"From prompt features to pixels; medians of {repeats(shown)} runs; {machines(shown)}; guided, random weights."
    return table(heads, "llrllrrrr", lines, note)


TABLES: Mapping[str, Callable[[Iterable[Row]], str]] = {
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
    ratio = row[name]
    return "" if ratio is None else f"**{ratio['median']:.2f}** ({ratio['p20']:.2f}–{ratio['p80']:.2f})"


def of_limit(row: Row) -> str:
    return f"{row['limit_ms']:.0f} ({row['times_limit']:.1f} times that)" if row.get("limit_ms") else ""


def own_head(row: Row) -> str:
    """What a model computes after its transformer: HART's diffusion, STAR's refinement. Recordings do not tell."""
    if row.get("residual", {}).get("median_ms"):
        return f"diffusion head {row['residual']['median_ms']:.0f}"
    refined = "sampler" in row["model"] and row.get("choice", {}).get("median_ms")
    return f"refinement {row['choice']['median_ms']:.0f}" if refined else ""


def repeats(rows: Sequence[Row]) -> str:
    found = sorted({row["repeats"] for row in rows if "error" not in row})
    return " or ".join(str(number) for number in found) or "no"


def machines(rows: Sequence[Row]) -> str:
    """Rows that failed before there was a model tell no dtype."""
    return "; ".join(sorted({f"{row['hardware']}, torch {row['torch']}, {row['dtype']}" for row in rows if row["dtype"]}))


def limit_note(rows: Sequence[Row]) -> str:
    rates = {(row["matmul_tflops"], row["copy_tb_per_s"]) for row in rows if row.get("limit_ms")}
    if not rates:
        return ""
    flops, copied = zip(*rates, strict=True)
    return (
        ' "Least possible" is generation without decoding at the measured speed of a large matrix product'
        f" ({between(flops, 0)} TFLOP/s), or of reading the weights in every stage ({between(copied, 2)} TB/s) where that takes longer."
    )


def between(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}–{high}"


def recording_note(rows: Sequence[Row]) -> str:
    eager = [row for row in rows if row.get("not_recorded")]
    return " Where the engine is eager although others are not, the method decides by the image what to run." if eager else ""


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
    """Of the model and size that the README speaks of first."""
    found = [row for row in dense_rows(rows) if key(row)[:3] == ("infinity-2b", "1024x1024", 1) and "error" not in row]
    return found[0] if found else None
