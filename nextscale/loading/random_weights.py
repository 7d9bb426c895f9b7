"""Well-behaved random weights, for speed measurements and tests where no checkpoint is at hand."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..device import check_quantize, choose_kv_dtype
from ..models import HartConfig, InfinityConfig, StarConfig
from ..models.base import KvDtype
from ..models.quantization import Quantize
from ..pipeline import Pipeline
from ..text import RandomEncoder
from .load import prompt_reader
from .presets import ModelConfig, ModelSpec, build_model, build_tokenizer, model_spec, smaller_models
from .quantizing import quantize_model


def random_pipeline(
    spec: str | ModelSpec,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    quantize: Quantize | None = None,
    kv_dtype: KvDtype | None = None,
    seed: int = 0,
) -> Pipeline:
    """A pipeline of a known layout whose images mean nothing; prompts are read by a random encoder."""
    if isinstance(spec, str):
        spec = model_spec(spec)
    device = torch.device(device)
    quantize = check_quantize(quantize, device, dtype)
    with torch.device("meta"):
        model, tokenizer = build_model(spec.model), build_tokenizer(spec.tokenizer)
    generator = torch.Generator(device).manual_seed(seed)
    fill_random(model, generator, dtype, model.float32, device if quantize is None else torch.device("cpu"))
    fill_random(tokenizer, generator, dtype, tokenizer.float32)
    if quantize is not None:
        quantize_model(model, quantize, device)
    model.kv_dtype = choose_kv_dtype(kv_dtype)
    pipe = Pipeline(model, tokenizer, prompt_reader(spec, random_encoder(spec.model, device), device), spec.settings, spec.name)
    pipe.refiners.fitting = smaller_models(spec)
    pipe.refiners.open = lambda name: random_pipeline(name, device=device, dtype=dtype, quantize=quantize, kv_dtype=kv_dtype, seed=seed)
    return pipe


def random_encoder(config: ModelConfig, device: torch.device) -> RandomEncoder | None:
    """An encoder whose features have the form that the model reads; None where it reads classes."""
    match config:
        case HartConfig():
            return RandomEncoder(config.text_channels, tokens=config.text_tokens, device=device)
        case StarConfig():
            return RandomEncoder(config.text_channels, pooled=True, device=device)
        case InfinityConfig():
            return RandomEncoder(config.text_channels, device=device)
    return None


def fill_random(
    module: nn.Module, generator: torch.Generator, dtype: torch.dtype, float32: tuple[str, ...], device: torch.device | None = None
) -> None:
    """Replaces every parameter: matrices that keep the size of what they are given, small biases, norms near one.

    device: where they go, one by one; None is that of the generator, whose numbers do not depend on it.
    """
    for name, parameter in list(module.named_parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
        last = name.rpartition(".")[2]
        kind = dtype if not name.startswith(float32) else torch.float32
        value = torch.empty(parameter.shape, device=generator.device).normal_(generator=generator)
        if isinstance(owner, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
            value = 0.1 * value + (1 if last == "weight" else 0)
        elif last == "log_temperature":
            value = math.log(4) + 0.5 * value
        elif last == "bias":
            value = 0.1 * value
        elif isinstance(owner, nn.Linear | nn.Conv2d):
            value = value / math.sqrt(math.prod(parameter.shape[1:]))
        elif "modulation_table" in name or name.startswith("pos_") or "level_embed" in name:
            value = 0.3 * value
        setattr(owner, last, nn.Parameter(value.to(kind).to(device or generator.device), requires_grad=False))
