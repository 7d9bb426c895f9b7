"""The table of docs/guides/many-images.md: what files cost, from the rows that `benchmarks.sample` has written."""

from __future__ import annotations

from nextscale.eval.results import Row

from .cells import BATCH, IMAGE, METHOD, MODEL, Column, table_of

# What a run was made with; of those that are alike the last counts.
CASE = ("hardware", "model", "size", "batch", "method", "dtype")


def sample_table(rows: list[Row]) -> str:
    """Empty where nothing was measured."""
    found = {str([row[name] for name in CASE]): row for row in rows if row["benchmark"] == "sample" and "error" not in row}
    columns = (
        Column("machine", lambda row: f"{row['hardware']}, {row['dtype']}", "l"),
        MODEL,
        IMAGE,
        BATCH,
        METHOD,
        Column("images/s with files", lambda row: rate(row, "written_per_s")),
        Column("without", lambda row: rate(row, "generated_per_s")),
        Column("share", lambda row: f"**{row['share']['median']:.0%}** ({row['share']['p20']:.0%}–{row['share']['p80']:.0%})"),
    )
    note = "Medians (20th–80th percentile) of turns; all batches but the first. With files: PNG files and their lines in the manifest."
    return table_of(columns, list(found.values()), note) if found else ""


def rate(row: Row, name: str) -> str:
    """Empty for a CPU, whose speed says nothing of another one's."""
    return "" if row["hardware"].startswith("CPU") else f"{row[name]['median']:.3g}"
