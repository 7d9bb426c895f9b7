"""`nextscale calibrate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingError
from .files import require_writable
from .options import Batch, Force, ImageOptions, ModelOptions, PromptOptions, option, out_option
from .parse import choose_schedule, parse_numbers, parse_prompt
from .show import share_bar, show_next

if TYPE_CHECKING:
    from ..eval.results import Row
    from ..stage import Schedule

DEFAULTS = {
    "stagevar": {"alphas": "0.9+0.95+0.96+0.97+0.98+0.99+0.999", "sizes": ""},
    "scalekv": {"share": "0.1"},
}
"""Values of --set."""


def calibrate(
    *,
    method: Annotated[str, typer.Argument(metavar="METHOD", show_default=False, help="stagevar or scalekv.")],
    prompts: PromptOptions,
    model: ModelOptions,
    image: ImageOptions,
    batch: Batch = 4,
    settings: Annotated[
        list[str] | None,
        option("--set", "KEY=VALUE", "stagevar: alphas=0.9+0.95 (energy), sizes=256+512; scalekv: share=0.1 (of keys)."),
    ] = None,
    out: Annotated[Path | None, out_option("FILE", "The .json file to write.", "stagevar: beside the weights; METHOD.json")] = None,
    force: Force = False,
) -> None:
    """Measure model-specific constants of a method on generated images.

    stagevar: ranks of late stages; scalekv: the layers that keep most keys. A few dozen prompts suffice.
    """
    if method not in DEFAULTS:
        hint = " Run python -m nextscale_research calibrate-skipvar." if method == "skipvar" else ""
        raise SettingError(f"METHOD must be {' or '.join(DEFAULTS)}; got {method!r}.{hint}")
    spec, chosen = model.spec, dict(word.partition("=")[::2] for word in settings or ())
    if unknown := chosen.keys() - DEFAULTS[method].keys():
        raise SettingError(f"--set must name {' or '.join(DEFAULTS[method])} for {method}; got {', '.join(sorted(unknown))}.")
    chosen = DEFAULTS[method] | chosen
    given = [parse_prompt(text, spec) for text in prompts.read() for _ in range(image.num_images)]
    about = {"model": spec.name, "images": len(given), "seed": image.seed}
    if method == "stagevar":
        sizes = chosen["sizes"].split("+") if chosen["sizes"] else [image.size]
        schedules = [choose_schedule(spec.settings.schedules, size, image.aspect) for size in sizes]
        calibrate_stagevar(model, given, schedules, read_fractions(chosen, "alphas"), out, force, about)
    else:
        (share,) = read_fractions(chosen, "share", 1)
        calibrate_scalekv(model, given, image.schedule(spec), share, batch, out, force, about)


def read_fractions(settings: Mapping[str, str], name: str, most: int = 99) -> list[float]:
    """Returns the numbers of a setting, at most `most` of them, above 0 and at most 1, joined by +."""
    values = parse_numbers(settings[name].replace("+", ","))
    if not 0 < len(values) <= most or not all(0 < value <= 1 for value in values):
        raise SettingError(f"--set {name} must be above 0 and at most 1; got {settings[name]!r}.")
    return values


def calibrate_stagevar(
    model: ModelOptions,
    prompts: Sequence[Any],
    schedules: Sequence[Schedule],
    alphas: Sequence[float],
    out: Path | None,
    force: bool,
    about: Row,
) -> None:
    from ..eval.calibrate_ranks import measure_table
    from ..loading.load import find
    from ..methods.stagevar_ranks import rank_file, write_rank_table

    file = out or rank_file(find(model.weights, model.spec.weights, f"weights of {model.spec.name}"))
    if file.suffix != ".json":
        raise SettingError(f"--out must end in .json; got {file}.")
    require_writable([file], force)
    with share_bar() as progress:
        task = progress.add_task("measuring", total=len(schedules) * len(prompts))
        table = measure_table(model.load(), prompts, schedules, alphas, about["seed"], lambda: progress.advance(task))
    write_rank_table(replace(table, about=about | {"schedules": [str(schedule) for schedule in schedules]}), file)
    for row in table.rows:
        typer.echo(f"alpha {row.alpha:<5} {row.cells:>5} cells: {', '.join(f'{ratio:.3g}' for ratio in row.ratios)}")
    typer.echo(f"wrote {file}")
    show_next(f"nextscale compare -m {model.model} --method stagevar  # reads the table if it is beside the weights")


def calibrate_scalekv(
    model: ModelOptions, prompts: Sequence[Any], schedule: Schedule, share: float, batch: int, out: Path | None, force: bool, about: Row
) -> None:
    from ..eval.calibrate_scalekv import measure_roles
    from ..io import write_text
    from ..methods.scalekv import ScaleKV

    require_writable([out] if out else [], force)
    roles = measure_roles(model.load(), prompts, schedule, ScaleKV(share=share), about["seed"], batch)
    for layer, lost in enumerate(roles.lost):
        typer.echo(f"layer {layer:3d}  loses {100 * lost:5.1f} % of its attention{'  drafter' if layer in roles.drafters else ''}")
    if out:
        write_text(json.dumps(about | {"share": share, "drafters": roles.drafters, "lost": roles.lost}) + "\n", out)
    show_next(f"nextscale compare -m {model.model} --method 'scalekv:drafters={list(roles.drafters)},share={share:g}'")
