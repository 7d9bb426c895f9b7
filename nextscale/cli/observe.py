"""`nextscale observe`."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from ..errors import SettingError
from ..io import write_image, write_text
from ..lab.analysis import Observations, Sample, observe, read_observations, to_json, verdicts
from ..lab.analysis.plots import FIGURES, figures
from .console import share_bar
from .files import require_writable
from .groups import grouped
from .metrics import find_lpips
from .options import OUTPUT, Batch, Force, Metrics, ModelOptions, PromptOptions, Seed, SizeOptions, out_option
from .parse import parse_prompt
from .program import MEASURE, app

NUMBERS = "observations.json"
SHEETS = ("stages", "blocks", "prompts")
LONGEST_LINE = 100


@app.command("observe", rich_help_panel=MEASURE)
@grouped
def observe_command(
    context: typer.Context,
    *,
    model: ModelOptions,
    prompts: PromptOptions,
    seed: Seed = 0,
    size: SizeOptions,
    switches: Annotated[
        int,
        typer.Option(
            "--switches",
            metavar="N",
            min=1,
            help="Number of stages at which prompts are replaced; each costs three more runs of all images.",
        ),
    ] = 3,
    batch: Batch = 16,
    metrics: Metrics = None,
    out: Annotated[Path, out_option("FOLDER", "Folder for numbers and pictures.")] = Path("observed"),
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", rich_help_panel=OUTPUT, help="Measure nothing; plot the figures of an observations.json."),
    ] = None,
    force: Force = False,
) -> None:
    """Check on a model what the papers behind the methods observed.

    What late stages change, where blocks act, what the prompt does. Give at least two prompts.
    """
    plotted = [out / f"{name}.svg" for name in FIGURES]
    if plot is not None:
        require_alone(context)
        require_writable(plotted, force)
        found = read_observations(plot)
        write_figures(found, out)
        show_verdicts(found)
        return
    spec = model.spec
    schedule = size.schedule(spec)
    if len(schedule) < 2:
        raise SettingError(f"{schedule} has a single stage: there is nothing to compare")
    chosen = [parse_prompt(text, spec) for text in prompts.read()]
    sample = Sample.of(chosen, prompts.images * len(chosen), seed)
    plots = find_spec("matplotlib") is not None
    require_writable([out / NUMBERS, *(out / f"{name}.png" for name in SHEETS), *(plotted if plots else ())], force)
    lpips = find_lpips(metrics, model.torch_device)
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        pipeline = model.load()
        progress.update(task, description="observing")
        found, examples = observe(
            pipeline,
            sample,
            schedule,
            batch=batch,
            switches=switches,
            lpips=lpips,
            progress=lambda share: progress.update(task, completed=share),
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
    """SettingError for options of a measurement, which --plot would ignore."""
    chosen = [one for one in context.command.params if one.name and given_by_user(context, one.name)]
    if surplus := [one.opts[0] for one in chosen if one.name not in ("plot", "out", "force")]:
        raise SettingError(f"--plot only plots what was measured: leave out {', '.join(surplus)}")


def given_by_user(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def write_figures(found: Observations, out: Path) -> None:
    for name, figure in figures(found).items():
        write_text(figure, out / f"{name}.svg")


def show_verdicts(found: Observations) -> None:
    width = min(get_terminal_size().columns, LONGEST_LINE)
    for verdict in verdicts(found):
        holds = {True: "holds", False: "does not hold", None: "not measured"}[verdict.holds]
        typer.echo(f"{verdict.claim}: {holds}")
        typer.echo(textwrap.fill(verdict.text, width, initial_indent="    ", subsequent_indent="    "))
