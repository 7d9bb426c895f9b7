"""`nextscale convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..checkpoints import convert as convert_checkpoint
from ..io import write_text
from ..loading.config_file import own_config_file
from ..loading.hart_config import dump_config
from ..loading.load import checkpoint_spec, naming_the_right_model
from ..loading.presets import build_model, build_tokenizer, model_spec
from ..models import HartConfig
from ..tokenizers import HartTokenizerConfig
from .files import require_writable
from .options import DTYPES, Dtype, Force, ModelName, as_torch_dtype
from .program import app


class Part(StrEnum):
    model = "model"
    tokenizer = "tokenizer"


@app.command()
def convert(
    *,
    model: ModelName,
    source: Annotated[Path, typer.Argument(metavar="IN", help="An official file, or a folder of shards.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.", show_default=False)],
    part: Annotated[Part, typer.Option("--part", metavar="PART", help="What IN holds: model or tokenizer.")] = Part.model,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", metavar="DTYPE", show_default="as in IN", help=f"Type of the written weights: {DTYPES}.")
    ] = None,
    force: Force = False,
) -> None:
    """Write an official checkpoint as one safetensors file, under the published names.

    HART's settings, which the tensors do not say, go into a file beside it.
    """
    is_model = part is Part.model
    spec = checkpoint_spec(model_spec(model), source if is_model else None, None if is_model else source)
    config = spec.model if is_model else spec.tokenizer
    settings = {own_config_file(target): dump_config(config)} if isinstance(config, HartConfig | HartTokenizerConfig) else {}
    require_writable([target, *settings], force)
    with torch.device("meta"):
        module = build_model(spec.model) if is_model else build_tokenizer(spec.tokenizer)
    with naming_the_right_model(source):
        tensors = convert_checkpoint(source, target, module, module.layout, as_torch_dtype(dtype))
    for file, text in settings.items():
        write_text(text, file)
    typer.echo(f"{target}: {tensors} tensors, {target.stat().st_size / 2**20:.1f} MiB")
