"""Loads the weights of cases through the ordinary strict loader, under their published names."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nextscale.checkpoints import load_weights, published_tensors
from nextscale.models import NextScaleModel
from nextscale.tokenizers.base import Tokenizer
from tests.parity.recipe import drawn_weights, recipe_value

NOTHING = r"(?!)"
ENCODER = r"(vae\.)?(encoder|quant_conv)\..*"
NETWORKS = r"(vae\.)?(encoder|quant_conv|post_quant_conv|decoder)\..*"  # all of a tokenizer but its quantizer


def fill(module: NextScaleModel | Tokenizer, folder: Path, file: str, case: Mapping[str, Any]) -> None:
    """Fills a module from a file, or with computed weights where the case gives a recipe instead."""
    if "salt" in case:
        slots = published_tensors(module, module.layout)
        fill_with(module, {key: torch.from_numpy(recipe_value(key, slot.shape, case["salt"])) for key, slot in slots.items()})
    elif "drawn_weights" in case:
        fill_with(module, drawn_weights(**case["drawn_weights"]))
    else:
        load_weights(module, folder / file, module.layout)


def fill_with(module: NextScaleModel | Tokenizer, tensors: Mapping[str, Tensor], zero: str = NOTHING) -> None:
    """Fills a module with tensors. Published names that match `zero` and are not among them become zero."""
    slots = published_tensors(module, module.layout)
    absent = {key: torch.zeros(slot.shape) for key, slot in slots.items() if key not in tensors and re.fullmatch(zero, key)}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "weights.safetensors"
        save_file({**tensors, **absent}, path)
        load_weights(module, path, module.layout)
