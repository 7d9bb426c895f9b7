"""Writes a trained model as the files of the package."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from nextscale.checkpoints import write_weights
from nextscale.errors import CheckpointError
from nextscale.models import Infinity
from nextscale.text.words import FILE_NAME as WORDS
from nextscale.text.words import WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer

MODEL, TOKENIZER = "model.safetensors", "tokenizer.safetensors"
MOST_BYTES = 40_000_000  # all files together: everyone who installs the package downloads them


def write_bundle(
    model: Infinity, tokenizer: InfinityTokenizer, words: WordTextEncoder, folder: str | Path, dtype: torch.dtype = torch.float16
) -> int:
    """Writes model, tokenizer and word encoder under the names of the presets. Returns their size in bytes.

    All three replace older ones at the end, once they are written, small enough and finite in `dtype`.
    """
    for part, module in (("model", model), ("tokenizer", tokenizer), ("word encoder", words.model)):
        require_finite(module, part, dtype)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".bundle-", dir=folder) as name:
            written = Path(name)
            write_weights(model, written / MODEL, model.layout, dtype)
            write_weights(tokenizer, written / TOKENIZER, tokenizer.layout, dtype)
            words.save(written / WORDS, dtype)
            sizes = {file: (written / file).stat().st_size for file in (MODEL, TOKENIZER, WORDS)}
            if sum(sizes.values()) > MOST_BYTES:
                named = ", ".join(f"{file} {size / 1e6:.1f} MB" for file, size in sizes.items())
                raise CheckpointError(f"{named}: more than the {MOST_BYTES / 1e6:.0f} MB that the package may carry. Train a smaller model")
            for file in sizes:
                os.replace(written / file, folder / file)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error}). Check the free space and the permissions there") from error
    return sum(sizes.values())


def require_finite(module: nn.Module, part: str, dtype: torch.dtype) -> None:
    bad = [name for name, tensor in module.state_dict().items() if not tensor.to(dtype).isfinite().all()]
    if bad:
        raise CheckpointError(f"the {part} has values that are not finite as {dtype}: {', '.join(bad[:4])}. No file was written")
