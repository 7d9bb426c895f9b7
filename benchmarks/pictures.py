"""Pictures of README.md and docs/: `python -m benchmarks.pictures demo|stages|ideas [--device DEVICE]`.

demo and stages are drawn with nano at 512 px; ideas are diagrams of the methods. The plots with numbers are written by `benchmarks.tables`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import nextscale
from nextscale.eval.results import Row
from nextscale_research.observe.plots import BLUE, GRAY, GREEN, ORANGE, PURPLE, STYLE, svg_of

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
PROMPTS = (
    "a 3D icon of a red apple",
    "a photo of a blue t-shirt",
    "a flat icon of a grimacing face",
    "a noto emoji of crossed swords",
    "a glossy emoji of a beach with umbrella",
    "a simple cartoon emoji of a baby chick in twitter style",
)
SEED = 7
METHODS = ("auto:speedup=2", "auto:speedup=3")
TILE, LEFT, TOP, GAP = 192, 170, 62, 6
INK, PALE = "#222222", "#666666"


def font(size: int) -> Any:
    return ImageFont.load_default(size)


def write(sheet: Image.Image, name: str) -> None:
    sheet.convert("RGB").save(FOLDER / name, quality=76, method=6)


def demo(device: str | None) -> None:
    """Six prompts, dense and at two speeds; below, for the faster one, what differs and where the network ran."""
    pipe = nextscale.load("nano", device=device)
    calls = [[pipe(prompt, seed=SEED, size=512, method=method, compute_mask=True) for prompt in PROMPTS] for method in ("dense", *METHODS)]
    points = [re.search(r"([\d.]+)x at LPIPS ([\d.]+)", str(call[0].report.selection_reason)) for call in calls[1:]]
    images = [[out.images[0] for out in call] for call in calls]
    rows = [("dense", "", images[0])]
    rows += [(f"{point[1]}x", f"faster, LPIPS {point[2]}", shown) for point, shown in zip(points, images[1:], strict=True) if point]
    last = rows[-1][0]
    rows.append((f"difference, {last}", "from dense, times 4", [difference(a, b) for a, b in zip(images[0], images[-1], strict=True)]))
    rows.append(
        (f"computed, {last}", "yellow: all of the network; blue: early stages only", [mask_image(out.compute_mask) for out in calls[-1]])
    )
    write(sheet_of(rows), "demo.webp")


def sheet_of(rows: Sequence[tuple[str, str, Sequence[Image.Image]]]) -> Image.Image:
    sheet = Image.new("RGB", (LEFT + len(PROMPTS) * (TILE + GAP), len(rows) * (TILE + GAP) + TOP), "white")
    draw = ImageDraw.Draw(sheet)
    for column, prompt in enumerate(PROMPTS):
        for number, text in enumerate(wrapped(prompt, 26)):
            draw.text((LEFT + column * (TILE + GAP), 4 + 18 * number), text, INK, font(14))
    for row, (title, about, images) in enumerate(rows):
        top = TOP + row * (TILE + GAP)
        draw.text((4, top + TILE // 2 - 36), title, INK, font(20 if "," in title else 34))
        for number, text in enumerate(wrapped(about, 22)):
            draw.text((4, top + TILE // 2 + 8 + 17 * number), text, PALE, font(14))
        for column, image in enumerate(images):
            sheet.paste(image.resize((TILE, TILE), Image.Resampling.LANCZOS), (LEFT + column * (TILE + GAP), top))
    return sheet


def difference(a: Image.Image, b: Image.Image) -> Image.Image:
    change = np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)) * 4
    return Image.fromarray(255 - change.clip(0, 255).astype(np.uint8))


def mask_image(masks: Sequence[Any]) -> Image.Image:
    """The mean over the stages of the share of the network that ran, weighted by their cells, from dark blue to yellow."""
    from matplotlib import colormaps

    side = masks[-1].shape[-1]
    total = np.zeros((side, side))
    for mask in masks:
        total += np.asarray(Image.fromarray(mask[0].cpu().float().numpy()).resize((side, side), Image.Resampling.NEAREST)) * mask[0].numel()
    share = total / sum(mask[0].numel() for mask in masks)
    return Image.fromarray((colormaps["cividis"](share)[..., :3] * 255).astype(np.uint8)).resize((TILE, TILE), Image.Resampling.NEAREST)


def wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{word} "
    return lines


def stages(device: str | None) -> None:
    """An image after each stage, and the tokens of the stage."""
    pipe = nextscale.load("nano", device=device)
    out = pipe(PROMPTS[0], seed=SEED, size=512, keep_stages=True)
    assert out.stages is not None
    shown = out.report.stages[::2]
    tile, top, bar = 180, 30, 60
    sheet = Image.new("RGB", (len(shown) * (tile + GAP), top + tile + bar + 46), "white")
    draw, most = ImageDraw.Draw(sheet), max(stage.tokens for stage in shown)
    for column, stage in enumerate(shown):
        left = column * (tile + GAP)
        draw.text((left, 6), f"after stage {stage.index}", INK, font(16))
        sheet.paste(out.stages.images(stage.index)[0].resize((tile, tile)), (left, top))
        height = max(2, round(bar * stage.tokens / most))
        bottom = top + tile + bar + 8
        draw.rectangle((left, bottom - height, left + tile, bottom), fill="#00897b")
        draw.text((left, bottom + 6), f"{stage.height} x {stage.width} = {stage.tokens} token{'s' * (stage.tokens > 1)}", INK, font(16))
    write(sheet, "stages.webp")


# --- diagrams and plots


def drawn(width: float, height: float, draw: Callable[[Any], None]) -> str:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE | {"font.size": 11, "svg.fonttype": "path"}):
        figure, axes = pyplot.subplots(figsize=(width, height))
        draw(axes)
        figure.tight_layout()
        text = svg_of(figure)
        pyplot.close(figure)
    return text


def cells(axes: Any, left: float, side: int, colors: Callable[[int, int], str], title: str, width: float = 4.0) -> None:
    from matplotlib.colors import to_rgb

    pixels = np.ones((side * 8, side * 8, 3))
    for y, x in np.ndindex(side, side):
        pixels[y * 8 : y * 8 + 7, x * 8 : x * 8 + 7] = to_rgb(colors(x, y))
    axes.imshow(pixels, extent=(left, left + width, width, 0), interpolation="nearest")
    axes.text(left, width + 0.45, title, fontsize=11)


def arrow(axes: Any, start: float, stop: float, text: str) -> None:
    axes.annotate("", (stop, 2), (start, 2), arrowprops={"arrowstyle": "-|>", "color": "#444444", "lw": 1.5})
    axes.text((start + stop) / 2, 1.75, text, ha="center", fontsize=10)


def blank(axes: Any, width: float, height: float = 5.2) -> None:
    axes.set_xlim(-0.1, width)
    axes.set_ylim(height - 0.4, -0.9)
    axes.set_aspect("equal")
    axes.axis("off")


def legend(axes: Any, left: float, entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Rectangle

    for color, text in entries:
        axes.add_patch(Rectangle((left, -0.75), 0.35, 0.35, color=color, lw=0))
        axes.text(left + 0.5, -0.45, text, fontsize=10)
        left += 0.9 + 0.17 * len(text)


LIGHT = "#dddddd"


def inside(x: int, y: int, side: int) -> bool:
    """On the outline of a disk: the part of an image that has detail."""
    radius = ((x + 0.5) / side - 0.5) ** 2 + ((y + 0.5) / side - 0.5) ** 2
    return 0.07 < radius < 0.16


def sparsevar(axes: Any) -> None:
    cells(axes, 0, 8, lambda x, y: ORANGE if inside(x, y, 8) else LIGHT, "change by a block, stage 9")
    arrow(axes, 4.3, 6.2, "enlarge, threshold")
    kept = lambda x, y: BLUE if inside(x, y, 16) else GREEN if x % 4 == y % 4 == 0 else LIGHT  # noqa: E731
    cells(axes, 6.5, 16, kept, "stage 10: blue and green run")
    arrow(axes, 10.8, 12.7, "copy logits")
    cells(axes, 13, 16, lambda x, y: BLUE if inside(x, y, 16) else GREEN, "all cells have logits")
    legend(axes, 0, ((ORANGE, "large change"), (BLUE, "computed"), (GREEN, "anchor, or copied from one"), (LIGHT, "left out")))
    blank(axes, 17.2)


def fastvar(axes: Any) -> None:
    cells(axes, 0, 8, lambda x, y: PURPLE, "sublayer output, stage 8: cached")
    arrow(axes, 4.3, 6.2, "resize")
    cells(axes, 6.5, 16, lambda x, y: PURPLE, "restored map, stage 10")
    cells(axes, 11.2, 16, lambda x, y: BLUE if inside(x, y, 16) else LIGHT, "salient tokens run")
    arrow(axes, 15.4, 16.9, "put")
    cells(axes, 17.2, 16, lambda x, y: BLUE if inside(x, y, 16) else PURPLE, "output of the sublayer")
    legend(axes, 0, ((PURPLE, "from the cached stage"), (BLUE, "computed"), (LIGHT, "not run")))
    blank(axes, 21.4)


def stagevar(axes: Any) -> None:
    from matplotlib.patches import Rectangle

    sides = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
    left = 0.0
    for index, side in enumerate(sides):
        size = 0.35 + side / 64 * 1.9
        for row, color in enumerate((BLUE, ORANGE)):
            runs = index < 10 or (index == 10 and color == ORANGE)
            face = color if runs and index < 10 else "none"
            patch = Rectangle((left, 2.3 * (row + 1) - size), size, size, facecolor=face, edgecolor=color if runs else "#bbbbbb", lw=1.2)
            if index == 10 and runs:
                patch.set_hatch("///")
            axes.add_patch(patch)
        axes.text(left + size / 2, 4.95, str(side), ha="center", fontsize=9)
        left += size + 0.18
    for start, stop, text in ((0, 6.9, "meaning and structure: both rows, all tokens"), (7.8, 9.4, "low rank"), (9.4, 13.7, "skipped")):
        axes.text((start + stop) / 2, -0.35, text, ha="center", fontsize=11)
    axes.text(-0.2, 1.3, "with the prompt", ha="right", fontsize=10)
    axes.text(-0.2, 3.6, "without", ha="right", fontsize=10)
    axes.text(-0.2, 4.95, "side of the stage", ha="right", fontsize=9)
    axes.set_xlim(-2.6, left)
    axes.set_ylim(5.1, -0.8)
    axes.set_aspect("equal")
    axes.axis("off")


def ideas(_: str | None) -> None:
    for name, draw, width in (("sparsevar", sparsevar, 10.0), ("fastvar", fastvar, 11.0), ("stagevar", stagevar, 11.0)):
        (FOLDER / f"idea-{name}.svg").write_text(drawn(width, 3.4, draw), encoding="utf-8")


LINES = {  # of the plot of quality: points that belong together, by how their names begin
    "skip": ("skip the last", GRAY, "leaving out 1, 2, 3 stages"),
    "budget": ("SparseVAR, ", BLUE, "SparseVAR, budgets of 60 to 20 %"),
    "auto": ("auto:", GREEN, "auto (tuned)"),
}
POINTS = {"SparseVAR": BLUE, "FastVAR": ORANGE, "StageVAR": PURPLE, "guidance dropped": "#444444", "ToMe": "#997700"}


def quality_svg(rows: Sequence[Row]) -> str:
    """Speedup against LPIPS to dense images, every point or line with its name beside it."""
    found = {row["method"]: (row["speedup"]["median"], row["lpips"]["value"]) for row in rows if row.get("lpips")}

    def draw(axes: Any) -> None:
        for begin, color, name in LINES.values():
            line = sorted(point for method, point in found.items() if method.startswith(begin))
            axes.plot(*zip(*line, strict=True), color=color, marker="o", markersize=4)
            axes.annotate(name, line[-1], (8, -12 if begin == "SparseVAR, " else -2), textcoords="offset points", color=color)
        for name, color in POINTS.items():
            axes.plot(*found[name], color=color, marker="D", markersize=7, ls="none")
            axes.annotate(name, found[name], (8, -10 if name == "StageVAR" else 6), textcoords="offset points", color=color)
        axes.set(xlabel="times as fast as dense generation", ylabel="LPIPS to dense images (lower is nearer)")
        axes.set(xlim=(0.8, 5.2), ylim=(0, 0.27))
        axes.text(5.15, 0.006, "better: right and down", ha="right", color="#666666")

    return drawn(8.5, 4.6, draw)


def stage_times_svg(row: Row) -> str:
    """Bars: time of every stage of one dense image."""
    times, tokens = row["stage_median_ms"], row["tokens"]

    def draw(axes: Any) -> None:
        bars = axes.bar(range(len(times)), times, color=BLUE)
        axes.bar_label(bars, [f"{time:.0f}" for time in times])
        axes.set_xticks(range(len(times)), [str(count) for count in tokens])
        share = sum(times[-3:]) / sum(times)
        axes.set(xlabel="tokens of the stage", ylabel="ms")
        axes.set_title(f"{row['model']}, one image, {row['hardware']}: the last three of {len(times)} stages take {share:.0%} of the time")

    return drawn(8.5, 3.2, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=("demo", "stages", "ideas"))
    parser.add_argument("--device")
    arguments = parser.parse_args()
    for name in arguments.names:
        {"demo": demo, "stages": stages, "ideas": ideas}[name](arguments.device)


if __name__ == "__main__":
    main()
