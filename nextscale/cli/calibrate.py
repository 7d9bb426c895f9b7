"""`nextscale calibrate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SettingError
from .files import require_writable
from .options import Force, ImageOptions, ModelOptions, PromptOptions, option, out_option
from .parse import choose_schedule, parse_numbers, parse_prompt
from .show import image_bar, show_next

DEFAULTS = {"alphas": "0.9+0.95+0.96+0.97+0.98+0.99+0.999", "sizes": "", "centered": "false"}


def calibrate(
    *,
    method: Annotated[str, typer.Argument(metavar="METHOD", show_default=False, help="stagevar.")],
    prompts: PromptOptions,
    model: ModelOptions,
    image: ImageOptions,
    settings: Annotated[
        list[str] | None,
        option("--set", "KEY=VALUE", "alphas=0.9+0.95 (energy), sizes=256+512, centered=true (alphas as in published tables)."),
    ] = None,
    out: Annotated[Path | None, out_option("FILE", "The .json file to write.", "beside the weights")] = None,
    force: Force = False,
) -> None:
    """Measure StageVAR's ranks of late stages on images of a model. A few dozen prompts suffice."""
    from ..eval.calibrate_ranks import measure_table
    from ..loading.artifacts import find
    from ..methods.stagevar_ranks import rank_file, write_rank_table

    if method != "stagevar":
        moved = f" Run python -m nextscale_research calibrate-{method}." if method in ("skipvar", "scalekv") else ""
        raise SettingError(f"METHOD must be stagevar; got {method!r}.{moved}")
    spec, chosen = model.spec, read_settings(settings or ())
    given = [parse_prompt(text, spec) for text in prompts.read() for _ in range(image.num_images)]
    alphas = fractions(chosen["alphas"])
    if chosen["centered"] not in ("true", "false"):
        raise SettingError(f"--set centered must be true or false; got {chosen['centered']!r}.")
    centered = chosen["centered"] == "true"
    sizes = chosen["sizes"].split("+") if chosen["sizes"] else [image.size]
    schedules = [choose_schedule(spec.settings.schedules, size, image.aspect) for size in sizes]
    file = out or rank_file(find(model.weights, spec.weights, f"weights of {spec.name}"))
    if file.suffix != ".json":
        raise SettingError(f"--out must end in .json; got {file}.")
    require_writable([file], force)
    with image_bar() as progress:
        task = progress.add_task("measuring", total=len(schedules) * len(given))
        table = measure_table(model.load(), given, schedules, alphas, image.seed, lambda: progress.advance(task), centered)
    about = {
        "model": spec.name,
        "centered": centered,
        "images": len(given),
        "seed": image.seed,
        "schedules": [str(schedule) for schedule in schedules],
    }
    write_rank_table(replace(table, about=about), file)
    for row in table.rows:
        measured = ", ".join(f"{ratio:.3g} ± {spread:.2g}" for ratio, spread in zip(row.ratios, row.deviations or (), strict=True))
        typer.echo(f"alpha {row.alpha:<5} {row.cells:>5} cells: {measured}")
    typer.echo(f"wrote {file}")
    show_next(f"nextscale compare -m {spec.name} --method stagevar  # reads the table if it is beside the weights")


def read_settings(words: Sequence[str]) -> dict[str, str]:
    pairs = dict(word.partition("=")[::2] for word in words)
    if unknown := pairs.keys() - DEFAULTS.keys():
        raise SettingError(f"--set must name {' or '.join(DEFAULTS)}; got {', '.join(sorted(unknown))}.")
    return DEFAULTS | pairs


def fractions(text: str) -> list[float]:
    """Returns numbers above 0 and at most 1, joined by +."""
    values = parse_numbers(text.replace("+", ","))
    if not values or not all(0 < value <= 1 for value in values):
        raise SettingError(f"--set alphas must be above 0 and at most 1; got {text!r}.")
    return values
