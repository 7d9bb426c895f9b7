"""Fills the last part of research/notes/observations.md: `python -m benchmarks.details RUN` (a folder of `observe --details`)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from nextscale.io import write_image
from nextscale_research.observe.command import DETAIL_SHEETS, DETAILS
from nextscale_research.observe.detail_plots import DETAIL_FIGURES, TITLES

from .cells import with_tables
from .observations import FOLDER, PAGE, number, stage_name, table

CAPTIONS = {
    "distances": "Distance of every stage's image to the final one",
    "spectra": "Spectra after each stage and with each method",
    "attention": "Where attention goes",
    "logits": "Similarity of neighboring logits",
    "changes": "Blocks and the cells that they changed before",
    "projection": "StageVAR with other random projections",
}


def about(found: dict[str, Any]) -> str:
    given = found["about"]
    return (
        f"`{given['model']}`, {given['images']} images of {given['size'][0]}x{given['size'][1]}, seeds from {given['seed']};"
        f" {given['device']}, torch {given['torch']}, {given['dtype']}."
    )


def stages_table(found: dict[str, Any]) -> str:
    """Returns a table with one row per stage: distances, power of the finest band, attention to itself, similarity of logits, stability."""
    measures = list(found["distances"])
    others = ["power, finest band", "attention to itself", "logits: cosine", "with detail", "changes as before"]
    more = later_columns(found)
    rows = []
    for stage in range(len(found["stages"])):
        stable = [curve["mean"][stage] for curve in found["change_stability"] if curve["mean"][stage] is not None]
        rows.append(
            [
                stage_name(found["stages"], stage),
                *(number(found["distances"][one]["mean"][stage], 3) for one in measures),
                number(found["stage_power"][stage][-1]),
                number(found["attention"][stage][stage]),
                number(found["similarity"]["mean"][stage]),
                number(found["similarity_detail"]["mean"][stage]),
                number(sum(stable) / len(stable) if stable else None),
                *(number(values[stage]) for values in more.values()),
            ]
        )
    return table(["stage", *(TITLES[one] for one in measures), *others, *more], rows)


def later_columns(found: dict[str, Any]) -> dict[str, list[float | None]]:
    """Returns what runs before attention was measured by place, or without CLIP, do not have."""
    columns: dict[str, list[float | None]] = {}
    if "attention_near" in found:
        for name, matrix in (("", found["attention_near"]), (" if even", found["attention_chance"])):
            columns[f"attention nearby{name}"] = [row[stage] for stage, row in enumerate(matrix)]
            columns[f"same place, stage before{name}"] = [row[stage - 1] if stage else None for stage, row in enumerate(matrix)]
    if found.get("text_score"):
        columns["CLIP, image and prompt"] = found["text_score"]["mean"]
    return columns


def methods_table(found: dict[str, Any]) -> str:
    periods = [f"> {1 / found['edges'][0]:.0f}", *(f"up to {1 / edge:.0f}" for edge in found["edges"])]
    return table(["power at periods of", *periods], [[method, *map(number, power)] for method, power in found["method_power"].items()])


def sentences(found: dict[str, Any]) -> str:
    lines = []
    for measure, stage in found["boundaries"].items():
        where = "no stage before the last" if stage is None else f"stage {stage_name(found['stages'], stage)}"
        lines.append(f"- {TITLES[measure]}: the first stage that leaves at most a tenth of the first distance is {where}.")
    if (projection := found["projection"]) is not None:
        for measure, between in projection["between"].items():
            values = projection["to_dense"][measure]["mean"]
            lines.append(
                f"- StageVAR, {projection['seeds']} random projections: {TITLES[measure]} to dense {min(values):.3f} to {max(values):.3f},"
                f" between projections {between:.3f}; a pixel deviates by {projection['deviation']:.1f} of 255 levels."
            )
    return "\n".join(lines)


def block_of(found: dict[str, Any]) -> str:
    without = () if found["projection"] is not None else ("projection", "projections")
    pictures = [f"![{CAPTIONS[one]}](observations/{one}.svg)" for one in DETAIL_FIGURES if one not in without]
    pictures += [
        f"![{one.capitalize()} of the first image](observations/details-{one}.webp)" for one in DETAIL_SHEETS if one not in without
    ]
    return "\n\n".join([about(found), sentences(found), stages_table(found), methods_table(found), *pictures])


def main(run: Path) -> None:
    found = json.loads((run / DETAILS).read_text(encoding="utf-8"))
    shutil.copyfile(run / DETAILS, FOLDER / DETAILS)
    for figure in (run / f"{one}.svg" for one in DETAIL_FIGURES):
        if figure.exists():
            shutil.copyfile(figure, FOLDER / figure.name)
    for picture in (run / f"{one}.png" for one in DETAIL_SHEETS):
        if picture.exists():
            with Image.open(picture) as sheet:
                write_image(sheet.convert("RGB"), FOLDER / f"details-{picture.stem}.webp")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), {"observe-details": block_of(found)}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
