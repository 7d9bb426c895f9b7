"""`nextscale models`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from .options import MODEL_HELP, Json, option
from .parse import named_profiles, size_text
from .show import percent, plain_table, result_console, show_next

if TYPE_CHECKING:
    from ..loading import ModelSpec
    from ..loading.presets import Embedded, Source, TextSource
    from ..profiles import Point, Profile

SIZES_SHOWN = 4  # in the table


def models(
    *,
    model: Annotated[str | None, option("--model -m", "NAME", f"{MODEL_HELP} Also shows its profiles.", None, "all models")] = None,
    as_json: Json = False,
) -> None:
    """List models, their files, and the measured profiles of one."""
    from ..io import home
    from ..loading.presets import MODELS, model_spec

    specs = list(MODELS.values()) if model is None else [model_spec(model)]
    profiles = {} if model is None else named_profiles(specs[0])
    if as_json:
        found = {} if model is None else {"profiles": [str(path) for path in profiles]}
        content = {"home": str(home()), "models": [model_facts(spec) for spec in specs]} | found
        typer.echo(json.dumps(content, indent=2))
        return
    console = result_console() if model else Console(highlight=False)
    for family, members in groupby(specs, key=lambda spec: spec.name.partition("-")[0]):
        show_family(console, family, list(members), whole=model is not None)
    console.print(f"Files are read from {escape(str(home()))} (NEXTSCALE_HOME), then from the hub's cache.", soft_wrap=True)
    if model is None:
        show_next("nextscale models -m NAME  # all sizes and the measured profiles of one model; --json also lists addresses")
        return
    for path, profile in profiles.items():
        show_profile(console, path, profile)
    if profiles:
        show_next(f'nextscale generate -m {model} --method auto:lpips=0.1 PROMPT  # "auto" chooses a point of these profiles')
    elif weights_are_here(specs[0]):
        show_next(f"nextscale tune -m {model}  # measures a profile, from which `auto` chooses")
    else:
        show_next(f"nextscale download -m {model}  # then `nextscale tune -m {model}` measures a profile")


def weights_are_here(spec: ModelSpec) -> bool:
    from ..loading.artifacts import local_weights

    place = local_weights(spec)
    return place is not None and place.exists()


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "prompts": "class" if spec.text_encoder is None else "text",
        "parameters": parameter_count(spec),
        "sizes": [size_text(size) for size in spec.settings.schedules.offers()],
        "weights": None if spec.weights is None else source_facts(spec.weights),
        "tokenizer": source_facts(spec.tokenizer_weights),
        "text_encoder": None if spec.text_encoder is None else encoder_name(spec.text_encoder),
    }


def source_facts(source: Source | Embedded) -> dict[str, str | None]:
    from ..loading.presets import Embedded

    return {"file": str(source.path), "url": None} if isinstance(source, Embedded) else {"file": source.local, "url": source.url}


def encoder_name(source: TextSource) -> str:
    return source.origin if isinstance(source.origin, str) else source.origin.file


def parameter_count(spec: ModelSpec) -> int:
    import torch

    from ..loading.presets import build_model

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(spec.model).parameters())


def show_family(console: Console, family: str, specs: Sequence[ModelSpec], whole: bool) -> None:
    encoder = specs[0].text_encoder
    table = plain_table("model", "params", "sizes", "weights and tokenizer", left=("model", "sizes"), folded=("weights and tokenizer",))
    for spec in specs:
        files = [file_link(spec.weights) if spec.weights else "no released weights", file_link(spec.tokenizer_weights)]
        count = parameter_count(spec)
        parameters = f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.1f}B"
        sizes = [size_text(size) for size in spec.settings.schedules.offers()]
        if len(sizes) > SIZES_SHOWN and not whole:
            sizes = [*sizes[:SIZES_SHOWN], f"and {len(sizes) - SIZES_SHOWN} more"]
        table.add_row(spec.name, parameters, "\n".join(sizes), "\n".join(dict.fromkeys(files)))
    console.print(f"[bold]{family}[/bold]: prompts are", "class numbers" if encoder is None else f"text, read by {encoder_name(encoder)}")
    console.print(table)
    repositories = [getattr(source, "repository", None) for spec in specs for source in (spec.weights, spec.tokenizer_weights)]
    if pages := [f"https://huggingface.co/{repository}" for repository in dict.fromkeys(repositories) if repository]:
        console.print("published at", *pages)
    console.print()


def file_link(source: Source | Embedded) -> str:
    from ..loading.presets import Embedded

    return "in the package" if isinstance(source, Embedded) else f"[link={source.url}]{source.local}[/link]"


def show_profile(console: Console, path: Path, profile: Profile) -> None:
    """Prints what a profile was measured on, and its points."""
    console.print(f"[bold]{escape(str(path))}[/bold]", soft_wrap=True)
    unseen = f" not seen by the search over {profile.searched}" if profile.searched else ""  # with tune --from there was no search
    console.print(
        f"{profile.described}, {profile.dtype}, {profile.engine}, torch {profile.torch}, nextscale {profile.version}.\n"
        f"{profile.tested} prompts{unseen} ({profile.prompts}), seed {profile.seed}.",
        markup=False,
    )
    table = plain_table("speedup", "LPIPS (95 %)", "PSNR", "ms per image", "MACs", "method", folded=("method",))
    table.add_row("1.00", "", "", f"{profile.dense_ms:.1f}", "100%", "dense")
    for point in profile.points:
        table.add_row(*point_cells(point), escape(point.method))
    for point in (one for one in profile.skipping if one not in profile.points):
        table.add_row(*point_cells(point), escape(f"for comparison: {point.method}"), style="dim")
    console.print(table)


def point_cells(point: Point) -> list[str]:
    return [f"{point.speedup.value:.2f}", str(point.lpips), f"{point.psnr:.1f} dB", f"{point.ms:.1f}", percent(point.macs)]
