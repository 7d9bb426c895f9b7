"""`nextscale fit`: what a method needs to know of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..eval.calibrate_scalekv import measure_roles
from ..eval.calibrate_skipvar import fit as fit_decisions
from ..eval.calibrate_skipvar import measure, require_similarity
from ..io import write_text
from ..methods.scalekv import SHARE, ScaleKV
from .files import require_writable
from .old_options import Batch, Force, ModelOptions, PromptOptions, Seed, SizeOptions, out_option
from .old_parse import parse_prompt
from .options import grouped
from .program import MEASURE, app
from .show import share_bar

fit = typer.Typer(no_args_is_help=True)
app.add_typer(fit, name="fit", rich_help_panel=MEASURE, help="Measure what a method needs to know of a model: SkipVAR, ScaleKV.")


@fit.command("skipvar")
@grouped
def fit_skipvar(
    *,
    model: ModelOptions,
    prompts: PromptOptions,
    seed: Seed = 0,
    size: SizeOptions,
    similarity: Annotated[
        float, typer.Option("--similarity", metavar="SSIM", min=0, max=1, help="Structural similarity to the dense image to aim at.")
    ] = 0.84,
    batch: Batch = 8,
    out: Annotated[Path, out_option("FILE", "Decision models, for --method skipvar:models=FILE.")] = Path("skipvar.json"),
    force: Force = False,
) -> None:
    """Fit SkipVAR's decision models to a model, from dense images and images with fewer stages or less guidance."""
    spec = model.spec
    schedule = size.schedule(spec)
    chosen = [parse_prompt(text, spec) for text in prompts.read() for _ in range(prompts.images)]
    require_similarity(similarity)  # before anything is measured
    require_writable([out], force)
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        pipeline = model.load()
        progress.update(task, description="measuring")
        measured = measure(pipeline, chosen, schedule, seed, batch, lambda share: progress.update(task, completed=share))
    models = fit_decisions(measured, similarity)
    about = {"model": spec.name, "stages": [list(stage) for stage in schedule.sizes], "similarity": similarity, "images": len(chosen)}
    content = about | {name: getattr(models, name)._asdict() for name in models._fields}
    write_text(json.dumps(content, indent=1) + "\n", out)
    outcomes = models(measured.features)
    for number in sorted({outcome.skipped for outcome in outcomes}):
        typer.echo(f"{sum(outcome.skipped == number for outcome in outcomes)} of {len(outcomes)} images leave out {number} stage(s)")
    typer.echo(f"wrote {out}: --method skipvar:models={out}")


@fit.command("scalekv")
@grouped
def fit_scalekv(
    *,
    model: ModelOptions,
    prompts: PromptOptions,
    seed: Seed = 0,
    size: SizeOptions,
    share: Annotated[
        float, typer.Option("--share", metavar="SHARE", min=0, max=1, help="Mean share of the keys that layers keep.")
    ] = SHARE,
    batch: Batch = 4,
) -> None:
    """Find the layers of a model that ScaleKV should leave most keys: those whose attention the other ones' budget would cut most."""
    spec, method = model.spec, ScaleKV(share=share)
    schedule = size.schedule(spec)
    chosen = [parse_prompt(text, spec) for text in prompts.read() for _ in range(prompts.images)]
    roles = measure_roles(model.load(), chosen, schedule, method, seed, batch)
    for layer, lost in enumerate(roles.lost):
        typer.echo(f"layer {layer:3d}  loses {100 * lost:5.1f} % of its attention{'  drafter' if layer in roles.drafters else ''}")
    typer.echo(f"--method '{roles.method}{f',share={share}' if share != SHARE else ''}'")
