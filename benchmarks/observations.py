"""Fills research/notes/observations.md: `python -m benchmarks.observations [RUN]`, where RUN is a folder of `nextscale_research observe`.

Without RUN the figures and tables are drawn again from the stored numbers.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from nextscale.io import write_image
from nextscale_research.observe import Observations, read_observations, verdicts
from nextscale_research.observe.numbers import Curve
from nextscale_research.observe.plots import figures
from nextscale_research.observe.verdicts import distances, late_mean, late_stages, shares_of

from . import cells
from .cells import with_tables
from .tables import PROJECT

PAGE = PROJECT / "research" / "notes" / "observations.md"
FOLDER = PROJECT / "research" / "notes" / "observations"
NUMBERS = FOLDER / "observations.json"
NOT_YET = "Not measured yet."
CAPTIONS = {
    "frequency": "What each stage changes",
    "blocks": "Where each block acts",
    "prompt": "Influence of the prompt from a stage on",
    "rank": "Directions of the features",
}
SHEETS = {"frequency": "stages", "blocks": "blocks", "prompt": "prompts"}
HOLDS = {True: "holds", False: "**does not hold**", None: "not measured"}


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None or value != value else f"{value:.{digits}f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with right-aligned columns."""
    return cells.table(heads, "r" * len(heads), rows)


def stage_name(sizes: Sequence[Sequence[int]], stage: int) -> str:
    """Returns the number of a stage and its grid size."""
    height, width = sizes[stage]
    return f"{stage} ({height}x{width})"


def about_block(found: Observations) -> str:
    about = found.about
    compared = "LPIPS" if about["lpips"] else "pixels"
    return (
        f"`{about['model']}`, {about['images']} images of {about['size'][0]}x{about['size'][1]} from {about['prompts']} prompts, seeds from"
        f" {about['seed']}; {about['device']}, torch {about['torch']}, {about['dtype']}; images compared by {compared}."
    )


def frequency_table(found: Observations) -> str:
    numbers = found.frequency
    rows = [
        (
            stage_name(found.stages, stage),
            number(numbers.smooth.mean[stage], 1),
            number(numbers.detailed.mean[stage], 1),
            number(numbers.correlation.mean[stage]),
            number(numbers.foreseen.mean[stage]),
        )
        for stage in range(1, len(found.stages))
    ]
    return table(("stage", "smooth quarter", "detailed quarter", "correlation with detail", "with detail before the stage"), rows)


def blocks_table(found: Observations) -> str:
    late = late_stages(len(found.stages))

    def late_value(curve: Curve) -> str:
        return number(late_mean(curve, late))

    curves = zip(found.blocks.correlation, found.blocks.foresight, found.blocks.distance, found.blocks.strength, strict=True)
    rows = [(str(block), *(late_value(curve) for curve in several)) for block, several in enumerate(curves)]
    return table(("block", "change, detail", "earlier change, change of the image", "distance from mean, detail", "strength"), rows)


def prompt_table(found: Observations) -> str:
    effects = found.prompt.effects
    rows = [
        (
            stage_name(found.stages, stage),
            *(f"{number(distances(e)[0].mean[place], 3)} ({number(e.rms.mean[place], 1)})" for e in effects.values()),
        )
        for place, stage in enumerate(found.prompt.switches)
    ]
    unit = distances(effects["seed"])[1]
    return table(("from stage", *(f"{name}, {unit} (levels)" for name in effects)), rows)


def rank_table(found: Observations) -> str:
    numbers = found.rank
    rows = []
    for stage in range(len(found.stages)):
        shares = [mean_of_blocks([shares_of(curve, numbers.full) for curve in curves], stage) for curves in numbers.ranks]
        rows.append((stage_name(found.stages, stage), str(numbers.full[stage]), *(f"{share:.0%}" for share in shares)))
    return table(("stage", "possible", *(f"for {alpha:.0%}" for alpha in numbers.alphas)), rows)


def mean_of_blocks(curves: Sequence[Curve], stage: int) -> float:
    """Returns the mean of one stage over several curves."""
    return sum(late_mean(curve, range(stage, stage + 1)) for curve in curves) / len(curves)


TABLES = {"frequency": frequency_table, "blocks": blocks_table, "prompt": prompt_table, "rank": rank_table}


def blocks_of_page(found: Observations | None, folder: Path = FOLDER) -> dict[str, str]:
    if found is None:
        return {f"observe-{name}": NOT_YET for name in ("about", *TABLES)}
    texts = {"observe-about": about_block(found)}
    for topic, make_table in TABLES.items():
        claims = "\n".join(
            f"- {verdict.claim}: {HOLDS[verdict.holds]}. {verdict.text}." for verdict in verdicts(found) if verdict.topic == topic
        )
        pictures = [f"![{CAPTIONS[topic]}]({folder.name}/{topic}.svg)"]
        if topic in SHEETS and (folder / f"{SHEETS[topic]}.webp").exists():
            pictures.append(f"![{CAPTIONS[topic]}, examples]({folder.name}/{SHEETS[topic]}.webp)")
        texts[f"observe-{topic}"] = "\n\n".join([claims, *pictures, make_table(found)])
    return texts


def take_over(run: Path) -> None:
    """Copies numbers and sheets of a run to the folder of the page."""
    FOLDER.mkdir(exist_ok=True)
    shutil.copyfile(run / NUMBERS.name, NUMBERS)
    for name in SHEETS.values():
        with Image.open(run / f"{name}.png") as sheet:
            write_image(sheet.convert("RGB"), FOLDER / f"{name}.webp")  # a tenth of the size


def main(*run: str) -> None:
    for folder in run:
        take_over(Path(folder))
    found = read_observations(NUMBERS)
    for name, figure in figures(found).items():
        (FOLDER / f"{name}.svg").write_text(figure)
    PAGE.write_text(with_tables(PAGE.read_text(), blocks_of_page(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
