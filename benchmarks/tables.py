"""Writes the tables and pictures of the pages: `python -m benchmarks.tables`.

The tables of README.md and docs/ come from the results file; the table of planned MACs in docs/methods/index.md is computed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from nextscale.eval.results import DENSE, Row, read_rows
from nextscale.loading.presets import build_model, model_spec
from nextscale.methods import resolve_method
from nextscale.planning.cost import RequestCost, Workload, request_cost
from nextscale.profiles import Profile
from nextscale_research.quality.frontier import frontier_svg
from nextscale_research.quality.lists import sparsevar_decisions
from nextscale_research.quality.rows import CONDITIONS, comparable, judged, real_agreement

from .cells import IMAGE, MACS, METHOD, Column, bounded, faster, table, table_of, with_tables
from .formats_table import format_tables
from .load_table import load_table
from .memory_table import memory_table
from .results import RESULTS
from .sample_table import sample_table
from .shown_rows import image
from .speed_tables import TABLES, pictured_row, speed_tables, stages_svg, summary_table

PROJECT = Path(__file__).parent.parent
README = PROJECT / "README.md"
TUNED = PROJECT / "nextscale" / "assets" / "nano" / "nano-512-cuda-batch32.profile.json"
SPEED_PAGE = PROJECT / "docs" / "results" / "benchmarks.md"
QUALITY_PAGE = PROJECT / "docs" / "results" / "quality.md"
METHODS_PAGE = PROJECT / "docs" / "methods" / "index.md"
SERVING_PAGE = PROJECT / "docs" / "guides" / "serve.md"
SAMPLING_PAGE = PROJECT / "docs" / "guides" / "many-images.md"
MEMORY_PAGE = PROJECT / "docs" / "guides" / "memory.md"
FORMATS_PAGE = PROJECT / "research" / "notes" / "eight-bit-weights.md"
PICTURE = PROJECT / "docs" / "pictures" / "stages.svg"
FRONTIER = PROJECT / "docs" / "pictures" / "frontier.svg"  # of the last model by name, at its largest size

NOT_YET = "Not measured at a commit of this history: `python -m benchmarks.suites` adds the rows."
DECIDED_STAGES, DECIDED_BLOCKS = 13, 8  # of nano at 512 px
ONLY_DECIDED = "rows uncond"  # a method that identifies this list
ENOUGH = 500  # prompts
WITHIN = (0.035, 0.065, 0.1, 0.15)  # LPIPS to dense of the README's rows


def within(head: str, name: str, form: str) -> Column:
    """Returns a column with a measure and its interval; empty without one."""
    return Column(head, lambda row: bounded(row.get(name), form))


TOKENS = Column("tokens", lambda row: f"{row['kept']:.0%}")
LPIPS = within("LPIPS to dense", "lpips", "{:.3f}")
PSNR = Column("PSNR", lambda row: f"{row['psnr']['value']:.1f} dB" if row.get("psnr") else "")


def judged_runs(rows: list[Row]) -> list[list[Row]]:
    """Returns the last row of every method, for every model and size that `nextscale_research quality` judged on a GPU, smallest first.

    Rows must have the conditions of the newest row with enough prompts, or with the most prompts. If some rows were captured, rows of
    commits without captures are dropped, and sizes without captures too, because the time of eager batches depends on the host.
    """
    on_gpus = [row for row in judged(rows) if not row["hardware"].startswith("CPU") and row.get("quantize") is None]
    cases: dict[tuple[str, int, int], list[Row]] = {}
    for row in on_gpus:
        cases.setdefault((row["model"], *row["size"]), []).append(row)
    runs = {(model, *size): newest(own) for (model, *size), own in sorted(cases.items())}
    captured = {model for (model, *_), run in runs.items() if is_captured(run)}
    return [run for (model, *_), run in runs.items() if model not in captured or is_captured(run)]


def is_captured(rows: list[Row]) -> bool:
    return any("graphs" in (row["engine"] or "") for row in rows)


def newest(rows: list[Row]) -> list[Row]:
    """Returns comparable rows of one model and size."""
    last = max(reversed(rows), key=lambda row: min(row["images"], ENOUGH))
    alike = [row for row in rows if all(row[name] == last[name] for name in CONDITIONS)]
    captured = {row["commit"] for row in alike if "graphs" in (row["engine"] or "")}
    return comparable([row for row in alike if row["commit"] in captured] or alike, last)


def quality_table(rows: list[Row]) -> str:
    """Returns the quality table, or an empty string without rows."""
    runs = judged_runs(rows)
    if not runs:
        return ""
    columns = (
        IMAGE,
        METHOD,
        Column("speedup", lambda row: faster(row, "speedup")),
        MACS,
        TOKENS,
        LPIPS,
        PSNR,
        within("style correct", "style", "{:.0%}"),
        within("label in top 5", "label_top5", "{:.0%}"),
        within("change of the last", "label_top5_change", "{:+.1%}"),
        within("Fréchet distance to real", "frechet_real", "{:.1f}"),
    )
    first = runs[0][0]
    real = real_agreement(first)
    directions = first.get("frechet_directions")
    along = f" The Fréchet distance uses EfficientNet-lite0 features along {directions} directions; it is not FID."
    note = (
        f"{conditions(first)} Brackets: 20th to 80th percentile of the speedup, otherwise 95 % bootstrap intervals. Style and label are"
        f" recognized by probes on EfficientNet-lite0 features; accuracy of the probes on real held-out images: {real or 'not measured'}."
        f"{judged_labels(first)}{along if directions else ''}{padded(first)}"
    )
    return table_of(columns, (row for run in runs for row in run), note)


def padded(row: Row) -> str:
    """Returns a remark on padding for rows that were measured before tokens of a batch were packed."""
    if "padding" in row:
        return ""
    return (
        " SparseVAR keeps a different number of tokens in every image, and here all images of a batch were padded to the largest number,"
        f" so batches of {row['batch']} show its smallest savings."
    )


def conditions(row: Row) -> str:
    """Returns the conditions of a measurement as a sentence."""
    engine = "CUDA graphs" if row["engine"] == "graphs" else row["engine"]
    return (
        f"`{row['model']}`, {row['images']} held-out prompts, the same seeds with every method; {row['hardware']}, torch {row['torch']},"
        f" {row['dtype']}, batches of {row['batch']}, {engine}, including decoding."
    )


def tuned_summary(profile: Profile) -> str:
    """Returns a table of the methods that `auto` selects and of skipping stages, by speed."""
    height, width = profile.size
    taken = {f"auto:lpips={within:g}": profile.fastest(lpips=within) for within in WITHIN}
    skipped = {"skip the last stage": 0, "skip the last two stages": 1, "skip the last three stages": 2}
    shown = taken | {name: profile.skipping[number] for name, number in skipped.items() if number < len(profile.skipping)}
    lines = [["dense", "1.00", "100%", "", ""]]
    for name, point in sorted(shown.items(), key=lambda item: item[1].speedup.value):
        lines.append([name, f"{point.speedup.value:.2f}", f"{point.macs:.0%}", f"{point.lpips.value:.3f}", f"{point.psnr:.1f} dB"])
    heads = [f"`{profile.model}`, {height}x{width} px", "speedup", "MACs", "LPIPS to dense", "PSNR"]
    note = (
        f"{profile.tested} held-out prompts that the search has not used, the same seeds with every method; {profile.hardware},"
        f" torch {profile.torch}, {profile.dtype}, batches of {profile.batch}, CUDA graphs, including decoding."
    )
    return table(heads, "lrrrr", lines, note)


def judged_labels(row: Row) -> str:
    """Returns a remark on labels that the probe cannot recognize because they are not in its training data."""
    return f" Labels are judged on the {row['label']['images']} prompts whose label is in the training data." if "label" in row else ""


AS_RELEASED = ("rows both", "rows uncond", "resize nearest", "left out: zero", "4 nearest anchors", "anchors at the edges")
"""Choices of a third-party program, measured when each had its own setting."""


def decisions_table(rows: list[Row]) -> str:
    """Returns a table of SparseVAR's open choices, from the last run of `nextscale_research quality` on a GPU."""
    names = [*sparsevar_decisions(DECIDED_STAGES, DECIDED_BLOCKS), *AS_RELEASED]
    tried = [row for row in judged(rows) if not row["hardware"].startswith("CPU")]
    last = next(row for row in reversed(tried) if row["method"] == ONLY_DECIDED)
    found = {row["method"]: row for row in comparable(tried, last)}
    columns = (
        Column("choice", METHOD.cell, "l", config=True),
        Column("speedup", lambda row: f"{row['speedup']['median']:.2f}"),
        TOKENS,
        LPIPS,
        PSNR,
        within("Fréchet distance to dense", "frechet_dense", "{:.1f}"),
        within("to real", "frechet_real", "{:.1f}"),
    )
    note = (
        f"`{last['model']}`, {last['images']} held-out prompts, {image(last)}, batch {last['batch']}, CUDA graphs, {last['hardware']}; 95 %"
        " bootstrap intervals in brackets. Each row changes one choice of the default (block 6 of 0 to 7, conditional rows, alpha 4,"
        " beta 0.9, bilinear maps that are kept for skipped cells, all anchors compared) at a budget of 40 % for the last three stages,"
        " so that all rows run the same number of cells besides anchors."
    )
    return table_of(columns, [found[name] for name in (DENSE, *names)], note)


