"""`nextscale observe`."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from ..errors import CheckpointError, SettingError
from ..io import write_image, write_text
from ..lab.analysis import Observations, Sample, observe, read_observations, to_json, verdicts
from ..lab.analysis.plots import FIGURES, figures
from ..lab.metrics import Lpips
from ..loading.load import choose_device, load
from ..loading.presets import model_spec
from .files import require_writable
from .options import (
    MACHINE,
    OUTPUT,
    Device,
    DtypeName,
    Size,
    TextEncoderSource,
    TokenizerFile,
    Weights,
    all_prompts,
    as_torch_dtype,
    choose_schedule,
    parse_prompt,
    split_model,
)
from .program import app
from .progress import share_bar

NUMBERS = "observations.json"
SHEETS = ("stages", "blocks", "prompts")
LONGEST_LINE = 100


@app.command("observe")
def observe_command(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT",
            show_default=False,
            help="A name from `nextscale models`, by default nano; then texts, or class numbers for class models: at least two.",
        ),
    ] = None,
    prompts_file: Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="More prompts, one per line.")] = None,
    images: Annotated[
        int | None, typer.Option(min=1, show_default="one per prompt", help="Images in all; the prompts are taken in turn.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first image; every further image takes the next one.")] = 0,
    size: Size = None,
    switches: Annotated[
        int, typer.Option(min=1, help="At how many stages prompts are replaced; each costs as much as drawing all images three times.")
    ] = 3,
    weights: Weights = None,
    tokenizer: TokenizerFile = None,
    text_encoder: TextEncoderSource = None,
    lpips: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=MACHINE,
            show_default="in NEXTSCALE_METRICS; pixels alone are compared where it is not there",
            help="File of the LPIPS network, or its folder.",
        ),
    ] = None,
    device: Device = None,
    dtype: DtypeName = None,
    batch: Annotated[int, typer.Option(min=1, rich_help_panel=MACHINE, help="Images drawn at a time.")] = 16,
    out: Annotated[Path, typer.Option(metavar="FOLDER", rich_help_panel=OUTPUT, help="Where numbers and pictures go.")] = Path("observed"),
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Only draw the figures of an observations.json.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Overwrite files.")] = False,
) -> None:
    """Check on a model what the papers behind the methods observed: what late stages change, where blocks act, what the prompt does."""
    drawn = [out / f"{name}.svg" for name in FIGURES]
    if plot is not None:
        require_alone(context)
        require_writable(drawn, force)
        found = read_observations(plot)
        write_figures(found, out)
        show_verdicts(found)
        return
    model, given = split_model(prompts or [])
    spec = model_spec(model)
    schedule = choose_schedule(spec.settings.schedules, size, None, None)
    if len(schedule) < 2:
        raise SettingError(f"{schedule} has a single stage: there is nothing to compare")
    sample = Sample.of([parse_prompt(text, spec) for text in all_prompts(given, prompts_file)], images, seed)
    plots = find_spec("matplotlib") is not None
    require_writable([out / NUMBERS, *(out / f"{name}.png" for name in SHEETS), *(drawn if plots else ())], force)
    place = choose_device(device)
    distance = open_lpips(lpips, str(place))
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        pipeline = load(
            model, weights=weights, tokenizer=tokenizer, text_encoder=text_encoder, device=place, dtype=as_torch_dtype(dtype)
        )  # fmt: skip
        progress.update(task, description="observing")
        found, examples = observe(
            pipeline,
            sample,
            schedule,
            batch=batch,
            switches=switches,
            lpips=distance,
            on_progress=lambda share: progress.update(task, completed=share),
        )
    write_text(to_json(found), out / NUMBERS)
    for name in SHEETS:
        write_image(getattr(examples, name), out / f"{name}.png")
    if plots:
        write_figures(found, out)
    else:
        typer.echo(f'no figures without matplotlib: pip install "nextscale[plots]", then nextscale observe --plot {out / NUMBERS}')
    show_verdicts(found)


def require_alone(context: typer.Context) -> None:
    """With --plot nothing is measured, so what a measurement takes would be ignored."""
    chosen = [name for name in context.params if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"]
    if surplus := [name for name in chosen if name not in ("plot", "out", "force")]:
        raise SettingError(f"--plot only draws what was measured: leave out {', '.join(surplus)}")


def open_lpips(given: Path | None, device: str) -> Lpips | None:
    """Where nobody asked for it, it may be missing."""
    try:
        return Lpips.load(given, device)
    except CheckpointError:
        if given is not None:
            raise
        return None


def write_figures(found: Observations, out: Path) -> None:
    for name, figure in figures(found).items():
        write_text(figure, out / f"{name}.svg")


def show_verdicts(found: Observations) -> None:
    width = min(get_terminal_size().columns, LONGEST_LINE)
    for verdict in verdicts(found):
        holds = {True: "holds", False: "does not hold", None: "not measured"}[verdict.holds]
        typer.echo(f"{verdict.claim}: {holds}")
        typer.echo(textwrap.fill(verdict.text, width, initial_indent="    ", subsequent_indent="    "))
