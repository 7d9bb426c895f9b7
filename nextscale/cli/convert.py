"""`nextscale convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .files import require_writable
from .options import DtypeName, Force, ModelName, option
from .parse import torch_dtype
from .show import show_next


def convert(
    *,
    model: ModelName,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Published file, or a folder of shards.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.", show_default=False)],
    part: Annotated[Literal["model", "tokenizer", "lora"], option("--part", "PART", "Content of IN: model, tokenizer or lora.")] = "model",
    dtype: Annotated[
        DtypeName | None, option("--dtype", "DTYPE", "Type of the written weights: float32, bfloat16 or float16.", None, "as in IN")
    ] = None,
    force: Force = False,
) -> None:
    """Convert a published checkpoint to one safetensors file with the published names.

    Writes HART's settings, which its tensors do not contain, into a file beside it.
    """
    from ..loading.load import convert_weights, converted_files
    from ..loading.presets import model_spec

    spec = model_spec(model)
    if part == "lora":
        from ..checkpoints.adapters import convert_adapter

        require_writable([target], force)
        typer.echo(f"{target}: {convert_adapter(source, target)} tensors")
        show_next(f"nextscale generate -m {model} --lora {target} PROMPT")
        return
    require_writable(converted_files(spec, target), force)
    tensors = convert_weights(spec, source, target, part == "model", torch_dtype(dtype))
    typer.echo(f"{target}: {tensors} tensors, {target.stat().st_size / 2**20:.1f} MiB")
    show_next(f"nextscale generate -m {model} --{'weights' if part == 'model' else part} {target} PROMPT")
