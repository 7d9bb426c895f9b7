"""`nextscale models`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .options import MODEL_HELP, Json, option
from .parse import named_profiles, size_text
from .show import percent, plain_table, result_console, show_next

if TYPE_CHECKING:
    from ..loading import ModelSpec
    from ..loading.presets import Embedded, Source
    from ..profiles import Profile

FEW_SIZES = 2  # more are counted in the table


def models(
    *,
    model: Annotated[str | None, option("--model -m", "NAME", f"{MODEL_HELP} Also shows its profiles.", None, "all models")] = None,
    as_json: Json = False,
) -> None:
    """List models, their files, and the measured profiles of one."""
    from ..io import home
    from ..loading.artifacts import local_weights
    from ..loading.presets import MODELS, model_spec

    specs = list(MODELS.values()) if model is None else [model_spec(model)]
    profiles = {} if model is None else named_profiles(specs[0])
    facts = list(map(model_facts, specs))
    if as_json:
        found = {} if model is None else {"profiles": list(map(str, profiles))}
        typer.echo(json.dumps({"home": str(home()), "models": facts} | found, indent=2))
        return
    console = result_console() if model else Console(highlight=False)
    console.print(model_table(facts))
    if model is not None:
        console.print("Sizes:", *map(size_text, specs[0].settings.schedules.offers()), soft_wrap=True)
    console.print(f"Files are read from {escape(str(home()))} (NEXTSCALE_HOME), then from the hub's cache.", soft_wrap=True)
    for path, profile in profiles.items():
        show_profile(console, path, profile)
    if model is None:
        show_next("nextscale models -m NAME  # all sizes and measured profiles of a model; --json lists addresses of files")
    elif profiles:
        show_next(f'nextscale generate -m {model} --method auto:lpips=0.1 PROMPT  # "auto" chooses a point of these profiles')
    elif (place := local_weights(specs[0])) is not None and place.exists():
        show_next(f"nextscale tune -m {model}  # measures a profile, from which `auto` chooses")
    else:
        show_next(f"nextscale download -m {model}  # then `nextscale tune -m {model}` measures a profile")


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    import torch

    from ..loading.presets import Embedded, build_model

    def file(source: Source | Embedded) -> dict[str, str | None]:
        return {"file": str(source.path), "url": None} if isinstance(source, Embedded) else {"file": source.local, "url": source.url}

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(spec.model).parameters())
    origin = None if spec.text_encoder is None else spec.text_encoder.origin
    return {
        "name": spec.name,
        "prompts": "class" if origin is None else "text",
        "parameters": parameters,
        "sizes": [size_text(size) for size in spec.settings.schedules.offers()],
        "weights": None if spec.weights is None else file(spec.weights),
        "tokenizer": file(spec.tokenizer_weights),
        "text_encoder": origin.file if isinstance(origin, Embedded) else origin,
    }


def model_table(models: Sequence[dict[str, Any]]) -> Table:
    table = plain_table("model", "input", "params", "sizes", "files", left=("model", "input", "sizes"), folded=("files",))
    for facts in models:
        count, sizes = facts["parameters"], facts["sizes"]
        parameters = f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.1f}B"
        shown = "\n".join(sizes) if len(sizes) <= FEW_SIZES else f"{len(sizes)} sizes"
        files = dict.fromkeys(link(facts[part]) for part in ("weights", "tokenizer"))
        table.add_row(facts["name"], facts["prompts"], parameters, shown, "\n".join(files))
    return table


def link(file: dict[str, str | None] | None) -> str:
    if file is None:
        return "no released weights"
    return "in the package" if file["url"] is None else f"[link={file['url']}]{file['file']}[/link]"


def show_profile(console: Console, path: Path, profile: Profile) -> None:
    """Prints the conditions of a profile, and its points."""
    console.print(f"[bold]{escape(str(path))}[/bold]", soft_wrap=True)
    unseen = f" not seen by the search over {profile.searched}" if profile.searched else ""  # `tune --from` does not search
    console.print(
        f"{profile.described}, {profile.dtype}, {profile.engine}, torch {profile.torch}, nextscale {profile.version}.\n"
        f"{profile.tested} prompts{unseen} ({profile.prompts}), seed {profile.seed}.",
        markup=False,
    )
    table = plain_table("speedup", "LPIPS (95 %)", "PSNR", "ms per image", "MACs", "method", folded=("method",))
    table.add_row("1.00", "", "", f"{profile.dense_ms:.1f}", "100%", "dense")
    others = [point for point in profile.skipping if point not in profile.points]
    for number, point in enumerate([*profile.points, *others]):
        cells = (f"{point.speedup.value:.2f}", str(point.lpips), f"{point.psnr:.1f} dB", f"{point.ms:.1f}", percent(point.macs))
        other = number >= len(profile.points)
        table.add_row(*cells, escape(f"{'for comparison: ' * other}{point.method}"), style="dim" if other else None)
    console.print(table)
