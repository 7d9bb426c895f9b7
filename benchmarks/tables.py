"""Writes the tables and pictures of the pages: `python -m benchmarks.tables`.

The tables of README.md, docs/ and research/notes/ come from the results file; planned MACs and memory are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from nextscale.eval.results import DENSE, Row, read_rows
from nextscale.loading.artifacts import encoder_bytes
from nextscale.loading.load import without_weights
from nextscale.loading.presets import MODELS, NANO, build_model, model_spec
from nextscale.methods import resolve_method
from nextscale.planning.cost import RequestCost, Workload, request_cost
from nextscale.planning.memory import request_memory
from nextscale.profiles import Profile
from nextscale_research.quality.lists import sparsevar_decisions
from nextscale_research.quality.rows import CONDITIONS, comparable, judged, real_agreement

from .cells import IMAGE, MACS, METHOD, Column, bounded, faster, table, table_of, with_tables
from .formats_table import format_tables, speed_table
from .load_table import load_table
from .memory_table import memory_table
from .pictures import quality_svg, stage_times_svg
from .results import RESULTS
from .sample_table import sample_table
from .shown_rows import image
from .speed_tables import TABLES, method_speed_table, pictured_row, speed_tables, summary_table

PROJECT = Path(__file__).parent.parent
README = PROJECT / "README.md"
TUNED = PROJECT / "nextscale" / "assets" / "nano" / "nano-512-cuda-batch32.profile.json"
DOCS, NOTES = PROJECT / "docs", PROJECT / "research" / "notes"
SPEED_PAGE = DOCS / "results" / "benchmarks.md"
QUALITY_PAGE = DOCS / "results" / "quality.md"
METHODS_PAGE = DOCS / "methods" / "index.md"
METHOD_PAGES = {name: DOCS / "methods" / f"{name.lower()}.md" for name in ("SparseVAR", "FastVAR", "StageVAR")}
INSTALLATION_PAGE = DOCS / "get-started" / "installation.md"
SERVING_PAGE = DOCS / "guides" / "serve.md"
SAMPLING_PAGE = DOCS / "guides" / "many-images.md"
MEMORY_PAGE = DOCS / "guides" / "memory.md"
FORMATS_NOTE = NOTES / "eight-bit-weights.md"
SPEED_NOTE = NOTES / "speed.md"
QUALITY_NOTE = NOTES / "quality-nano.md"
CHOICES_NOTE = NOTES / "sparsevar-choices.md"
PICTURE = DOCS / "pictures" / "stage-times.svg"
FRONTIER = DOCS / "pictures" / "quality.svg"  # of the last model by name, at the largest size that was judged

NOT_YET = "Not measured at a commit of this history: `python -m benchmarks.suites` adds the rows."
DECIDED_STAGES, DECIDED_BLOCKS = 13, 8  # of nano at 512 px
ONLY_DECIDED = "rows uncond"  # a method that identifies this list
ENOUGH = 500  # prompts
WITHIN = (0.065, 0.1)  # LPIPS to dense of the README's points


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


QUALITY_SUMMARY = (
    DENSE,
    "skip the last stage",
    "skip the last two stages",
    "skip the last three stages",
    "guidance dropped",
    "SparseVAR",
    "SparseVAR, 40% of the cells",
    "FastVAR",
    "StageVAR",
    "auto:lpips=0.065",
    "auto:lpips=0.1",
)


SPEEDUP = Column("speedup", lambda row: f"**{row['speedup']['median']:.2f}**")
FRECHET = Column("Fréchet distance", lambda row: f"{row['frechet_real']['value']:.1f}")


def brief_quality_table(rows: list[Row]) -> str:
    """Returns some methods at the largest size that was judged: speed, likeness, agreement, distance to real images."""
    run = judged_runs(rows)[-1]
    agreement = (
        Column("style correct", lambda row: f"{row['style']['value']:.0%}"),
        Column("label in top 5", lambda row: f"{row['label_top5']['value']:.0%}"),
    )
    found = by_speed(row for row in run if row["method"] in QUALITY_SUMMARY)
    note = f"{image(run[0])} px, {conditions(run[0])} In brackets 95 % intervals."
    return table_of((METHOD, SPEEDUP, MACS, LPIPS, *agreement, FRECHET), found, note)


def by_speed(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["speedup"]["median"])


def measured_tables(rows: list[Row], method: str) -> dict[str, str]:
    """Returns the tables of a method's own page; plain skipping is beside it."""
    found = by_speed(row for row in judged_runs(rows)[-1] if row["method"].startswith((method, "skip the last")))
    distance = Column("LPIPS to dense", lambda row: f"{row['lpips']['value']:.3f}")
    quality = table_of(
        (METHOD, SPEEDUP, MACS, distance, FRECHET),
        found,
        f"`nano` at {image(found[0])} px, NVIDIA H200; conditions and intervals: [Quality](../results/quality.md).",
    )
    return {"method-speed": method_speed_table(rows, method), "method-quality": quality}


SMALLER = (NANO.name, "var-d16", "var-d20", "var-d24", "flexvar-d16", "flexvar-d20", "star-256-d16")  # than others of their family


