"""The loss curves of runs as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ..errors import MissingExtra
from .data import DataError
from .run import CURVE

LEFT_OUT = ("step", "seconds", "gradient", "learning_rate", "rate", "discriminator", "generator")


def read_curve(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """(minutes, value) by name."""
    path = folder / CURVE
    if not path.exists():
        raise DataError(f"{folder} holds no {CURVE}: expected the folder of a training run")
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        values = json.loads(line)
        for name, value in values.items():
            if "seconds" in values and isinstance(value, int | float) and not name.startswith(LEFT_OUT):
                series[name].append((values["seconds"] / 60, value))
    return series


def plot_curves(folders: Sequence[Path], target: Path) -> None:
    """One panel per run; logarithmic, since the parts of a loss differ in size."""
    curves = [(folder, read_curve(folder)) for folder in folders]
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("curves are drawn with matplotlib: pip install 'nextscale[plots]'") from error
    figure = Figure(figsize=(5.5 * len(curves), 3.6), layout="constrained", facecolor="white")
    for axes, (folder, series) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), linewidth=1.2)
        axes.set(title=folder.name, xlabel="minutes", yscale="symlog" if any(v < 0 for p in series.values() for _, v in p) else "log")
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
