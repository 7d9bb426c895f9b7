"""`nextscale observe`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from ..errors import SettingError
from ..io import write_image, write_text
from ..lab.analysis import Examples, Observations, Sample, observe, read_observations, to_json, verdicts
from ..lab.analysis.plots import FIGURES
from ..lab.analysis.plots import figures as plotted
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


@dataclass(frozen=True)
class FigureOptions:
    """Where numbers and pictures go, or which numbers to plot again."""

    out: Annotated[Path, out_option("FOLDER", "Folder for numbers and pictures.")] = Path("observed")
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", rich_help_panel=OUTPUT, help="Measure nothing; plot the figures of an observations.json."),
    ] = None
    force: Force = False

    def plot_again(self, numbers: Path) -> Observations:
        require_writable(self._figure_files, self.force)
        found = read_observations(numbers)
        self._write_figures(found)
        return found

    def require_writable(self) -> None:
        figures = self._figure_files if can_plot() else []
        require_writable([self.out / NUMBERS, *(self.out / f"{name}.png" for name in SHEETS), *figures], self.force)

    def write(self, found: Observations, examples: Examples) -> None:
        write_text(to_json(found), self.out / NUMBERS)
        for name in SHEETS:
            write_image(getattr(examples, name), self.out / f"{name}.png")
        if can_plot():
            self._write_figures(found)
        else:
            again = f"nextscale observe --plot {self.out / NUMBERS}"
            typer.echo(f'no figures without matplotlib: pip install "nextscale[plots]", then {again}')

    @property
    def _figure_files(self) -> list[Path]:
        return [self.out / f"{name}.svg" for name in FIGURES]

    def _write_figures(self, found: Observations) -> None:
        for name, figure in plotted(found).items():
            write_text(figure, self.out / f"{name}.svg")


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


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
    figures: FigureOptions,
) -> None:
    """Check on a model what the papers behind the methods observed.

    What late stages change, where blocks act, what the prompt does. Give at least two prompts.
    """
    if figures.plot is not None:
        require_alone(context)
        show_verdicts(figures.plot_again(figures.plot))
        return
    spec = model.spec
    schedule = size.schedule(spec)
    if len(schedule) < 2:
        raise SettingError(f"{schedule} has a single stage: there is nothing to compare")
    chosen = [parse_prompt(text, spec) for text in prompts.read()]
    sample = Sample.of(chosen, prompts.images * len(chosen), seed)
    figures.require_writable()
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
            on_progress=lambda share: progress.update(task, completed=share),
        )
    figures.write(found, examples)
    show_verdicts(found)


def require_alone(context: typer.Context) -> None:
    """SettingError for options of a measurement, which --plot would ignore."""
    chosen = [one for one in context.command.params if one.name and given_by_user(context, one.name)]
    if surplus := [one.opts[0] for one in chosen if one.name not in ("plot", "out", "force")]:
        raise SettingError(f"--plot only plots what was measured: leave out {', '.join(surplus)}")


def given_by_user(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def show_verdicts(found: Observations) -> None:
    width = min(get_terminal_size().columns, LONGEST_LINE)
    for verdict in verdicts(found):
        holds = {True: "holds", False: "does not hold", None: "not measured"}[verdict.holds]
        typer.echo(f"{verdict.claim}: {holds}")
        typer.echo(textwrap.fill(verdict.text, width, initial_indent="    ", subsequent_indent="    "))
