"""A plot of savings against distance, drawn from rows of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from nextscale.errors import SettingError
from nextscale.eval.results import Row

from .rows import PROBED

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 380, 300, 58, 54, 66
LEGEND_LINE, LETTER = 15, 6  # pixels
COLORS = {"dense": "#333", "skip": "#888", "sparse": "#3b6fb6", "fast": "#c2542d", "stage": "#3a8a4d", "tome": "#8a5aa8"}
OTHER = "#3b6fb6"
FEWEST_TICKS = 4


def frontier_svg(rows: Sequence[Row], timed: bool | None = None) -> str:
    """Two panels for the methods of one model and size: LPIPS to the dense image, and agreement with the prompt where it was judged.

    timed: both against the speedup over dense generation, not against the share of the MACs; None: unless it ran on a CPU, where times
        mean little.
    """
    usable = [row for row in rows if "error" not in row]
    if not usable:
        raise SettingError("there is nothing to draw: the results hold no row of a method that ran")
    if timed is None:
        timed = not usable[0]["hardware"].startswith("CPU") and all(row["speedup"] for row in usable)
    across = (lambda row: row["speedup"]["median"]) if timed else (lambda row: row["cost_share"])
    named = "speedup over dense" if timed else "MACs against dense"
    agreement = next((name for name in ("label_top5", "style") if name in usable[0]), None)
    panels = [("LPIPS to the dense image", "lpips", True)]
    if agreement is not None:
        panels.append((f"agreement with the prompt, {PROBED[agreement]}{of_real(usable[0][agreement]['real'])}", agreement, False))
    column = math.ceil(len(usable) / len(panels))
    longest = max(len(row["method"]) for row in usable) + 4
    width = max(LEFT + len(panels) * (PANEL_WIDTH + GAP), LEFT + math.ceil(LETTER * longest) if len(panels) == 1 else 0)
    height = TOP + PANEL_HEIGHT + 50 + LEGEND_LINE * column
    numbers = {row["method"]: number for number, row in enumerate(usable)}
    parts = [
        _panel(
            LEFT + place * (PANEL_WIDTH + GAP), title, named, [(row, across(row), _interval(row, name, zero)) for row in usable], numbers
        )
        for place, (title, name, zero) in enumerate(panels)
    ]
    first = usable[0]
    heading = (
        f"{first['model']}, {first['size'][0]}x{first['size'][1]}, {first['images']} prompts, batch {first['batch']}, {first['hardware']}"
    )
    legend = [
        _text(
            LEFT + (number // column) * width / 2,
            TOP + PANEL_HEIGHT + 56 + LEGEND_LINE * (number % column),
            f"{number}  {name}",
            fill=_color(name),
        )
        for name, number in numbers.items()
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" fill="#333">'
        f'<rect width="{width}" height="{height}" fill="white"/>{_text(LEFT, 20, heading, size=14)}{"".join((*parts, *legend))}</svg>\n'
    )


def of_real(share: float | None) -> str:
    return "" if share is None else f" (of real images {share:.0%})"


def _interval(row: Row, name: str, zero_if_dense: bool) -> tuple[float, float, float] | None:
    """Value and bounds; dense images are at no distance from themselves."""
    if row.get(name) is None:
        return (0.0, 0.0, 0.0) if zero_if_dense and row["method"] == "dense" else None
    return row[name]["value"], row[name]["low"], row[name]["high"]


def _panel(
    left: float, title: str, named: str, points: Sequence[tuple[Row, float, tuple[float, float, float] | None]], numbers: dict[str, int]
) -> str:
    drawn = [(row["method"], x, interval) for row, x, interval in points if interval is not None]
    to_x, x_ticks = _axis([x for _, x, _ in drawn], left, left + PANEL_WIDTH)
    to_y, y_ticks = _axis([bound for _, _, interval in drawn for bound in interval], TOP + PANEL_HEIGHT, TOP)
    parts = [
        f'<rect x="{left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#bbb"/>',
        _text(left, TOP - 10, title),
        _text(left + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 32, named, anchor="middle"),
        *(_text(to_x(tick), TOP + PANEL_HEIGHT + 15, f"{tick:.4g}", anchor="middle") for tick in x_ticks),
        *(_text(left - 6, to_y(tick) + 4, f"{tick:.4g}", anchor="end") for tick in y_ticks),
    ]
    for name, x, (value, low, high) in drawn:
        color = _color(name)
        parts.append(f'<path d="M{to_x(x):.1f} {to_y(low):.1f}V{to_y(high):.1f}" stroke="{color}" stroke-opacity="0.5"/>')
        parts.append(f'<circle cx="{to_x(x):.1f}" cy="{to_y(value):.1f}" r="3.5" fill="{color}"/>')
    spots = label_spots([(to_x(x), to_y(value)) for _, x, (value, _, _) in drawn], left + PANEL_WIDTH)
    for (name, _, _), (x, y) in zip(drawn, spots, strict=True):
        parts.append(_text(x, y, str(numbers[name]), anchor="middle", fill=_color(name)))
    return "".join(parts)


def label_spots(points: Sequence[tuple[float, float]], right_edge: float) -> list[tuple[float, float]]:
    """The place of each point's number, the middle of its foot: as near as no other point or number is in the way."""
    spots: list[tuple[float, float]] = []
    for x, y in points:
        tried = [(x + across, y + down) for down in (-4, 11, -15, 22, -26, 33, -37, 44) for across in (10, -10, 24, -24)]
        inside = [spot for spot in tried if spot[0] < right_edge - 6]
        free = (
            (a, b)
            for a, b in inside
            if all(abs(a - c) >= 15 or abs(b - d) >= 11 for c, d in spots)
            and all(abs(a - c) >= 9 or abs(b - 4 - d) >= 8 for c, d in points)
        )
        spots.append(next(free, inside[0]))
    return spots


def _axis(values: Sequence[float], start: float, stop: float) -> tuple[Callable[[float], float], list[float]]:
    """Returns the map from values to places, with a margin, and round values to write beside the axis."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 0.5
    low, high = low - margin, high + margin
    power = 10.0 ** math.floor(math.log10((high - low) / FEWEST_TICKS))
    step = max(factor * power for factor in (1, 2, 5) if factor * power <= (high - low) / FEWEST_TICKS)
    ticks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return (lambda value: start + (value - low) / (high - low) * (stop - start)), ticks


def _color(method: str) -> str:
    return next((color for start, color in COLORS.items() if method.lower().startswith(start)), OTHER)


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, fill: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
