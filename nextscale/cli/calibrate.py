"""`nextscale calibrate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SettingError
from .files import require_writable
from .options import Batch, Force, ImageOptions, ModelOptions, PromptOptions, option, out_option
from .parse import choose_schedule, parse_prompt
from .show import share_bar, show_next

if TYPE_CHECKING:
    from ..eval.results import Row

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
        option(
            "--set",
            "KEY=VALUE",
            "stagevar: alphas=0.9+0.95 (energy), sizes=256+512; scalekv: share=0.1 (of keys).",
        ),
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
    spec, chosen = model.spec, read_settings(method, settings or ())
    given = [parse_prompt(text, spec) for text in prompts.read() for _ in range(image.num_images)]
    about = {"model": spec.name, "images": len(given), "seed": image.seed}
    run = {"stagevar": calibrate_stagevar, "scalekv": calibrate_scalekv}[method]
    run(Calibration(given, model, image, batch, chosen, out, force, about))


@dataclass(frozen=True)
class Calibration:
    """What the command was called with."""

    prompts: Sequence[Any]
    model: ModelOptions
    image: ImageOptions
    batch: int
    settings: Mapping[str, str]
    out: Path | None
    force: bool
    about: Row

    def fractions(self, name: str) -> list[float]:
        """Returns the numbers of a setting, above 0 and at most 1, joined by +."""
        try:
            values = [float(text) for text in self.settings[name].split("+")]
        except ValueError:
            values = [0.0]
        if not all(0 < value <= 1 for value in values):
            raise SettingError(f"--set {name} must be above 0 and at most 1; got {self.settings[name]!r}.")
        return values


def read_settings(method: str, words: Sequence[str]) -> dict[str, str]:
    pairs = dict(word.partition("=")[::2] for word in words)
    if unknown := pairs.keys() - DEFAULTS[method].keys():
        raise SettingError(f"--set must name {' or '.join(DEFAULTS[method])} for {method}; got {', '.join(sorted(unknown))}.")
    return DEFAULTS[method] | pairs


def calibrate_stagevar(asked: Calibration) -> None:
    from ..eval.calibrate_ranks import measure_table
    from ..loading.load import find
    from ..methods.stagevar_ranks import rank_file, write_rank_table

    spec, image, alphas = asked.model.spec, asked.image, asked.fractions("alphas")
    sizes = asked.settings["sizes"].split("+") if asked.settings["sizes"] else [image.size]
    schedules = [choose_schedule(spec.settings.schedules, size, image.aspect) for size in sizes]
    file = asked.out or rank_file(find(asked.model.weights, spec.weights, f"weights of {spec.name}"))
    if file.suffix != ".json":
        raise SettingError(f"--out must end in .json; got {file}.")
    require_writable([file], asked.force)
    with share_bar() as progress:
        task = progress.add_task("measuring", total=len(schedules) * len(asked.prompts))
        table = measure_table(asked.model.load(), asked.prompts, schedules, alphas, image.seed, lambda: progress.advance(task))
    write_rank_table(replace(table, about=asked.about | {"schedules": [str(schedule) for schedule in schedules]}), file)
    for row in table.rows:
        typer.echo(f"alpha {row.alpha:<5} {row.cells:>5} cells: {', '.join(f'{ratio:.3g}' for ratio in row.ratios)}")
    typer.echo(f"wrote {file}")
    show_next(f"nextscale compare -m {spec.name} --method stagevar  # reads the table if it is beside the weights")


def calibrate_scalekv(asked: Calibration) -> None:
    from ..eval.calibrate_scalekv import measure_roles
    from ..io import write_text
    from ..methods.scalekv import ScaleKV

    schedule, (share,) = asked.image.schedule(asked.model.spec), asked.fractions("share")
    require_writable([asked.out] if asked.out else [], asked.force)
    roles = measure_roles(asked.model.load(), asked.prompts, schedule, ScaleKV(share=share), asked.image.seed, asked.batch)
    for layer, lost in enumerate(roles.lost):
        typer.echo(f"layer {layer:3d}  loses {100 * lost:5.1f} % of its attention{'  drafter' if layer in roles.drafters else ''}")
    if asked.out:
        write_text(json.dumps(asked.about | {"share": share, "drafters": roles.drafters, "lost": roles.lost}) + "\n", asked.out)
    show_next(f"nextscale compare -m {asked.model.model} --method 'scalekv:drafters={list(roles.drafters)},share={share:g}'")
