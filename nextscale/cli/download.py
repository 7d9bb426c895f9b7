"""`nextscale download`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import ModelName, Offline, option
from .show import show_next, stopping


def download(
    *,
    model: ModelName,
    to: Annotated[
        Path | None, option("--to", "FOLDER", "Folder of the files; set NEXTSCALE_HOME to it to load them.", None, "the hub's cache")
    ] = None,
    convert: Annotated[bool, option("--convert", None, "Also write pickled weights as safetensors, which are then loaded.")] = False,
    offline: Offline = False,
) -> None:
    """Download the weights, tokenizer and text encoder of a model.

    Skips existing files and continues interrupted downloads. Replaces files in FOLDER whose content differs from the hub's.
    Reads HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE.
    """
    from ..loading.load import download_model

    with stopping(lambda: "Complete files are kept; the same command continues."):
        found = download_model(model, to, convert, offline)
    if not found:
        typer.echo(f"{model} is part of the package; there is nothing to download.")
    for what, path in found.items():
        typer.echo(f"{what}: {path}")
    home = "" if to is None else f"NEXTSCALE_HOME={to} "
    show_next(f"{home}nextscale generate -m {model} PROMPT")
