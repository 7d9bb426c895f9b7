"""Figures of the observations, from their numbers alone."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nextscale.errors import MissingExtra

from .numbers import Curve, Frequency, Numbers, Observations
from .verdicts import ALPHA, distances

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinct for any color vision (Okabe and Ito).
BLUE, ORANGE, GREEN, PURPLE, GRAY = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#777777"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#888888",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "nextscale",  # the same numbers give the same file
    "svg.fonttype": "none",
}
SIZE = (11.0, 3.2)  # inches
LINE_HEIGHT = 0.075  # share of the axes' height
MOST_UPRIGHT = 30  # names of stages of two digits that fit side by side into a figure with names of lines
EFFECTS = {
    "seed": ("another seed", GRAY),
    "other": ("another prompt", ORANGE),
    "none": ("no prompt", BLUE),
    "unguided": ("no guidance", GREEN),
}


def figures(found: Observations) -> dict[str, str]:
    """All figures as SVG, by name."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install matplotlib; the numbers do not") from error
    with matplotlib.rc_context(STYLE):
        return {name: as_svg(draw, found) for name, draw in FIGURES.items()}


def as_svg(draw: Callable[[Figure, Observations], None], found: Observations) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    draw(figure, found)
    return svg_of(figure)


def svg_of(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def real(values: Numbers) -> list[float]:
    """Values to plot: NaN, which leaves a gap, for missing ones."""
    return [math.nan if value is None else value for value in values]


def draw_line(axes: Axes, x: Sequence[float], curve: Curve, label: str, color: str) -> None:
    """Plots a curve with its standard error; `label_lines` writes the label beside it."""
    mean, error = real(curve.mean), [0.0 if math.isnan(value) else value for value in real(curve.error)]
    low, high = [m - e for m, e in zip(mean, error, strict=True)], [m + e for m, e in zip(mean, error, strict=True)]
    axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    axes.plot(x, mean, color=color, marker="o", markersize=3, label=label)


def label_lines(axes: Axes) -> None:
    """Names each line to the right of its end, in its color; names that would overlap move apart."""
    ends = []
    for line in axes.get_lines():
        values = [float(value) for value in np.asarray(line.get_ydata()) if np.isfinite(value)]
        if values and not str(line.get_label()).startswith("_"):
            ends.append((axes.transAxes.inverted().transform(axes.transData.transform((0, values[-1])))[1], line))
    ends.sort(key=lambda end: end[0])
    lowest_free = -math.inf
    excess = max(0.0, ends[-1][0] + LINE_HEIGHT * (len(ends) - 1) - 1) if ends else 0.0
    for height, line in ends:
        place = max(height - excess / len(ends), lowest_free)
        lowest_free = place + LINE_HEIGHT
        axes.annotate(
            str(line.get_label()), (1.02, place), xycoords="axes fraction", color=line.get_color(), va="center", annotation_clip=False
        )


def name_stages(axes: Axes, found: Observations, stages: Sequence[int] | None = None) -> None:
    shown = range(len(found.stages)) if stages is None else stages
    sizes = [found.stages[stage] for stage in shown]
    names = [str(height) if height == width else f"{height}x{width}" for height, width in sizes]
    room = axes.get_subplotspec().get_geometry()[1] * len(names) <= MOST_UPRIGHT  # type: ignore[union-attr]
    short = all(len(name) < 3 for name in names)
    axes.set_xticks(list(shown), names, rotation=60 if not short else 0 if room else 90)
    axes.set_xlabel("tokens a side at the stage")


def draw_frequency(figure: Figure, found: Observations) -> None:
    left, middle, right = figure.subplots(1, 3)
    numbers, stages = found.frequency, range(len(found.stages))
    draw_line(left, stages, numbers.detailed, "most detailed quarter", ORANGE)
    draw_line(left, stages, numbers.smooth, "smoothest quarter", BLUE)
    left.set(title="change of the image by a stage", ylabel="levels of 255", ylim=(0, None))
    draw_line(middle, stages, numbers.correlation, "final image", ORANGE)
    draw_line(middle, stages, numbers.foreseen, "image before the stage", BLUE)
    middle.axhline(0, color=GRAY, lw=0.6)
    middle.set(title="rank correlation of change and detail of", ylim=(min(-0.1, *lowest(numbers)), 1))
    for axes in (left, middle):
        name_stages(axes, found)
        label_lines(axes)
    draw_bands(figure, right, found)


def lowest(numbers: Frequency) -> list[float]:
    return [value - 0.05 for curve in (numbers.correlation, numbers.foreseen) for value in curve.mean if value is not None]


def draw_bands(figure: Figure, axes: Axes, found: Observations) -> None:
    """Draws the power that each stage adds to each band, against the power of the image."""
    numbers = found.frequency
    shares = [
        [math.nan if not whole or power is None else math.log10(max(power / whole, 1e-6)) for power in band]
        for band, whole in zip(zip(*numbers.power, strict=True), numbers.image_power, strict=True)
    ]
    picture = axes.imshow(shares, aspect="auto", origin="lower", cmap="cividis", vmin=-4, vmax=0.5)
    periods = [f"{1 / edge:.0f}" for edge in numbers.edges]
    axes.set_yticks([place + 0.5 for place in range(len(periods))], periods)
    axes.set(title="power added, of the image's", ylabel="period, pixels")
    name_stages(axes, found)
    bar = figure.colorbar(picture, ax=axes, ticks=[-4, -3, -2, -1, 0])
    bar.ax.set_yticklabels(["0.01 %", "0.1 %", "1 %", "10 %", "100 %"])


def draw_blocks(figure: Figure, found: Observations) -> None:
    numbers = found.blocks
    panels = {
        "token change and detail": numbers.correlation,
        "earlier token change and image change": numbers.foresight,
        "distance from the mean and detail": numbers.distance,
    }
    rows = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, curves) in zip(rows, panels.items(), strict=True):
        picture = axes.imshow([real(curve.mean) for curve in curves], aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set(title=title)
        name_stages(axes, found)
    rows[0].set_ylabel("block")
    rows[0].set_yticks(range(0, len(numbers.correlation), max(1, len(numbers.correlation) // 8)))
    figure.colorbar(picture, ax=rows, label="rank correlation")


def draw_prompt(figure: Figure, found: Observations) -> None:
    left, right = figure.subplots(1, 2)
    switches = found.prompt.switches
    shown = {name: effect for name in EFFECTS if (effect := found.prompt.effects.get(name)) is not None}
    for name, effect in shown.items():
        label, color = EFFECTS[name]
        curve, unit = distances(effect)
        draw_line(left, switches, curve, label, color)
        draw_line(right, switches, effect.codes, label, color)
    left.set(title=f"how far the image moves, {unit_name(unit)}", ylim=(0, None))
    right.set(title="share of the later codes that differ", ylim=(0, None))
    for axes in (left, right):
        name_stages(axes, found, switches)
        axes.set_xlabel("replaced from this stage on (tokens a side)")
        label_lines(axes)


def unit_name(unit: str) -> str:
    return "root mean square levels of 255" if unit == "levels" else unit


def draw_rank(figure: Figure, found: Observations) -> None:
    left, right = figure.subplots(1, 2)
    numbers, stages = found.rank, range(len(found.stages))
    for alpha, curves, color in zip(numbers.alphas, numbers.ranks, (GREEN, BLUE, ORANGE), strict=True):
        blocks = [real(curve.mean) for curve in curves]
        shares = [[value / most for value, most in zip(block, numbers.full, strict=True)] for block in blocks]
        low, high = ([pick(column) for column in zip(*shares, strict=True)] for pick in (min, max))
        left.fill_between(stages, low, high, color=color, alpha=0.2, lw=0)
        mean = [sum(column) / len(column) for column in zip(*shares, strict=True)]
        left.plot(stages, mean, color=color, marker="o", markersize=3, label=f"{alpha:.0%}")
    left.set(title="directions that hold this share of the energy", ylabel="of the possible ones", ylim=(0, 1.02))
    name_stages(left, found)
    label_lines(left)
    chosen = numbers.ranks[numbers.alphas.index(ALPHA)]
    picture = right.imshow([real(curve.mean) for curve in chosen], aspect="auto", cmap="cividis", vmin=0)
    right.set_yticks(range(len(numbers.layers)), [str(layer) for layer in numbers.layers])
    right.set(title=f"their number for {ALPHA:.0%}, by block", ylabel="block")
    name_stages(right, found)
    figure.colorbar(picture, ax=right)


Draw = Callable[["Figure", Observations], None]
FIGURES: dict[str, Draw] = {
    "frequency": draw_frequency,
    "blocks": draw_blocks,
    "prompt": draw_prompt,
    "rank": draw_rank,
}
