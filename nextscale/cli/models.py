"""`nextscale models`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..io import home
from ..loading.presets import MODELS, Embedded, ModelSpec, Source, TextSource, build_model
from ..schedules import BUDGETS, INFINITY_SIZES, STRIDE_8_BUDGETS, InfinitySchedules, Schedules
from .program import app


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models and the files that each of them needs."""
    if as_json:
        content = {"home": str(home()), "models": [model_facts(spec) for spec in MODELS.values()]}
        typer.echo(json.dumps(content, indent=2))
        return
    console = Console(highlight=False)
    for family, specs in groupby(MODELS.values(), key=lambda spec: spec.name.partition("-")[0]):
        show_family(console, family, list(specs))
    console.print(f"Infinity's --size also takes {', '.join(BUDGETS)}, nano's {', '.join(STRIDE_8_BUDGETS)}.")
    console.print("--json lists all sizes, and the address of every file.")
    console.print(f"Files are looked for in {escape(str(home()))} (NEXTSCALE_HOME), then in the hub's cache.", soft_wrap=True)
    console.print("nextscale download MODEL fetches them.")


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "prompts": "class" if spec.text_encoder is None else "text",
        "parameters": parameter_count(spec),
        "sizes": [f"{height}x{width}" for height, width in spec.settings.schedules.offers()],
        "weights": None if spec.weights is None else source_facts(spec.weights),
        "tokenizer": source_facts(spec.tokenizer_weights),
        "text_encoder": None if spec.text_encoder is None else encoder_name(spec.text_encoder),
    }


def source_facts(source: Source | Embedded) -> dict[str, str | None]:
    if isinstance(source, Embedded):
        return {"file": str(source.path), "url": None}
    return {"file": source.local, "url": source.url}


def encoder_name(source: TextSource) -> str:
    return source.origin.file if isinstance(source.origin, Embedded) else source.origin


def parameter_count(spec: ModelSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(spec.model).parameters())


def show_family(console: Console, family: str, specs: Sequence[ModelSpec]) -> None:
    encoder = specs[0].text_encoder
    table = Table("model", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("params", justify="right")
    table.add_column("sizes")
    table.add_column("weights and tokenizer", overflow="fold")
    for spec in specs:
        files = [file_link(spec.weights) if spec.weights else "no released weights", file_link(spec.tokenizer_weights)]
        named = "\n".join(dict.fromkeys(files))
        table.add_row(spec.name, short_count(parameter_count(spec)), short_sizes(spec.settings.schedules), named)
    console.print(f"[bold]{family}[/bold]: prompts are", "class numbers" if encoder is None else f"text, read by {encoder_name(encoder)}")
    console.print(table)
    if published := pages(specs):
        console.print("published at", *published)
    console.print()


def pages(specs: Sequence[ModelSpec]) -> list[str]:
    sources = [source for spec in specs for source in (spec.weights, spec.tokenizer_weights)]
    return list(dict.fromkeys(f"https://huggingface.co/{source.repository}" for source in sources if isinstance(source, Source)))


def file_link(source: Source | Embedded) -> str:
    if isinstance(source, Embedded):
        return "in the package"
    return f"[link={source.url}]{source.local}[/link]"


def short_count(parameters: int) -> str:
    return f"{parameters / 1e6:.0f}M" if parameters < 1e9 else f"{parameters / 1e9:.1f}B"


def short_sizes(book: Schedules) -> str:
    if isinstance(book, InfinitySchedules):
        return f"{len(INFINITY_SIZES)} aspect ratios\nof {book.budget} pixels"
    return "\n".join(f"{height}x{width}" for height, width in book.offers())
