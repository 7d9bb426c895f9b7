"""`nextscale calibrate`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingError
from .files import default_out, require_writable
from .options import Batch, Force, ImageOptions, ModelOptions, PromptOptions, option, out_option
from .parse import choose_schedule, parse_prompt
from .show import share_bar, show_next

if TYPE_CHECKING:
    from ..eval.results import Row
    from ..stage import Schedule

DEFAULTS = {
    "stagevar": {"alphas": "0.9+0.95+0.96+0.97+0.98+0.99+0.999", "sizes": ""},
    "skipvar": {"similarity": "0.84"},
    "scalekv": {"share": "0.1"},
}
"""Values of --set."""


class Calibrated(StrEnum):
    stagevar = "stagevar"
    skipvar = "skipvar"
    scalekv = "scalekv"


def calibrate(
    *,
    method: Annotated[Calibrated, typer.Argument(metavar="METHOD", show_default=False, help="stagevar, skipvar or scalekv.")],
    prompts: PromptOptions,
    model: ModelOptions,
    image: ImageOptions,
    batch: Batch = 4,
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            "KEY=VALUE",
            "stagevar: alphas=0.9+0.95 (energy), sizes=256+512; skipvar: similarity=0.84 (SSIM); scalekv: share=0.1 (of keys).",
        ),
    ] = None,
    out: Annotated[Path | None, out_option("FILE", "The .json file to write.", "stagevar: beside the weights; METHOD.json")] = None,
    force: Force = False,
) -> None:
    """Measure model-specific constants of a method on generated images.

    stagevar: ranks of late stages; skipvar: decision models; scalekv: the layers that keep most keys. A few dozen prompts suffice.
    """
    spec, chosen = model.spec, read_settings(method, settings or ())
    given = [parse_prompt(text, spec) for text in prompts.read() for _ in range(image.num_images)]
    about = {"model": spec.name, "images": len(given), "seed": image.seed}
    if method == "stagevar":
        calibrate_stagevar(given, model, image, chosen, out, force, about)
    elif method == "skipvar":
        calibrate_skipvar(given, model, image.schedule(spec), batch, chosen, out or default_out("skipvar.json"), force, about)
    else:
        calibrate_scalekv(given, model, image.schedule(spec), batch, chosen, out, force, about)


def read_settings(method: str, words: Sequence[str]) -> dict[str, str]:
    pairs = dict(word.partition("=")[::2] for word in words)
    if unknown := pairs.keys() - DEFAULTS[method].keys():
        raise SettingError(f"--set must name {' or '.join(DEFAULTS[method])} for {method}; got {', '.join(sorted(unknown))}.")
    return DEFAULTS[method] | pairs


def fraction(name: str, text: str) -> float:
    """Returns a number above 0 and at most 1."""
    try:
        if 0 < (value := float(text)) <= 1:
            return value
    except ValueError:
        pass
    raise SettingError(f"--set {name} must be above 0 and at most 1; got {text!r}.")


def calibrate_stagevar(
    prompts: Sequence[Any], model: ModelOptions, image: ImageOptions, chosen: Mapping[str, str], out: Path | None, force: bool, about: Row
) -> None:
    from ..eval.calibrate_ranks import measure_table
    from ..loading.load import find
    from ..methods.stagevar_ranks import rank_file, write_rank_table

    spec = model.spec
    alphas = [fraction("alphas", text) for text in chosen["alphas"].split("+")]
    sizes = chosen["sizes"].split("+") if chosen["sizes"] else [image.size]
    schedules = [choose_schedule(spec.settings.schedules, size, image.aspect) for size in sizes]
    file = out or rank_file(find(model.weights, spec.weights, f"weights of {spec.name}"))
    if file.suffix != ".json":
        raise SettingError(f"--out must end in .json; got {file}.")
    require_writable([file], force)
    with share_bar() as progress:
        task = progress.add_task("measuring", total=len(schedules) * len(prompts))
        table = measure_table(model.load(), prompts, schedules, alphas, image.seed, on_image=lambda: progress.advance(task))
    write_rank_table(replace(table, about=about | {"schedules": [str(schedule) for schedule in schedules]}), file)
    for row in table.rows:
        typer.echo(f"alpha {row.alpha:<5} {row.cells:>5} cells: {', '.join(f'{ratio:.3g}' for ratio in row.ratios)}")
    typer.echo(f"wrote {file}")
    show_next(f"nextscale compare -m {spec.name} --method stagevar  # reads the table if it is beside the weights")


def calibrate_skipvar(
    prompts: Sequence[Any],
    model: ModelOptions,
    schedule: Schedule,
    batch: int,
    chosen: Mapping[str, str],
    out: Path,
    force: bool,
    about: Row,
) -> None:
    from ..eval.calibrate_skipvar import fit, measure
    from ..io import write_text

    similarity = fraction("similarity", chosen["similarity"])
    require_writable([out], force)
    with share_bar() as progress:
        task = progress.add_task("measuring", total=1.0)
        measured = measure(model.load(), prompts, schedule, about["seed"], batch, lambda share: progress.update(task, completed=share))
    models = fit(measured, similarity)
    content = about | {"stages": [list(stage) for stage in schedule.sizes], "similarity": similarity}
    content |= {name: getattr(models, name)._asdict() for name in models._fields}
    write_text(json.dumps(content, indent=1) + "\n", out)
    for number, images in sorted(Counter(outcome.skipped for outcome in models(measured.features)).items()):
        typer.echo(f"{images} of {len(prompts)} images leave out {number} stage(s)")
    typer.echo(f"wrote {out}")
    show_next(f"nextscale compare -m {model.model} --method skipvar:models={out}")


def calibrate_scalekv(
    prompts: Sequence[Any],
    model: ModelOptions,
    schedule: Schedule,
    batch: int,
    chosen: Mapping[str, str],
    out: Path | None,
    force: bool,
    about: Row,
) -> None:
    from ..eval.calibrate_scalekv import measure_roles
    from ..io import write_text
    from ..methods.scalekv import ScaleKV

    share = fraction("share", chosen["share"])
    require_writable([out] if out else [], force)
    roles = measure_roles(model.load(), prompts, schedule, ScaleKV(share=share), about["seed"], batch)
    for layer, lost in enumerate(roles.lost):
        typer.echo(f"layer {layer:3d}  loses {100 * lost:5.1f} % of its attention{'  drafter' if layer in roles.drafters else ''}")
    if out:
        write_text(json.dumps(about | {"share": share, "drafters": roles.drafters, "lost": roles.lost}) + "\n", out)
    show_next(f"nextscale compare -m {model.model} --method 'scalekv:drafters={list(roles.drafters)},share={share:g}'")
