"""The command `observe`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import torch
import typer

from nextscale.cli.files import require_writable
from nextscale.cli.options import (
    MACHINE,
    OUTPUT,
    Batch,
    Force,
    ImageOptions,
    ModelOptions,
    PromptOptions,
    grouped,
    option,
    out_option,
)
from nextscale.cli.parse import parse_prompt
from nextscale.cli.show import share_bar
from nextscale.errors import SettingError
from nextscale.io import write_image, write_text
from nextscale.methods.registry import resolve_method
from nextscale.metrics import Lpips
from nextscale.pipeline import Pipeline
from nextscale.stage import Schedule

from ..metrics.files import VARIABLE
from ..program import app
from . import Examples, Observations, Sample, observe, read_observations, to_json, verdicts
from .detail_plots import DETAIL_FIGURES, TITLES, detail_figures
from .details import Details, Pictures, observe_details
from .details import to_json as details_json
from .distances import available_distances, available_text_score
from .plots import FIGURES
from .plots import figures as plotted

NUMBERS = "observations.json"
SHEETS = ("stages", "blocks", "prompts")
DETAILS = "details.json"
DETAIL_SHEETS = ("attention", "similarity", "changes", "projections")
DETAIL_METHODS = ("skip:last=2", "sparsevar", "fastvar", "stagevar")
LONGEST_LINE = 100


@dataclass(frozen=True)
class FigureOptions:
    """Options for numbers and pictures: where to write them, or which to plot again."""

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
            again = f"python -m nextscale_research observe --plot {self.out / NUMBERS}"
            typer.echo(f"no figures without matplotlib: pip install matplotlib, then {again}")

    def require_details_writable(self) -> None:
        files = [DETAILS, *(f"{name}.png" for name in DETAIL_SHEETS), *(f"{name}.svg" for name in DETAIL_FIGURES)]
        require_writable([self.out / name for name in files], self.force)

    def write_details(self, found: Details, pictures: Pictures) -> None:
        write_text(details_json(found), self.out / DETAILS)
        for name in DETAIL_SHEETS:
            if (picture := getattr(pictures, name)) is not None:
                write_image(picture, self.out / f"{name}.png")
        if can_plot():
            for name, figure in detail_figures(found).items():
                write_text(figure, self.out / f"{name}.svg")
        else:
            typer.echo("no figures without matplotlib: pip install matplotlib")

    @property
    def _figure_files(self) -> list[Path]:
        return [self.out / f"{name}.svg" for name in FIGURES]

    def _write_figures(self, found: Observations) -> None:
        for name, figure in plotted(found).items():
            write_text(figure, self.out / f"{name}.svg")


@dataclass(frozen=True)
class MeasureOptions:
    """Options of the measurement."""

    switches: Annotated[
        int,
        typer.Option(
            "--switches",
            metavar="N",
            min=1,
            help="Number of stages at which prompts are replaced; each costs three more runs of all images.",
        ),
    ] = 3
    batch: Batch = 16
    metrics: Annotated[Path | None, option("--metrics", "FOLDER", "Folder of metric networks.", MACHINE, VARIABLE)] = None
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Measure instead, on a few images at once: distances of every stage's image to the final one, spectra, attention, logits, "
            "changes over stages, other random projections of StageVAR.",
        ),
    ] = False


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


@app.command("observe")
@grouped
def observe_command(
    context: typer.Context,
    *,
    model: ModelOptions,
    prompts: PromptOptions,
    image: ImageOptions,
    measuring: MeasureOptions,
    figures: FigureOptions,
) -> None:
    """Check the papers' observations on a model.

    These are the changes of late stages, the places where blocks act, and the effect of the prompt. Give at least two prompts.
    """
    if figures.plot is not None:
        require_alone(context)
        show_verdicts(figures.plot_again(figures.plot))
        return
    spec = model.spec
    schedule = image.schedule(spec)
    if measuring.metrics is not None and not measuring.details:
        raise SettingError("--metrics names the networks of --details. Add --details, or leave it out.")
    if len(schedule) < 2:
        raise SettingError(f"{schedule} has a single stage: there is nothing to compare")
    chosen = [parse_prompt(text, spec) for text in prompts.read()]
    sample = Sample.of(chosen, image.num_images * len(chosen), image.seed)
    if measuring.details:
        figures.require_details_writable()
        measure_details(model.load, sample, schedule, measuring.metrics, model.torch_device, figures)
        return
    figures.require_writable()
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        pipeline = model.load()
        progress.update(task, description="observing")
        pixels = [side * pipeline.tokenizer.pixels_per_token for side in schedule.grid]
        found, examples = observe(
            pipeline,
            sample,
            schedule,
            batch=measuring.batch,
            switches=measuring.switches,
            lpips=Lpips.load_for(pixels, pipeline.model.device),
            on_progress=lambda share: progress.update(task, completed=share),
        )
    figures.write(found, examples)
    show_verdicts(found)


def measure_details(
    load: Callable[[], Pipeline], sample: Sample, schedule: Schedule, metrics: Path | None, device: torch.device, figures: FigureOptions
) -> None:
    distances, score = available_distances(metrics, device), available_text_score(metrics, device)
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        pipeline = load()
        progress.update(task, description="observing")
        found, pictures = observe_details(
            pipeline,
            sample,
            schedule,
            distances,
            {name: resolve_method(name) for name in DETAIL_METHODS},
            projected=resolve_method("stagevar"),
            text_score=score if all(isinstance(prompt, str) for prompt in sample.prompts) else None,
            on_progress=lambda share: progress.update(task, completed=share),
        )
    figures.write_details(found, pictures)
    for name, stage in found.boundaries.items():
        settled = "only at the last stage" if stage is None else f"after stage {stage} ({found.stages[stage][0]}x{found.stages[stage][1]})"
        typer.echo(f"{TITLES[name]}: a tenth of the first stage's distance to the final image is left {settled}")
    typer.echo(near_line(found))
    if found.text_score is not None:
        first, *_, last = found.text_score.mean
        typer.echo(f"CLIP, image and prompt: {first:.3f} after the first stage, {last:.3f} after the last")
    if found.projection is not None:
        shown = ", ".join(f"{TITLES[name]} {found.projection.between[name]:.4f} between projections" for name in found.projection.between)
        typer.echo(f"StageVAR, {found.projection.seeds} random projections: {shown}")


def near_line(found: Details) -> str:
    """Returns what late attention does at the same place of its own and of earlier stages, against attention that is spread evenly."""
    last = len(found.stages) - 1
    near, chance, shares = (matrix[last] for matrix in (found.attention_near, found.attention_chance, found.attention))

    def times(stages: Sequence[int]) -> float:
        got, even = (sum((shares[one] or 0) * (row[one] or 0) for one in stages) for row in (near, chance))
        return got / even if even else 0.0

    earlier = [one for one in range(last) if (chance[one] or 1) < 1]
    return (
        f"last stage, attention to the 3 x 3 cells around the same place: {times([last]):.1f} times as much as if it were spread evenly"
        f" in its own stage, {times(earlier):.1f} times in earlier ones"
    )


def is_given(context: typer.Context, name: str) -> bool:
    """Returns True if the command line names this option, though it may be with the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def require_alone(context: typer.Context) -> None:
    """Refuses options of a measurement, which --plot would ignore."""
    chosen = [one for one in context.command.params if one.name and is_given(context, one.name)]
    if surplus := [one.opts[0] for one in chosen if one.name not in ("plot", "out", "force")]:
        raise SettingError(f"--plot only plots stored measurements: leave out {', '.join(surplus)}")


def show_verdicts(found: Observations) -> None:
    width = min(get_terminal_size().columns, LONGEST_LINE)
    for verdict in verdicts(found):
        holds = {True: "holds", False: "does not hold", None: "not measured"}[verdict.holds]
        typer.echo(f"{verdict.claim}: {holds}")
        typer.echo(textwrap.fill(verdict.text, width, initial_indent="    ", subsequent_indent="    "))