@cache
def models_table() -> str:
    """Returns the memory that the published models need, as `nextscale plan` predicts it."""
    lines = []
    for spec in MODELS.values():
        if spec.weights is None or spec.name in SMALLER:
            continue
        model, tokenizer = without_weights(spec, torch.bfloat16, None, None)
        workload = Workload(spec.settings.schedules.choose(None, None), text_tokens=64 if model.stack[0].has_text else 0)
        peak, encoder = request_memory(model, tokenizer, workload), encoder_bytes(spec)
        height, width = (side * tokenizer.pixels_per_token for side in workload.schedule.grid)
        sizes = [f"{size / 2**30:.1f} GiB" if size else "" for size in (peak.weights, encoder, peak.peak + encoder)]
        lines.append([f"`{spec.name}`", f"{width}x{height}", *sizes])
    note = "Predicted by `nextscale plan` for one guided image, bfloat16, dense. `--offload-text` takes the text encoder out of the peak."
    return table(["model", "image", "weights", "text encoder", "peak GPU memory"], "llrrr", lines, note)


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
    skipped = {"skip the last stage": 0, "skip the last two stages": 1}
    shown = taken | {name: profile.skipping[number] for name, number in skipped.items() if number < len(profile.skipping)}
    lines = [["dense", "1.00", "100%", "", ""]]
    for name, point in sorted(shown.items(), key=lambda item: item[1].speedup.value):
        lines.append([name, f"{point.speedup.value:.2f}", f"{point.macs:.0%}", f"{point.lpips.value:.3f}", f"{point.psnr:.1f} dB"])
    heads = [f"`{profile.model}`, {width}x{height} px", "speedup", "MACs", "LPIPS to dense", "PSNR"]
    note = (
        f"{profile.tested} prompts that the search has not seen, the same seeds with every method; {profile.hardware},"
        f" torch {profile.torch}, {profile.dtype}, batches of {profile.batch}, captured graphs, decoding included."
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
    "SparseVAR, keep=0.25": "sparsevar:keep=0.25",
    "FastVAR": "fastvar",
    "StageVAR": "stagevar",
    "StageVAR, guidance off only": "stagevar:alphas=[]",
    "ToMe": "tome",
}
PLANNED_MODELS = ("infinity-2b", "hart-0.7b", "star-1024", "var-d30")
ON_PAGE = ("dense", "growth", "throughput")  # tables of speed; the note has the others
PLANNED_INSTEAD = {("var-d30", "stagevar"): "stagevar:ranks=0.177"}  # no ranks of it are published


@cache
def planned_costs(name: str, method: str) -> tuple[RequestCost, RequestCost]:
    """Returns the costs of a method at its published settings and of dense generation, for one image with CFG and 64 text tokens."""
    spec = model_spec(name)
    with torch.device("meta"):
        model = build_model(spec.model)
    schedule = spec.settings.schedules.choose(None, None)
    workload = Workload(schedule, text_tokens=64 if model.stack[0].has_text else 0)
    plans = resolve_method(method).forecast(model, schedule)
    return request_cost(model, workload, plans), request_cost(model, workload)


def plans_table() -> str:
    """Returns shares of dense generation's MACs at the published settings, guided, one image."""
    lines = []
    for title, method in PLANNED.items():
        cells = []
        for name in PLANNED_MODELS:
            planned, dense = planned_costs(name, PLANNED_INSTEAD.get((name, method), method))
            cells.append(f"{planned.share(dense):.0%}")
        lines.append([title, *cells])
    note = (
        "Planned MACs, relative to dense generation: guided, one image of the model's own size. var-d30 has no published ranks; the table"
        " assumes 17.7 % of the rows for StageVAR, as at Infinity's 40x40 stage."
    )
    return table(["", *PLANNED_MODELS], "l" + "r" * len(PLANNED_MODELS), lines, note)


def page_tables(rows: list[Row]) -> dict[Path, dict[str, str]]:
    """Returns the tables of every page, under the names of their places."""
    speed = dict.fromkeys(TABLES, NOT_YET) | speed_tables(rows)
    return {
        README: {"speed": summary_table(rows), "quality": tuned_summary(Profile.load(TUNED))},
        INSTALLATION_PAGE: {"models": models_table()},
        SPEED_PAGE: {name: speed[name] for name in ON_PAGE},
        SPEED_NOTE: {name: speed[name] for name in TABLES if name not in ON_PAGE},
        QUALITY_PAGE: {"brief-quality": brief_quality_table(rows)},
        QUALITY_NOTE: {"quality": quality_table(rows)},
        METHODS_PAGE: {"plans": plans_table()},
        **{page: measured_tables(rows, method) for method, page in METHOD_PAGES.items()},
        CHOICES_NOTE: {"decisions": decisions_table(rows)},
        SERVING_PAGE: {"load": load_table(rows)},
        SAMPLING_PAGE: {"sample": sample_table(rows)},
        MEMORY_PAGE: {"memory": memory_table(rows), "format-speed": speed_table(rows)},
        FORMATS_NOTE: format_tables(rows),
    }


def main() -> None:
    rows = read_rows(RESULTS)
    for page, tables in page_tables(rows).items():
        page.write_text(with_tables(page.read_text(), tables))
    if (row := pictured_row(rows)) is not None:
        PICTURE.write_text(stage_times_svg(row))
    if runs := judged_runs(rows):
        FRONTIER.write_text(quality_svg(runs[-1]))


if __name__ == "__main__":
    main()
