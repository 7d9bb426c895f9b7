"""Markdown tables, their cells and their notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from nextscale.eval.results import Row

from .shown_rows import CaseKey, image, reference_of

REFERENCE = "reference implementation"


class Column(NamedTuple):
    head: str
    cell: Callable[[Row], str]
    aligned: str = "r"  # l or r
    config: bool = False  # part of the configuration, so also known for failed rows


MODEL = Column("model", lambda row: row["model"], "l", config=True)
IMAGE = Column("image", lambda row: image(row), "l", config=True)
BATCH = Column("batch", lambda row: str(row["batch"]), config=True)
METHOD = Column("method", lambda row: shown_method(row["method"]), "l", config=True)
ENGINE = Column("engine", lambda row: row["engine"], "l", config=True)
CASE = (MODEL, IMAGE, BATCH, METHOD, ENGINE)
ROOFLINE = (Column("roofline, ms", lambda row: roofline(row)[0]), Column("x roofline", lambda row: roofline(row)[1]))
END_TO_END = Column("end to end, ms", lambda row: median(row, "end_to_end"))
MACS = Column("MACs", lambda row: f"{row['cost_share']:.0%}")
ENERGY = Column("energy per image", lambda row: f"{row['joules_per_image']:.0f} J" if row.get("joules_per_image") else "")
MEMORY = Column("peak memory", lambda row: gib(row["peak_gb"]))
SHOWN = {"SparseVAR, 30 % kept": "SparseVAR, 25 % and anchors"}  # names that rows store


def table_of(columns: Sequence[Column], rows: Iterable[Row], note: str = "") -> str:
    """Returns a table with a line for every row, without the columns that are empty in all of them."""
    shown = list(rows)
    usable = [row for row in shown if "error" not in row]
    filled = [column for column in columns if column.config or any(column.cell(row) for row in usable)]
    return table(*heads_of(filled), [line(row, filled) for row in shown], note)


def heads_of(columns: Sequence[Column]) -> tuple[list[str], str]:
    return [column.head for column in columns], "".join(column.aligned for column in columns)


def line(row: Row, columns: Sequence[Column]) -> list[str]:
    """Returns the cells of a row. A failed row shows its error in the first column that is not part of the configuration."""
    if "error" not in row:
        return [column.cell(row) for column in columns]
    known = [column.cell(row) for column in columns if column.config]
    return [*known, row["error"].replace("|", "/"), *[""] * (len(columns) - len(known) - 1)]


def table(heads: Sequence[str], aligned: str, lines: Iterable[Sequence[str]], note: str = "") -> str:
    """Returns a Markdown table, with an optional note below it. aligned: l or r for each column."""
    marks = {"l": "---|", "r": "---:|"}
    ruled = "".join(marks[one] for one in aligned)
    below = ["", note] if note else []
    return "\n".join([f"| {' | '.join(heads)} |", f"|{ruled}", *(f"| {' | '.join(cells)} |" for cells in lines), *below])


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with each table inserted between <!-- NAME:begin --> and <!-- NAME:end -->."""
    for name, made in tables.items():
        block = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        assert block.search(page), f"the page has no place for the table {name!r}"
        page = block.sub(partial(_filled, made), page)
    return page


def _filled(made: str, place: re.Match[str]) -> str:
    return f"{place[1]}{made}\n{place[2]}"


# --- cells


def median(row: Row, name: str) -> str:
    return f"{row[name]['median_ms']:.0f}" if row.get(name) else ""


def shown_method(name: str) -> str:
    for stored, shown in SHOWN.items():
        name = name.replace(stored, shown)
    return name


def gib(gigabytes: float) -> str:
    return f"{gigabytes * 1e9 / 2**30:.1f} GiB"


def bounded(interval: Row | None, form: str) -> str:
    """Formats a value with its interval; empty without one."""
    if interval is None:
        return ""
    value, low, high = (form.format(interval[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def faster(row: Row, name: str) -> str:
    ratio = row.get(name)
    return "" if ratio is None else f"**{ratio['median']:.2f}** ({ratio['p20']:.2f}–{ratio['p80']:.2f})"


def roofline(row: Row) -> tuple[str, str]:
    return (f"{row['roofline_ms']:.0f}", f"{row['times_roofline']:.1f}x") if row.get("roofline_ms") else ("", "")


def own_head(row: Row) -> str:
    """Returns the time of a model's head: HART's diffusion or STAR's refinement. CUDA graphs do not report it."""
    residual, choice = ((row.get(name) or {}).get("median_ms") for name in ("residual", "choice"))
    if residual:
        return f"diffusion head {residual:.0f}"
    return f"refinement {choice:.0f}" if choice and "sampler" in row["model"] else ""


def repeats(rows: Sequence[Row]) -> str:
    found = sorted({row["repeats"] for row in rows if "error" not in row})
    return " or ".join(str(number) for number in found) or "no"


def machines(rows: Sequence[Row]) -> str:
    """Returns the machines, versions and dtypes of the rows. Rows that failed before loading have no dtype."""
    return "; ".join(sorted({f"{row['hardware']}, torch {row['torch']}, {row['dtype']}" for row in rows if row["dtype"]}))


def roofline_note(rows: Sequence[Row]) -> str:
    rates = {(row["matmul_tflops"], row["copy_tb_per_s"]) for row in rows if row.get("roofline_ms")}
    if not rates:
        return ""
    flops, copied = zip(*rates, strict=True)
    return (
        f" The roofline is the arithmetic at the speed of one large matrix product ({between(flops, 0)} TFLOP/s), or one read of the"
        f" weights at the speed of a copy ({between(copied, 2)} TB/s), whichever takes longer in each stage."
    )


def between(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}–{high}"


def capture_note(rows: Sequence[Row]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.get("not_captured"):
            reasons.setdefault(row["not_captured"], []).append(shown_method(row["method"]))
    given = (f"{', '.join(dict.fromkeys(methods))} ({reason})" for reason, methods in reasons.items())
    return f" Run eagerly because they cannot be captured: {'; '.join(given)}." if reasons else ""


def reference_note(rows: Sequence[Row], known: Mapping[tuple[str, CaseKey], Row]) -> str:
    found = [theirs for row in rows if (theirs := reference_of(row, known)) is not None]
    if not found:
        return ""
    remarks = dict.fromkeys(f"at batch {row['batch']} {row['remark']}" for row in found if row.get("remark"))
    return f" The reference implementation ran on the same kind of GPU with random weights{''.join(f'; {one}' for one in remarks)}."
