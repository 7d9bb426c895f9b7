"""The figure of a search's trials, and the command `sensitivity` that draws it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextscale.cli.files import require_writable
from nextscale.cli.options import Force
from nextscale.errors import MissingExtra
from nextscale.io import write_text
from nextscale.tune.frontier import frontier
from nextscale.tune.log import TrialLog

from .observe.plots import BLUE, GRAY, GREEN, ORANGE, PURPLE, STYLE, label_lines, svg_of
from .program import app
from .sensitivity import Line, Sensitivities

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (12.5, 6.6)  # inches
COLORS = (ORANGE, BLUE, GREEN, PURPLE, "#e69f00", "#56b4e9", "#cc79a7", GRAY, "#332288")
DISTANCE = "LPIPS to dense"


@app.command()
def sensitivity(
    trials: Annotated[Path, typer.Argument(metavar="FILE", help="The *.trials.jsonl that `nextscale tune --trials FILE` kept.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The .svg file to write.")] = Path("sensitivity.svg"),
    force: Force = False,
) -> None:
    """Plot the effect of each knob in the trials of a search."""
    require_writable([out], force)
    write_text(sensitivity_svg(Sensitivities.of(TrialLog.read(trials))), out)
    typer.echo(f"wrote {out}")


def sensitivity_svg(found: Sensitivities) -> str:
    """Six panels: guidance, budgets, stages left out, foresight, other methods, and predictions against measurements."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install matplotlib; the trials do not") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        panels = figure.subplots(2, 3)
        for axes, draw in zip(
            panels.flat, (draw_guidance, draw_shares, draw_left_out, draw_foresight, draw_peers, draw_predicted), strict=True
        ):
            draw(axes, found)
        return svg_of(figure)


def draw_lines(axes: Axes, lines: Iterable[tuple[str, Line]]) -> None:
    """Plots lines of points and names each beside its end."""
    for (name, line), color in zip(lines, cycle(COLORS), strict=False):
        axes.plot(*zip(*line, strict=True), color=color, marker="o", markersize=3, label=name)
    axes.set(ylabel=DISTANCE, ylim=(0, None))
    label_lines(axes)


def name_stages(axes: Axes, found: Sensitivities, stages: Iterable[float]) -> None:
    shown = sorted({int(stage) for stage in stages})
    axes.set_xticks(shown, [f"{stage}\n{'x'.join(map(str, dict.fromkeys(found.grids[stage])))}" for stage in shown])
    axes.set_xlabel("stage, and its tokens a side")


def draw_guidance(axes: Axes, found: Sensitivities) -> None:
    axes.set(title="guidance dropped from a stage on")
    if found.unguided:
        draw_lines(axes, found.unguided.items())
        name_stages(axes, found, (stage for line in found.unguided.values() for stage, _ in line))


def draw_shares(axes: Axes, found: Sensitivities) -> None:
    axes.set(title="SparseVAR at one stage alone", xlabel="share of its cells that is kept")
    lines = ((f"stage {stage}", [*found.shares[stage], (1.0, 0.0)]) for stage in sorted(found.shares))
    draw_lines(axes, ((name, sorted(line, reverse=True)) for name, line in lines))
    axes.invert_xaxis()


def draw_left_out(axes: Axes, found: Sensitivities) -> None:
    axes.set(title="stages left out")
    lines = {"all from this one on": found.skipped, "only this one": found.left_out}
    draw_lines(axes, ((name, line) for name, line in lines.items() if line))
    name_stages(axes, found, (stage for line in lines.values() for stage, _ in line))


def draw_foresight(axes: Axes, found: Sensitivities) -> None:
    """Groups of blocks as bars over the blocks that they have."""
    for (first, stop), share in found.foresight.items():
        single = stop - first == 1
        axes.plot([first - 0.4, stop - 0.6], [share, share], color=BLUE if single else GRAY, lw=3 if single else 1.2)
    axes.axhline(0.4, color=ORANGE, lw=0.8, ls="--")
    axes.set(title="change predicted by blocks", xlabel="block (gray: groups; dashed: chance)", ylabel="share of the next stage's")


def draw_peers(axes: Axes, found: Sensitivities) -> None:
    for (name, line), color in zip(sorted(found.peers.items()), cycle(COLORS), strict=False):
        axes.plot(*zip(*line, strict=True), color=color, marker="o", markersize=3, lw=0.8, label=name)
    best = frontier({place: (1 / place[0], place[1]) for place in [(1.0, 0.0), *found.own]})
    axes.plot(*zip(*best, strict=True), color="black", lw=1.2, label="knobs above")
    axes.set(title="other methods alone", xlabel="MACs against dense", ylabel=DISTANCE, ylim=(0, None))
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_predicted(axes: Axes, found: Sensitivities) -> None:
    axes.set(title=f"several knobs: predicted and measured ({len(found.predicted)})", xlabel=f"predicted {DISTANCE}", ylabel="measured")
    if found.predicted:
        predicted, measured = zip(*found.predicted, strict=True)
        axes.scatter(predicted, measured, s=8, color=BLUE, alpha=0.6, lw=0)
        most = max(max(pair) for pair in found.predicted)
        axes.plot([0, most], [0, most], color=GRAY, lw=0.8)