PLANNED = {
    "skip the last two stages": "skip:last=2",
    "SparseVAR, 30 % of the cells kept": "sparsevar",
    "FastVAR": "fastvar",
    "StageVAR": "stagevar",
    "StageVAR, guidance off only": "stagevar:alphas=[]",
    "ToMe": "tome",
}
PLANNED_MODELS = ("infinity-2b", "hart-0.7b", "star-1024", "var-d30")
PLANNED_INSTEAD = {("var-d30", "stagevar"): "stagevar:ranks=0.177"}  # it has no published ranks


@cache
def planned_costs(name: str, method: str) -> tuple[RequestCost, RequestCost]:
    """Returns the costs of a method at its published settings and of dense generation, for one image with CFG and 64 text tokens."""
    spec = model_spec(name)
    with torch.device("meta"):
        model = build_model(spec.model)
    schedule = spec.settings.schedules.choose(None, None)
    workload = Workload(schedule, text_tokens=64 if model.stack[0].has_text else 0)
    plans = resolve_method(method).forecast(model, schedule, kept=0.3)
    return request_cost(model, workload, plans), request_cost(model, workload)


def plans_table() -> str:
    """Returns a table of MACs relative to dense generation at the published settings: total, linear layers, attention, keys."""
    lines = []
    for title, method in PLANNED.items():
        cells = []
        for name in PLANNED_MODELS:
            planned, dense = planned_costs(name, PLANNED_INSTEAD.get((name, method), method))
            shares = (planned.linear / dense.linear, planned.attention / dense.attention, planned.held / dense.held)
            cells.append(f"**{planned.share(dense):.0%}** ({', '.join(f'{share:.0%}' for share in shares)})")
        lines.append([title, *cells])
    note = (
        "MACs relative to dense generation, for one image of the model's default size with CFG: total (linear layers, attention, keys kept"
        " for later stages). Attention shrinks faster than the rest, because both queries and keys are reduced. var-d30 has no published"
        " ranks, so StageVAR runs 17.7 % of the rows there, as at Infinity's 40x40 stage."
    )
    return table(["", *PLANNED_MODELS], "l" * (1 + len(PLANNED_MODELS)), lines, note)


def page_tables(rows: list[Row]) -> dict[Path, dict[str, str]]:
    """Returns the tables of each page, by the names of their places."""
    return {
        README: {"speed": summary_table(rows), "quality": tuned_summary(Profile.load(TUNED))},
        SPEED_PAGE: dict.fromkeys(TABLES, NOT_YET) | speed_tables(rows),
        QUALITY_PAGE: {"quality": quality_table(rows)},
        METHODS_PAGE: {"plans": plans_table(), "decisions": decisions_table(rows)},
        SERVING_PAGE: {"load": load_table(rows)},
        SAMPLING_PAGE: {"sample": sample_table(rows)},
        MEMORY_PAGE: {"memory": memory_table(rows)},
        FORMATS_PAGE: format_tables(rows),
    }


def main() -> None:
    rows = read_rows(RESULTS)
    for page, tables in page_tables(rows).items():
        page.write_text(with_tables(page.read_text(), tables))
    if (row := pictured_row(rows)) is not None:
        PICTURE.write_text(stages_svg(row))
    if runs := judged_runs(rows):
        FRONTIER.write_text(frontier_svg(runs[-1]))


if __name__ == "__main__":
    main()
