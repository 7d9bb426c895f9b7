"""The table of docs/guides/many-images.md, from the rows of `benchmarks.sample`."""

from __future__ import annotations

from nextscale.eval.results import Row

from .cells import BATCH, IMAGE, METHOD, MODEL, Column, table_of

# Columns that identify a case; the last row of each case is shown.
CASE = ("hardware", "model", "size", "batch", "method", "dtype", "writers")


def sample_table(rows: list[Row]) -> str:
    """Returns the table, or an empty string without measurements."""
    shown = [row for row in rows if row["benchmark"] == "sample" and "error" not in row and row.get("format", "png") == "png"]
    found = {str([row.get(name) for name in CASE]): row for row in shown}
    columns = (
        Column("machine", lambda row: f"{row['hardware']}, {row['dtype']}", "l"),
        MODEL,
        IMAGE,
        BATCH,
        METHOD,
        Column("writers", lambda row: str(row.get("writers", ""))),
        Column("images/s with files", lambda row: rate(row, "written_per_s")),
        Column("without", lambda row: rate(row, "generated_per_s")),
        Column("share", lambda row: f"**{row['share']['median']:.0%}** ({row['share']['p20']:.0%}–{row['share']['p80']:.0%})"),
    )
    note = "Medians (20th to 80th percentile) of rounds, without the first batch. With files: PNG files and the manifest."
    return table_of(columns, list(found.values()), note) if found else ""


def rate(row: Row, name: str) -> str:
    """Returns images per second; empty for CPUs, whose speeds are not comparable."""
    return "" if row["hardware"].startswith("CPU") else f"{row[name]['median']:.3g}"
