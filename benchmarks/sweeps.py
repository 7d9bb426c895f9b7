"""Table and figure of the papers' sweeps in research/notes/observations.md: `python -m benchmarks.sweeps [ROWS]`.

ROWS is a file of `nextscale_research quality` with these lists, whose rows are added to the results. Without it the last rows are used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nextscale.eval.results import DENSE, Row, append_rows, read_rows
from nextscale.loading.presets import model_spec
from nextscale_research.observe.plots import BLUE, GRAY, STYLE, svg_of
from nextscale_research.quality.lists import LISTS
from nextscale_research.quality.rows import comparable, judged

from .cells import MACS, METHOD, Column, bounded, table_of, with_tables
from .observations import FOLDER, PAGE
from .results import RESULTS
from .shown_rows import image

SWEEPS = {
    "sparsevar-taus": "SparseVAR: threshold (tables 1 to 3)",
    "sparsevar-anchors": "SparseVAR: one anchor in n x n cells (table 4)",
    "sparsevar-stages": "SparseVAR: first reduced stage (table 5)",
    "sparsevar-metrics": "SparseVAR: metrics (figure 6)",
    "sparsevar-blocks": "SparseVAR: block (figure 8)",
    "sparsevar-left-out": "SparseVAR: change where cells did not run",
    "peers-shares": "Merging and selecting (SparseVAR, figure 10)",
    "fastvar-scales": "FastVAR: pairs of stages (table 4)",
    "fastvar-ratios": "FastVAR: ratio at the last stage (figure 6)",
    "fastvar-cache": "FastVAR: cached stage (table A.4)",
    "fastvar-layers": "FastVAR: pruned blocks",
    "stagevar-variants": "StageVAR: variants (table 2)",
    "stagevar-ranks": "StageVAR: rank of the last stage (figure 7)",
    "stagevar-alphas": "StageVAR: energy kept at the last stage",
    "stagevar-guidance": "StageVAR: guidance dropped (figures 2 and 14)",
}
SKIPPED = "skip:"
COLUMNS, WIDTH, HEIGHT = 4, 12.5, 2.8  # of panels; inches, of the figure and of a row
APART = 0.2, 0.012  # minimum distance of labeled points, in MACs and LPIPS


def swept(rows: Sequence[Row]) -> tuple[Row, dict[str, list[Row]]]:
    """Returns dense generation of the run with most lists, or the last such, and the rows of each of its lists, including skipping."""
    known, best = judged(rows), None
    for dense in (row for row in reversed(known) if row["method"] == DENSE):
        spec = model_spec(dense["model"])
        stages = len(spec.settings.schedules.choose(tuple(dense["size"]), None))
        found = {row["method"]: row for row in comparable(known, dense) if "error" not in row}
        skipped = [row for name, row in found.items() if name.startswith(SKIPPED)]
        own = {name: [found[one] for one in LISTS[name](stages, spec.model.depth) if one in found] for name in SWEEPS}
        lists = {name: [*skipped, *rows] for name, rows in own.items() if rows}
        if lists and (best is None or len(lists) > len(best[1])):
            best = dense, lists
    if best is None:
        raise SystemExit(f"no run has rows of {', '.join(SWEEPS)}; run `python -m nextscale_research quality --method LIST ...`")
    return best


def sweeps_table(dense: Row, lists: Mapping[str, Sequence[Row]]) -> str:
    columns = (
        Column("sweep", lambda row: row["sweep"], "l", config=True),
        METHOD,
        Column("speedup", lambda row: "" if row["hardware"].startswith("CPU") else f"{row['speedup']['median']:.2f}"),
        MACS,
        Column("LPIPS to dense", lambda row: bounded(row.get("lpips"), "{:.3f}")),
        Column("PSNR", lambda row: f"{row['psnr']['value']:.1f} dB" if row.get("psnr") else ""),
        Column("label in top 5", lambda row: bounded(row.get("label_top5"), "{:.0%}")),
        Column("Fréchet distance to dense", lambda row: bounded(row.get("frechet_dense"), "{:.1f}")),
    )
    skipped = [row | {"sweep": ""} for row in next(iter(lists.values())) if row["method"].startswith(SKIPPED)]
    shown = [row | {"sweep": SWEEPS[name]} for name, own in lists.items() for row in own if not row["method"].startswith(SKIPPED)]
    note = (
        f"`{dense['model']}`, {dense['images']} held-out prompts, {image(dense)}, the same seeds; {dense['hardware']}, {dense['dtype']};"
        " 95 % bootstrap intervals."
    )
    return table_of(columns, [*skipped, *shown], note)


def sweeps_svg(lists: Mapping[str, Sequence[Row]]) -> str:
    """Draws a panel per sweep: LPIPS to dense against MACs, with stage skipping in gray."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        lines = -(-len(lists) // COLUMNS)
        figure = Figure(figsize=(WIDTH, HEIGHT * lines), layout="constrained")
        panels = figure.subplots(lines, COLUMNS, sharex=True, sharey=True).flat
        for (name, own), axes in zip(lists.items(), panels, strict=False):
            named: list[tuple[float, float]] = []
            for color, chosen in ((GRAY, True), (BLUE, False)):
                drawn = [row for row in own if row["method"].startswith(SKIPPED) == chosen]
                points = sorted((row["cost_share"], row["lpips"]["value"], row["method"]) for row in drawn)
                axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=color, marker="o", markersize=3, lw=0.8)
                for x, y, label in points:
                    if any(abs(x - left) < APART[0] and abs(y - below) < APART[1] for left, below in named):
                        continue  # labels would overlap; the table has all points
                    named.append((x, y))
                    axes.annotate(label, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6, color=color)
            axes.set(title=SWEEPS[name], xlabel="MACs", ylabel="LPIPS to dense")
            axes.tick_params(labelbottom=True)  # shared axes hide labels above other panels
        for axes in [*panels]:  # unused panels
            axes.remove()
        return svg_of(figure)


def main(added: Path | None) -> None:
    if added is not None:
        append_rows(read_rows(added), RESULTS)
    dense, lists = swept(read_rows(RESULTS))
    (FOLDER / "sweeps.svg").write_text(sweeps_svg(lists), encoding="utf-8")
    block = f"{sweeps_table(dense, lists)}\n\n![Distance to dense against MACs, a panel per sweep](observations/sweeps.svg)"
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), {"sweeps": block}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
