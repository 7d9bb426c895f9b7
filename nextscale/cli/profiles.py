"""`nextscale profiles`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import SettingError
from ..eval.frontier import frontier_svg
from ..eval.results import Row
from ..io import write_text
from ..loading.presets import MODELS, model_spec
from ..profiles import Point, Profile
from .console import result_console
from .files import require_writable
from .options import OUTPUT, Force
from .parse import named_profiles
from .program import MEASURE, app


@app.command(rich_help_panel=MEASURE)
def profiles(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="Profiles to show; without any, profiles that are found are listed.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME", show_default="all whose weights are here", help="List those of this model."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", rich_help_panel=OUTPUT, help="Plot one profile as an .svg file."),
    ] = None,
    force: Force = False,
) -> None:
    """List the profiles that `auto` chooses from, or show what their points save and cost."""
    if files and model is not None:
        raise SettingError(f"-m {model} lists what lies beside its weights: leave it out, or leave out the files")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise SettingError(f"--plot {plot}: give a name that ends in .svg")
    found = {path: Profile.load(path) for path in files} if files else dict(found_profiles(model))
    if plot is not None:
        if len(found) != 1:
            raise SettingError(f"--plot draws one profile, and here are {len(found)}: give the file of one")
        require_writable([plot], force)
        write_text(profile_svg(next(iter(found.values()))), plot)
    console = result_console()
    if files or plot is not None:
        for path, profile in found.items():
            show(console, path, profile)
    elif found:
        console.print(listing(found))
        console.print("`nextscale profiles FILE` shows the points of one.")
    else:
        console.print(f"No profile found{'' if model is None else f' of {model}'}. `nextscale tune` makes one.")


def found_profiles(model: str | None) -> Iterator[tuple[Path, Profile]]:
    """The profiles beside the weights of one model, or of all models whose weights are on this machine."""
    for spec in MODELS.values() if model is None else (model_spec(model),):
        yield from named_profiles(spec).items()


def listing(found: Mapping[Path, Profile]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "size", "batch", "machine", "points", "speedup", "LPIPS"):
        table.add_column(heading, justify="right" if heading in ("batch", "points") else "left")
    table.add_column("file", overflow="fold")
    for path, profile in found.items():
        slow, fast = profile.points[0], profile.points[-1]
        facts = [profile.model, size_of(profile), str(profile.batch), profile.hardware, str(len(profile.points))]
        ranges = [f"{slow.speedup.value:.2f} to {fast.speedup.value:.2f}", f"{slow.lpips.value:.3f} to {fast.lpips.value:.3f}"]
        table.add_row(*map(escape, [*facts, *ranges, str(path)]))
    return table


def show(console: Console, path: Path, profile: Profile) -> None:
    console.print(f"[bold]{escape(str(path))}[/bold]")
    unseen = f" that the search over {profile.searched} did not see" if profile.searched else ""  # proved with --from: nothing was
    console.print(
        escape(
            f"{profile.described}, {profile.dtype}, {profile.engine}, torch {profile.torch}, nextscale {profile.version}.\n"
            f"{profile.tested} prompts{unseen} ({profile.prompts}), seed {profile.seed}."
        )
    )
    console.print(point_table(profile))


def point_table(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("speedup", "LPIPS (95 %)", "PSNR", "ms per image", "MACs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("method", overflow="fold")
    table.add_row("1.00", "", "", f"{profile.dense_ms:.1f}", "100%", "dense")
    for point in profile.points:
        table.add_row(*point_cells(point), escape(point.method))
    for point in (one for one in profile.skipping if one not in profile.points):
        table.add_row(*point_cells(point), escape(f"for comparison: {point.method}"), style="dim")
    return table


def point_cells(point: Point) -> list[str]:
    return [f"{point.speedup.value:.2f}", str(point.lpips), f"{point.psnr:.1f} dB", f"{point.ms:.1f}", f"{100 * point.macs:.0f}%"]


def size_of(profile: Profile) -> str:
    return f"{profile.size[0]}x{profile.size[1]}"


def profile_svg(profile: Profile) -> str:
    """The frontier, with leaving out stages beside it."""
    dense = {"method": "dense", "speedup": {"median": 1.0}, "lpips": None}
    points = {point.method: plotted(point) for point in (*profile.points, *profile.skipping)}
    common = {"model": profile.model, "size": profile.size, "images": profile.tested, "batch": profile.batch, "hardware": profile.hardware}
    return frontier_svg([common | row for row in (dense, *points.values())], timed=True)


def plotted(point: Point) -> Row:
    """A point as `nextscale quality` writes it."""
    return {"method": point.method, "speedup": {"median": point.speedup.value}, "lpips": asdict(point.lpips)}
