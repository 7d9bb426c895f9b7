"""Writes what the pages show: `python -m benchmarks.table`.

The README's tables and picture come from the results file, those of speed as `nextscale bench --table` writes them; the table of planned
work in docs/methods.md is computed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from nextscale.accel import resolve_method
from nextscale.lab.bench.tables import pictured_row, speed_tables, stages_svg, with_tables
from nextscale.lab.evals.frontier import frontier_svg
from nextscale.lab.evals.methods import sparsevar_decisions
from nextscale.lab.results import Row, comparable, judged, read_rows, real_agreement
from nextscale.loading.presets import build_model, model_spec
from nextscale.planning.cost import RequestCost, Workload, request_cost

from .results import RESULTS

PROJECT = Path(__file__).parent.parent
README = PROJECT / "README.md"
METHODS_PAGE = PROJECT / "docs" / "methods.md"
PICTURE = PROJECT / "docs" / "stages.svg"
FRONTIER = PROJECT / "docs" / "frontier.svg"  # of the last model by name, at the largest size that was judged

DECIDED_STAGES, DECIDED_BLOCKS = 13, 8  # of nano at 512 px
ONLY_DECIDED = "rows both"  # a choice that no other list of methods tries


def judged_runs(rows: list[Row]) -> list[list[Row]]:
    """For every model and size that `nextscale quality` judged on a GPU, smallest first, the last row of every method. Only rows under
    the conditions of the newest one of the most prompts count; a list of methods tried on fewer does not change the table."""
    on_gpus = [row for row in judged(rows) if not row["hardware"].startswith("CPU")]
    cases: dict[tuple[str, int, int], list[Row]] = {}
    for row in on_gpus:
        cases.setdefault((row["model"], *row["size"]), []).append(row)
    return [comparable(own, max(reversed(own), key=lambda row: row["images"])) for _, own in sorted(cases.items())]


def quality_table(rows: list[Row]) -> str:
    """Empty where nothing was judged."""
    runs = judged_runs(rows)
    if not runs:
        return ""
    lines = [
        "| image | method | times faster than dense | MACs | tokens | LPIPS to dense | PSNR | style right |"
        " label among first five |"
        " change of the last | Fréchet distance to real |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in (row for run in runs for row in run):
        start = f"| {row['size'][0]}x{row['size'][1]} | {row['method']} |"
        if "error" in row:
            lines.append(f"{start} {row['error']} | | | | | | | | |")
            continue
        cells = (
            f"**{row['speedup']['median']:.2f}** ({row['speedup']['p20']:.2f}–{row['speedup']['p80']:.2f})" if row["speedup"] else "",
            f"{row['cost_share']:.0%}",
            f"{row['kept']:.0%}",
            bounded(row.get("lpips"), "{:.3f}"),
            f"{row['psnr']['value']:.1f} dB" if row.get("psnr") else "",
            bounded(row.get("style"), "{:.0%}"),
            bounded(row.get("label_top5"), "{:.0%}"),
            bounded(row.get("label_top5_change"), "{:+.1%}"),
            bounded(row.get("frechet_real"), "{:.1f}"),
        )
        lines.append(f"{start} {' | '.join(cells)} |")
    first = runs[0][0]
    real = real_agreement(first)
    directions = first.get("frechet_directions")
    along = f" The Fréchet distance is that of EfficientNet-lite0 features along {directions} directions; it is not FID."
    lines.append("")
    lines.append(
        f"`{first['model']}`, {first['images']} held-out prompts, the same seeds with every method; {first['hardware']}, torch"
        f" {first['torch']}, {first['dtype']}, batches of {first['batch']}, {first['engine']}, decoding included; in brackets after the"
        " ratio its 20th–80th percentile, else 95 % bootstrap intervals."
        " Style and label are named by probes on EfficientNet-lite0 features; about real held-out images these are right so often:"
        f" {real or 'not measured'}.{judged_labels(first)}{along if directions else ''}"
        " SparseVAR keeps another number of tokens in every image, and all images of a batch pay for the one that keeps"
        " most: so many together is where it saves least."
    )
    return "\n".join(lines)


def judged_labels(row: Row) -> str:
    """Labels that no training picture has are not among those that the probe knows."""
    return f" Labels are judged on the {row['label']['images']} prompts whose label training pictures have." if "label" in row else ""


def decisions_table(rows: list[Row]) -> str:
    """What SparseVAR's open choices do, from the last run of `nextscale quality --methods sparsevar-decisions` on a GPU."""
    names = list(sparsevar_decisions(DECIDED_STAGES, DECIDED_BLOCKS))
    tried = [row for row in judged(rows) if not row["hardware"].startswith("CPU")]
    last = next(row for row in reversed(tried) if row["method"] == ONLY_DECIDED)
    found = {row["method"]: row for row in comparable(tried, last)}
    lines = [
        "| choice | tokens | LPIPS to dense | Fréchet distance to dense | to real | label among first five |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in ("dense", *names):
        row = found[name]
        cells = (
            f"{row['kept']:.0%}",
            bounded(row.get("lpips"), "{:.3f}"),
            bounded(row.get("frechet_dense"), "{:.1f}"),
            bounded(row.get("frechet_real"), "{:.1f}"),
            bounded(row.get("label_top5"), "{:.0%}"),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    image = f"{last['size'][0]}x{last['size'][1]}"
    lines.append("")
    lines.append(
        f"`{last['model']}`, {last['images']} held-out prompts, {image}, {last['hardware']}; in brackets 95 % bootstrap intervals. Each"
        " choice is changed alone from tau 0.6, block 1, beta 0.9, alpha 4, from stage 10, rows cond; logits and image have thresholds"
        " of their own. Another program used the GPU at the same time, so times were left out."
    )
    return "\n".join(lines)


def bounded(interval: Row | None, form: str) -> str:
    if interval is None:
        return ""
    value, low, high = (form.format(interval[key]) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


PLANNED = {
    "skip the last two stages": "skip:last=2",
    "SparseVAR, 30 % of the cells kept": "sparsevar",
    "FastVAR": "fastvar",
    "StageVAR": "stagevar",
    "StageVAR, guidance off only": "stagevar:alphas=[]",
    "ToMe": "tome",
}
IN_SHORT = {
    "skip the last two stages": "SkipStages: the baseline to beat",
    "SparseVAR, 30 % of the cells kept": "SparseVAR: smooth cells leave the sequence, anchors speak for them (30 % of the cells kept)",
    "FastVAR": "FastVAR: only tokens that stand out run, the rest is restored from an earlier stage",
    "StageVAR": "StageVAR: late stages unguided, at low rank, or skipped",
    "ToMe": "ToMe: alike tokens merged around each branch",
}
PLANNED_MODELS = ("infinity-2b", "hart-0.7b", "star-1024", "var-d30")


@cache
def planned_costs(name: str, method: str) -> tuple[RequestCost, RequestCost]:
    """Of a method at its published settings and of dense generation; guided, one image, 64 tokens of text."""
    spec = model_spec(name)
    with torch.device("meta"):
        model = build_model(spec.model)
    schedule = spec.settings.schedules.choose(None, None)
    workload = Workload(schedule, text_tokens=64 if model.stack[0].has_text else 0)
    plans = resolve_method(method).forecast(model, schedule, kept=0.3)
    return request_cost(model, workload, plans), request_cost(model, workload)


def shares_table() -> str:
    lines = ["| method | MACs of `infinity-2b` at 1024 px, against dense |", "|---|---:|"]
    for title, short in IN_SHORT.items():
        planned, dense = planned_costs("infinity-2b", PLANNED[title])
        lines.append(f"| {short} | {planned.share(dense):.0%} |")
    return "\n".join(lines)


def plans_table() -> str:
    """Shares of dense generation's MACs at the published settings, guided, one image: all, linear layers, attention, keys."""
    lines = [f"| | {' | '.join(PLANNED_MODELS)} |", f"|---|{'---|' * len(PLANNED_MODELS)}"]
    for title, method in PLANNED.items():
        cells = []
        for name in PLANNED_MODELS:
            planned, dense = planned_costs(name, method)
            shares = (planned.linear / dense.linear, planned.attention / dense.attention, planned.held / dense.held)
            cells.append(f"**{planned.share(dense):.0%}** ({', '.join(f'{share:.0%}' for share in shares)})")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append("")
    lines.append(
        "MACs against dense generation, guided, one image of the model's own size: in all (linear layers, attention, keys kept"
        " for later stages). Attention falls faster than the rest, since both queries and keys are fewer."
    )
    return "\n".join(lines)


def with_readme_tables(readme: str, rows: list[Row]) -> str:
    tables = {"shares": shares_table(), **speed_tables(rows)}
    if judged := quality_table(rows):
        tables["quality"] = judged
    return with_tables(readme, tables)


def main() -> None:
    rows = read_rows(RESULTS)
    README.write_text(with_readme_tables(README.read_text(), rows))
    METHODS_PAGE.write_text(with_tables(METHODS_PAGE.read_text(), {"plans": plans_table(), "decisions": decisions_table(rows)}))
    if (row := pictured_row(rows)) is not None:
        PICTURE.write_text(stages_svg(row))
    if runs := judged_runs(rows):
        FRONTIER.write_text(frontier_svg(runs[-1]))


if __name__ == "__main__":
    main()
