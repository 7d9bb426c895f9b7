"""Times of every stage as a picture."""

from __future__ import annotations

from collections.abc import Iterable

from ..results import Row
from .shown_rows import case_of, dense_rows, image
from .tables import SUMMARY_CASE


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
