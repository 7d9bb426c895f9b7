"""`nextscale observe ranks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SettingError
from ..eval.calibrate_ranks import TABLE_ALPHAS, measure_table
from ..loading.load import find
from ..loading.presets import MODELS
from ..methods.stagevar_ranks import rank_file, write_rank_table
from ..validation import is_fraction
from .files import require_writable
from .old_options import Force, ModelOptions, PromptOptions, Seed, Sizes, given_by_user, out_option
from .old_parse import choose_schedule, parse_prompt
from .options import grouped
from .program import MEASURE, app
from .show import share_bar


@app.command("observe ranks", rich_help_panel=MEASURE)
@grouped
def observe_ranks(
    context: typer.Context,
    *,
    model: ModelOptions,
    prompts: PromptOptions,
    seed: Seed = 0,
    sizes: Sizes = None,
    alphas: Annotated[
        list[float] | None,
        typer.Option(
            "--alpha",
            metavar="SHARE",
            show_default=", ".join(map(str, TABLE_ALPHAS)),
            help="Share of the energy that the rank of a stage holds; can be repeated.",
        ),
    ] = None,
    out: Annotated[Path | None, out_option("FILE", "The table, a .json file.", "beside the weights, where it is found by itself")] = None,
    force: Force = False,
) -> None:
    """Measure on generated images at which rank StageVAR can run late stages of a model.

    Writes a table that StageVAR takes by itself for this model. A few dozen prompts are enough: images differ by a tenth.
    The model may also be named before the prompts, without --model.
    """
    words = prompts.prompts or []
    if words and words[0] in MODELS and not given_by_user(context, "model"):  # no prompt is the name of a model
        model, prompts = replace(model, model=words[0]), replace(prompts, prompts=words[1:])
    if bad := [alpha for alpha in alphas or () if not is_fraction(alpha, above_zero=True)]:
        raise SettingError(f"--alpha {bad[0]}: give a number above 0 and up to 1")
    spec = model.spec
    schedules = [choose_schedule(spec.settings.schedules, size, None, None) for size in sizes or (None,)]
    chosen = [parse_prompt(text, spec) for text in prompts.read() for _ in range(prompts.images)]
    file = out or rank_file(find(model.weights, spec.weights, f"weights of {spec.name}"))
    if file.suffix != ".json":
        raise SettingError(f"--out {file}: give a name that ends in .json")
    require_writable([file], force)
    with share_bar() as progress:
        task = progress.add_task("loading", total=len(schedules) * len(chosen))
        pipeline = model.load()
        progress.update(task, description="measuring")
        table = measure_table(pipeline, chosen, schedules, alphas or TABLE_ALPHAS, seed, on_image=lambda: progress.advance(task))
    about = {"model": spec.name, "images": len(chosen), "seed": seed, "schedules": [str(schedule) for schedule in schedules]}
    write_rank_table(table, file, about)
    for row in table.rows:
        typer.echo(f"alpha {row.alpha:<5} {row.cells:>5} cells: {', '.join(f'{ratio:.3g}' for ratio in row.ratios)}")
    typer.echo(f"written to {file}")
