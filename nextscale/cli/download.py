"""`nextscale download`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..loading.fetch import download_model
from .options import MODEL_HELP, Offline
from .program import app


@app.command()
def download(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}.", show_default=False)],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            show_default="the hub's cache",
            help="Folder for the files; with NEXTSCALE_HOME set to it they are found there.",
        ),
    ] = None,
    convert: Annotated[
        bool, typer.Option("--convert", help="Also write pickled weights as safetensors beside them; those are then loaded.")
    ] = False,
    offline: Offline = False,
) -> None:
    """Fetch what a model needs: weights, tokenizer and text encoder.

    Only missing files are fetched, and an interrupted download goes on where it stopped. Files in DIR with other content than the hub's are
    replaced. HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are honored.
    """
    found = download_model(model, to, convert, offline)
    if not found:
        typer.echo(f"{model} comes with the package: there is nothing to fetch")
    for what, path in found.items():
        typer.echo(f"{what}: {path}")
