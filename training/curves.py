"""A plot of the loss curves of runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nextscale.errors import MissingExtra, SettingError
from nextscale.io import replacing

from .run import CURVE, CurveError, read_lines

LEFT_OUT = ("step", "seconds", "gradient", "learning_rate", "discriminator", "generator", "entropy")  # other size or sign than losses
FORMATS = (".svg", ".png", ".pdf")
LINES = ("-", ":", "-.", "--")
KIND = re.compile(r"_(\d+(px_\d+)?)$")  # kind of batch: its side, and the number of stages

Curve = dict[str, list[tuple[float, float]]]


def read_curve(folder: Path) -> Curve:
    """Points (minutes, value) by name; of the losses per stage only the first, the middle and the last."""
    path = folder / CURVE
    if not path.exists():
        raise CurveError(f"{folder} holds no {CURVE}: expected the folder of a training run")
    curve: Curve = defaultdict(list)
    for line in read_lines(path):
        if "seconds" not in line:  # results, not a part of the curve
            continue
        for name, value in line.items():
            if not name.startswith(LEFT_OUT):
                for part, number in _numbers(name, value):
                    curve[part].append((line["seconds"] / 60, number))
    return dict(curve)


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    if not isinstance(value, list):
        return [(name, value)]
    shown = sorted({0, len(value) // 2, len(value) - 1})
    return [(name.replace("stages", f"stage_{position + 1}", 1), value[position]) for position in shown]


def plot_curves(folders: Sequence[Path], target: Path) -> None:
    """One panel per run; logarithmic, since the parts of a loss differ in size. A colour for each kind of batch; the sum is bold."""
    if target.suffix.lower() not in FORMATS:
        raise SettingError(f"{target}: expected a file name that ends in one of {', '.join(FORMATS)}")
    curves = [(folder, read_curve(folder)) for folder in folders]
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("curves are plotted with matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(6.5 * len(curves), 4.8), layout="constrained", facecolor="white")
    for axes, (folder, curve) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        kinds = list(dict.fromkeys(_kind(name) for name in curve))
        others: dict[str, int] = defaultdict(int)  # lines besides the sum, by kind
        for name in sorted(curve, key=lambda name: (kinds.index(_kind(name)), not name.startswith("loss"))):
            kind, total = _kind(name), name.startswith("loss")
            line = LINES[0] if total else LINES[1 + others[kind] % (len(LINES) - 1)]
            others[kind] += not total
            look = {"color": f"C{kinds.index(kind)}", "linestyle": line, "linewidth": 1.8 if total else 1.0}
            axes.plot(*zip(*curve[name], strict=True), label=_label(name), **look)
        below_zero = any(value <= 0 for points in curve.values() for _, value in points)
        axes.set(title=folder.resolve().name, xlabel="minutes", ylabel="loss", yscale="symlog" if below_zero else "log")
        if curve:
            axes.legend(fontsize=7, frameon=False, ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.14))
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(target) as temporary:
        figure.savefig(temporary, format=target.suffix[1:].lower())


def _kind(name: str) -> str:
    found = KIND.search(name)
    return found[1] if found else ""


def _label(name: str) -> str:
    """What the legend says: "loss, 256 px, 10 stages" for loss_256px_10."""
    part, (side, _, stages) = KIND.sub("", name).replace("_", " "), _kind(name).partition("px_")
    return ", ".join([part, *([f"{side} px"] if side else []), *([f"{stages} stages"] if stages else [])])
