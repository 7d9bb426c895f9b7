"""`nextscale convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..loading.conversion import Conversion
from ..loading.presets import model_spec
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
    conversion = Conversion.plan(model_spec(model), source, target, is_model=part is Part.model)
    require_writable([target, *conversion.settings], force)
    tensors = conversion.run(as_torch_dtype(dtype))
    typer.echo(f"{target}: {tensors} tensors, {target.stat().st_size / 2**20:.1f} MiB")
