"""Fills modules from checkpoints; a checkpoint of another model is recognised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..checkpoints import Layout, fits, load_weights, open_checkpoint, published_slots
from ..errors import CheckpointError, WeightsMismatch
from ..models import HartConfig
from ..models.base import NextScaleModel
from ..tokenizers import HartTokenizerConfig
from ..tokenizers.base import Tokenizer
from .hart_config import hart_model_config, hart_tokenizer_config
from .presets import MODELS, ModelSpec, build_model, build_tokenizer, hart_settings


def checkpoint_spec(spec: ModelSpec, weights: Path | None, tokenizer: Path | None) -> ModelSpec:
    """The spec as the checkpoints themselves have it, where they say so: HART's do. None for a part that is not going to be loaded."""
    if not isinstance(spec.model, HartConfig) or not isinstance(spec.tokenizer, HartTokenizerConfig):
        return spec
    model = spec.model if weights is None else hart_model_config(spec.model, weights)
    images = spec.tokenizer if tokenizer is None else hart_tokenizer_config(spec.tokenizer, tokenizer)
    return replace(spec, model=model, tokenizer=images, settings=hart_settings(model.sides))


@contextmanager
def naming_the_right_model(path: Path) -> Iterator[None]:
    """Adds to the refusal of a checkpoint which of our models it looks like."""
    try:
        yield
    except WeightsMismatch as error:
        others = identify(path)
        raise WeightsMismatch(f"{error} It looks like {' or '.join(others)}." if others else str(error)) from error


def load_module(module: NextScaleModel | Tokenizer, path: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Fills a module built on the meta device."""
    with naming_the_right_model(path):
        load_weights(module, path, module.layout, device=device, dtype=dtype, float32=module.float32)


def identify(path: Path) -> list[str]:
    """Which of our models and tokenizers a file could be."""
    found = []
    for spec in MODELS.values():
        with torch.device("meta"):
            modules: dict[str, NextScaleModel | Tokenizer] = {
                f"the model {spec.name}": build_model(spec.model),
                f"the tokenizer of {spec.name}": build_tokenizer(spec.tokenizer),
            }
        found += [what for what, module in modules.items() if _holds(path, module, module.layout)]
    return found


def _holds(path: Path, module: nn.Module, layout: Layout) -> bool:
    try:
        shapes = open_checkpoint(path, layout).shapes
    except CheckpointError:
        return False
    return fits(published_slots(module, layout), shapes, layout)
