"""Plots the losses of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nextscale.io import replacing

LEFT_OUT = (
    "step",
    "seconds",
    "gradient",
    "learning_rate",
    "pictures",
    "accuracy",
    "discriminator",
    "generator",
    "entropy",
)  # of another size or sign than losses

Curve = dict[str, list[tuple[float, float]]]


def read_curve(lines: Sequence[Mapping[str, Any]]) -> Curve:
    """Returns points (minutes, value) by name; of losses per stage only the first, the middle and the last."""
    curve: Curve = defaultdict(list)
    for line in lines:
        for name, value in line.items() if "seconds" in line else ():  # others are results
            if name.startswith(LEFT_OUT):
                continue
            shown = {name: value}
            if isinstance(value, list):
                places = sorted({0, len(value) // 2, len(value) - 1})
                shown = {name.replace("stages", f"stage_{place + 1}", 1): value[place] for place in places}
            for part, number in shown.items():
                curve[part].append((line["seconds"] / 60, number))
    return dict(curve)


def plot_curve(lines: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Writes a plot if matplotlib is installed. The scale is logarithmic, since the parts of a loss differ in size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    curve, figure = read_curve(lines), Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in sorted(curve.items(), key=lambda item: not item[0].startswith("loss")):
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.8 if name.startswith("loss") else 1.0)
    below_zero = any(value <= 0 for points in curve.values() for _, value in points)
    axes.set(title=target.resolve().parent.name, xlabel="minutes", ylabel="loss", yscale="symlog" if below_zero else "log")
    if curve:
        axes.legend(fontsize=7)
    with replacing(target) as temporary:
        figure.savefig(temporary, format="svg")
