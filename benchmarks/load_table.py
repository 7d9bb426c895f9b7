"""The tables of docs/serving.md: what a server does under load, from the rows that `benchmarks.load` has written."""

from __future__ import annotations

from nextscale.lab.results import Row

# What a run was made with; of those that are alike the last counts.
CASE = ("hardware", "door", "model", "size", "dtype", "method", "same_images")


def load_rows(rows: list[Row]) -> list[Row]:
    found = {tuple(row.get(name) for name in (*CASE, "rate")): row for row in rows if row["benchmark"] == "load" and "error" not in row}
    return sorted(found.values(), key=lambda row: [str(row.get(name)) for name in CASE])


def load_table(rows: list[Row]) -> str:
    lines = [
        "| machine, door, images | capacity, images/s | gain over one at a time | offered | images/s | p50 / p95 | mean batch"
        " | 200 / 429 / 503 | lost | equal alone |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in load_rows(rows):
        answers = " / ".join(str(row["answers"].get(status, 0)) for status in ("200", "429", "503"))
        cells = (
            f"{row['hardware']}, {row['door']}, {row['model']} {row['size']} px, {row['dtype']}, {row['method']}"
            f"{', same images' if row.get('same_images') else ''}",
            f"{row['capacity_per_s']:.3g}",
            f"{row['gain']:.2f}",
            f"{row['rate']:g}x",
            f"{row['images_per_s']:.3g}",
            f"{seconds(row['p50_ms'])} / {seconds(row['p95_ms'])}",
            f"{row['mean_batch']:.1f}",
            answers,
            str(row["lost"]),
            f"{row['equal']} of {row['compared']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.1f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
