"""Figures of `python -m nextscale_research observe --details`, from its numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nextscale.errors import MissingExtra

from .details import Details
from .plots import BLUE, GRAY, GREEN, ORANGE, PURPLE, SIZE, STYLE, draw_line, label_lines, real, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (ORANGE, BLUE, GREEN, PURPLE, GRAY, "#e69f00", "#56b4e9", "#cc79a7")
TITLES = {"lpips": "LPIPS", "dists": "DISTS", "clip": "CLIP", "dinov2": "DINOv2"}


def detail_figures(found: Details) -> dict[str, str]:
    """All figures as SVG, by name."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install matplotlib; the numbers do not") from error
    drawn = {}
    with matplotlib.rc_context(STYLE):
        for name, draw in DETAIL_FIGURES.items():
            if name == "projection" and found.projection is None:
                continue
            figure = Figure(figsize=SIZE, layout="constrained")
            draw(figure, found)
            drawn[name] = svg_of(figure)
    return drawn


def name_stages(axes: Axes, found: Details, along: str = "x") -> None:
    names = [str(height) if height == width else f"{height}x{width}" for height, width in found.stages]
    (axes.set_xticks if along == "x" else axes.set_yticks)(range(len(names)), names)
    (axes.set_xlabel if along == "x" else axes.set_ylabel)("tokens a side at the stage")


def draw_distances(figure: Figure, found: Details) -> None:
    left, right = figure.subplots(1, 2)
    for (name, curve), color in zip(found.distances.items(), COLORS, strict=False):
        draw_line(left, range(len(found.stages)), curve, TITLES[name], color)
        first = curve.mean[0] or 1.0
        relative = [value / first for value in real(curve.mean)]
        right.plot(range(len(relative)), relative, color=color, marker="o", markersize=3, label=TITLES[name])
        if (stage := found.boundaries[name]) is not None:
            right.axvline(stage, color=color, lw=0.8, ls="--")
    right.axhline(0.1, color=GRAY, lw=0.6)
    left.set(title="distance to the final image", ylim=(0, None))
    right.set(title="of the distance after the first stage; dashed: a tenth is left", ylim=(0, None))
    for axes in (left, right):
        name_stages(axes, found)
        label_lines(axes)


def draw_spectra(figure: Figure, found: Details) -> None:
    left, right = figure.subplots(1, 2)
    bands = range(len(found.edges) + 1)
    shades = [str(0.85 - 0.85 * stage / max(1, len(found.stages) - 1)) for stage in range(len(found.stages))]
    for (height, _), power, shade in zip(found.stages, found.stage_power, shades, strict=True):
        left.plot(bands, real(power), color=shade, marker="o", markersize=2, label=str(height))
    for (name, power), color in zip(found.method_power.items(), COLORS, strict=False):
        right.plot(bands, real(power), color=color, marker="o", markersize=3, label=name)
    right.axhline(1, color=GRAY, lw=0.6)
    left.set(title="power of the image after each stage, of the final image's", yscale="log")
    right.set(title="power with each method, of dense generation's", ylim=(0, None))
    periods = [f"> {1 / found.edges[0]:.0f}", *(f"{1 / edge:.0f}" for edge in found.edges)]
    for axes in (left, right):
        axes.set_xticks(list(bands), periods)
        axes.set_xlabel("longest period of the band, pixels")
        label_lines(axes)


def draw_attention(figure: Figure, found: Details) -> None:
    left, right, places = figure.subplots(1, 3)
    shares = [real(row) for row in found.attention]
    picture = left.imshow(shares, aspect="auto", cmap="cividis", vmin=0)
    figure.colorbar(picture, ax=left, label="share of the attention")
    name_stages(left, found, "y")
    name_stages(left, found)
    left.set(
        title="from the tokens of a stage (down) to the tokens of a stage (across)",
        ylabel="from",
        xlabel="to the stage with this many tokens a side",
    )
    own = [row[stage] for stage, row in enumerate(shares)]
    cells = [height * width for height, width in found.stages]
    expected = [count / sum(cells[: stage + 1]) for stage, count in enumerate(cells)]
    right.plot(range(len(own)), own, color=ORANGE, marker="o", markersize=3, label="measured")
    right.plot(range(len(own)), expected, color=GRAY, marker="o", markersize=3, label="its share of the tokens")
    right.set(title="attention of a stage to itself", ylim=(0, 1.02))
    for name, matrix, color in (("measured", found.attention_near, ORANGE), ("spread evenly", found.attention_chance, GRAY)):
        rows = [real(row) for row in matrix]
        places.plot(range(len(rows)), [row[stage] for stage, row in enumerate(rows)], color=color, marker="o", markersize=3, label=name)
        before = [row[max(0, stage - 1)] for stage, row in enumerate(rows)]
        places.plot(range(len(rows)), before, color=color, ls="--", lw=0.9, label=f"{name}, one stage before")
    places.set(title="attention to the 3 x 3 cells around the same place", ylim=(0, 1.02))
    for axes in (right, places):
        name_stages(axes, found)
        label_lines(axes)


def draw_logits(figure: Figure, found: Details) -> None:
    left, right = figure.subplots(1, 2)
    draw_line(left, range(len(found.stages)), found.similarity, "logits", BLUE)
    left.set(title="cosine of a cell's logits and its neighbors'")
    draw_line(right, range(len(found.stages)), found.similarity_detail, "logits", BLUE)
    right.axhline(0, color=GRAY, lw=0.6)
    right.set(title="rank correlation with the detail of the final image")
    for axes in (left, right):
        name_stages(axes, found)


def draw_changes(figure: Figure, found: Details) -> None:
    axes = figure.subplots(1, 1)
    picture = axes.imshow([real(curve.mean) for curve in found.change_stability], aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set(title="whether a block changes the places that it changed one stage before", ylabel="block")
    name_stages(axes, found)
    figure.colorbar(picture, ax=axes, label="rank correlation")


def draw_projection(figure: Figure, found: Details) -> None:
    assert found.projection is not None
    axes = figure.subplots(1, 1)
    for place, ((name, curve), color) in enumerate(zip(found.projection.to_dense.items(), COLORS, strict=False)):
        numbers = range(found.projection.seeds)
        errors = [0.0 if value is None else value for value in curve.error]
        axes.bar(
            [number + place * 0.2 for number in numbers],
            real(curve.mean),
            0.18,
            yerr=errors,
            color=color,
            label=f"{TITLES[name]} to dense",
        )
        axes.axhline(found.projection.between[name], color=color, lw=0.8, ls="--", label=f"{TITLES[name]} between projections")
    axes.set_xticks(range(found.projection.seeds), [f"projection {number}" for number in range(found.projection.seeds)])
    axes.set(title=f"StageVAR with other random projections; a pixel deviates by {found.projection.deviation:.1f} levels", ylim=(0, None))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


Draw = Callable[["Figure", Details], None]
DETAIL_FIGURES: dict[str, Draw] = {
    "distances": draw_distances,
    "spectra": draw_spectra,
    "attention": draw_attention,
    "logits": draw_logits,
    "changes": draw_changes,
    "projection": draw_projection,
}
