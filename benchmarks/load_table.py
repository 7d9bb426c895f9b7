"""The tables of docs/guides/serve.md, from the rows of `benchmarks.load`."""

from __future__ import annotations

from nextscale.eval.results import Row

from .cells import Column, table_of

# Columns that identify a case; the last row of each case is shown.
CASE = ("hardware", "door", "model", "size", "dtype", "method", "same_images")
STATUSES = ("200", "429", "503")  # HTTP status codes


def load_rows(rows: list[Row]) -> list[Row]:
    found = {tuple(row.get(name) for name in (*CASE, "rate")): row for row in rows if row["benchmark"] == "load" and "error" not in row}
    return sorted(found.values(), key=lambda row: [str(row.get(name)) for name in CASE])


def load_table(rows: list[Row]) -> str:
    columns = (
        Column("machine, door, images", case, "l"),
        Column("capacity, images/s", lambda row: f"{row['capacity_per_s']:.3g}"),
        Column("gain over one at a time", lambda row: f"{row['gain']:.2f}"),
        Column("offered", lambda row: f"{row['rate']:g}x"),
        Column("images/s", lambda row: f"{row['images_per_s']:.3g}"),
        Column("p50 / p95", lambda row: f"{seconds(row['p50_ms'])} / {seconds(row['p95_ms'])}"),
        Column("mean batch", lambda row: f"{row['mean_batch']:.1f}"),
        Column(" / ".join(STATUSES), lambda row: " / ".join(str(row["answers"].get(status, 0)) for status in STATUSES)),
        Column("equal alone", lambda row: f"{row['equal']} of {row['compared']}"),
    )
    return table_of(columns, [row for row in load_rows(rows) if not row["hardware"].startswith("CPU")])


def case(row: Row) -> str:
    filled = ", same images" if row.get("same_images") else ""
    return f"{row['hardware']}, {row['door']}, {row['model']} {row['size']} px, {row['dtype']}, {row['method']}{filled}"


def seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
