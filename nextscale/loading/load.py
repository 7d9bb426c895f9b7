"""Pipelines from a model's name and its published files, from random weights, and models without weights."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints import check, convert, load_weights, open_checkpoint, published_tensors
from ..device import check_quantize, check_quantized_dtype, choose_device, choose_dtype, choose_kv_dtype, place
from ..errors import CheckpointError, SettingError, WeightsMismatch
from ..io import home, write_text
from ..models import HartConfig, InfinityConfig, StarConfig
from ..models.base import KvDtype, NextScaleModel
from ..models.quantization import Quantize, quantize_blocks
from ..models.var import ClassConfig
from ..pipeline import Pipeline
from ..profiles import fingerprint, own_profiles
from ..text import Encoder, RandomEncoder
from ..text.prompts import ClassReader, EncoderOpener, PromptReader, TextReader
from ..tokenizers import HartTokenizerConfig
from ..tokenizers.base import Tokenizer
from .artifacts import (
    converted_file,
    download_artifacts,
    encoder_artifact,
    fetch_missing,
    find,
    local_weights,
    profile_folders,
    rank_table_of,
    weight_artifacts,
)
from .hart_config import check_pair, checkpoint_spec, dump_config, own_config_file
from .presets import (
    MODELS,
    Embedded,
    ModelConfig,
    ModelSpec,
    build_on_meta,
    model_spec,
)

PathLike = str | Path


def load(
    name: str | ModelSpec,
    *,
    weights: PathLike | None = None,
    tokenizer: PathLike | None = None,
    text_encoder: Encoder | PathLike | None = None,
    offload_text: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    quantize: Quantize | None = None,
    kv_dtype: KvDtype | None = None,
    as_released: bool = False,
    download: bool = True,
    **options: Any,
) -> Pipeline:
    """Returns a pipeline for one of `nextscale models`. "nano" comes with the package and needs nothing else.

    Args:
        weights, tokenizer: published files or folders (.pth, shards, safetensors). By default they are looked for under their published
            names in the folder NEXTSCALE_HOME (~/.cache/nextscale if not set), then in the hub's cache. HART: the config.json beside them
            is read as well, and in a folder the averaged weights (ema_model.bin).
        text_encoder: folder or hub name for text models, a file of words for nano; by default the one that the model was trained with.
            It is opened at the first text prompt.
        offload_text: keep its weights in host memory, and on the GPU only while a new prompt is encoded.
        device: by default the GPU if there is one.
        dtype: by default bfloat16 on a GPU and float32 on the CPU; float16 works too.
        quantize: "fp8" runs the linear layers of the blocks in 8 bits on Ada, Hopper and newer GPUs; "int8" stores their weights in 8 bits
            on every device. Both take about half the memory of bfloat16: see docs/guides/memory.md.
        kv_dtype: "int8" stores keys and values of earlier stages in 8 bits; None in `dtype`.
        as_released: STAR: all images read the first prompt's text, as in the released program.
        download: fetch missing files from the hub after announcing their size; False never uses the network.
        options: `engine` and `graph_memory` of `Pipeline`.
    """
    spec = released_spec(model_spec(name)) if as_released else model_spec(name)
    device = choose_device(device)
    dtype, kv_dtype = choose_dtype(dtype, device), choose_kv_dtype(kv_dtype)
    quantize = check_quantize(quantize, device, dtype)
    check_text_options(spec, text_encoder, offload_text)  # before anything is fetched
    if download and (weights or spec.weights) is not None:
        given = {spec.weights if weights else None, spec.tokenizer_weights if tokenizer else None}
        fetch_missing(spec, [one for one in weight_artifacts(spec) if one.source not in given], with_encoder=text_encoder is None)
    weights = find(weights, spec.weights, f"weights of {spec.name}")
    tokenizer = find(tokenizer, spec.tokenizer_weights, f"tokenizer of {spec.name}")
    if not isinstance(spec.tokenizer_weights, Embedded):  # files of the package or a saved pipeline are complete
        spec = checkpoint_spec(spec, weights, tokenizer)
    model, images = build_on_meta(spec, kv_dtype)
    load_module(model, weights, device if quantize is None else torch.device("cpu"), dtype)
    if quantize is not None:
        quantize_model(model, quantize, device)
    load_module(images, tokenizer, device, dtype)
    model.rank_table = rank_table_of(model, weights)
    if isinstance(spec.model, HartConfig) and isinstance(spec.tokenizer, HartTokenizerConfig):
        check_pair(spec.model, spec.tokenizer)  # not earlier: a part of another model has a clearer refusal of its own
    profiles = own_profiles(profile_folders(spec, weights), model)
    reader = prompt_reader(spec, text_encoder, device, offload_text, download)
    pipeline = Pipeline(model, images, reader, spec.settings, spec.name, profiles=profiles, **options)
    pipeline.weights_folder = weights if weights.is_dir() else weights.parent
    pipeline.loras.weights = weights

    def open_partner(other: str) -> Pipeline:
        own: dict[str, Any] = {"text_encoder": text_encoder, "offload_text": offload_text, "download": download} | options
        own |= {"device": model.device, "dtype": model.dtype, "quantize": quantize, "kv_dtype": model.kv_dtype, "as_released": as_released}
        return load(other, tokenizer=tokenizer, **own)

    pipeline.partners.open = open_partner
    return pipeline


def released_spec(spec: ModelSpec) -> ModelSpec:
    if not isinstance(spec.model, StarConfig):
        raise SettingError(f"as_released must be left out for {spec.name}: only STAR has such a variant.")
    return replace(spec, model=replace(spec.model, as_released=True))


# --- prompts


def check_text_options(spec: ModelSpec, text_encoder: Encoder | PathLike | None, offload: bool) -> None:
    if spec.text_encoder is None and text_encoder is not None:
        raise SettingError(f"{spec.name} generates classes and reads no text: leave out text_encoder.")
    if offload and encoder_artifact(spec) is None:
        raise SettingError(f"{spec.name} has no large text encoder: leave out offload_text.")
    if offload and text_encoder is not None and not isinstance(text_encoder, str | Path):
        raise SettingError("offload_text needs an encoder that load opens; create your own with offload=True.")


def prompt_reader(
    spec: ModelSpec, text_encoder: Encoder | PathLike | None, device: torch.device, offload: bool = False, download: bool = True
) -> PromptReader:
    """Returns the reader of class numbers or texts. The text encoder is opened at the first prompt."""
    check_text_options(spec, text_encoder, offload)
    source, artifact = spec.text_encoder, encoder_artifact(spec)
    if source is None:
        assert isinstance(spec.model, ClassConfig)
        return ClassReader(spec.model.classes)
    named = text_encoder if isinstance(text_encoder, str | Path) else source.origin if text_encoder is None else None
    if isinstance(named, Embedded) or artifact is None:
        named = None  # a small encoder, which is saved itself

    def open_encoder(device: torch.device, offload: bool) -> Encoder:
        if text_encoder is not None and not isinstance(text_encoder, str | Path):
            return text_encoder
        options: dict[str, Any] = {"tokens": spec.model.text_tokens} if isinstance(spec.model, HartConfig) else {}
        options |= {"offload": True} if offload else {}
        path = text_encoder or (find(None, source.origin, "text encoder") if isinstance(source.origin, Embedded) else source.origin)
        if artifact is not None and artifact.encoder is not None:
            path = text_encoder or artifact.below(home()) or path
            path = path if download else artifact.encoder.open(path, download=False)
        return source.encoder(path, device=device, **options)

    kind = getattr(source.encoder, "__name__", "")
    return TextReader(EncoderOpener(open_encoder, named, kind, device, offload), source.reads_empty)


# --- weights


def load_module(module: NextScaleModel | Tokenizer, path: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Fills a module that was built on the meta device."""
    with naming_the_right_model(path):
        load_weights(module, path, module.layout, device=device, dtype=dtype, float32=module.float32)


@contextmanager
def naming_the_right_model(path: Path) -> Iterator[None]:
    """Adds the models that a checkpoint fits to its refusal."""
    try:
        yield
    except WeightsMismatch as error:
        others = identify(path)
        raise WeightsMismatch(f"{error} It looks like {' or '.join(others)}." if others else str(error)) from error


def identify(path: Path) -> list[str]:
    """Returns our models and tokenizers that a file fits."""
    found = []
    for spec in MODELS.values():
        modules: tuple[NextScaleModel | Tokenizer, ...] = build_on_meta(spec)
        for name, module in zip((f"the model {spec.name}", f"the tokenizer of {spec.name}"), modules, strict=True):
            with suppress(CheckpointError):
                if not check(published_tensors(module, module.layout), open_checkpoint(path, module.layout).shapes, module.layout):
                    found.append(name)
    return found


def quantize_model(model: NextScaleModel, quantize: Quantize, device: torch.device | None = None, keep: Collection[str] = ()) -> None:
    """Quantizes the weights of the blocks, one layer at a time, on `device`; a model in host memory takes no more of a GPU than its bytes.

    device: by default the model's. keep: names of layers that stay as they are (`models.quantization.BLOCK_LINEARS`).
    """
    device = device or model.device
    model.fingerprint = fingerprint(model)
    quantize_blocks(model, quantize, device, keep)
    place(model, device, model.dtype, model.float32)


def converted_files(spec: ModelSpec, target: Path) -> list[Path]:
    """Returns the files that `convert_weights` writes: HART's settings, which the tensors do not show, go beside the target."""
    return [target, own_config_file(target)] if isinstance(spec.model, HartConfig) else [target]


def convert_weights(spec: ModelSpec, source: Path, target: Path, is_model: bool, dtype: torch.dtype | None = None) -> int:
    """Writes a published model or tokenizer as one safetensors file. Returns the number of tensors; they keep their dtype by default."""
    spec = checkpoint_spec(spec, source if is_model else None, None if is_model else source)
    config = spec.model if is_model else spec.tokenizer
    module = build_on_meta(spec)[0 if is_model else 1]
    with naming_the_right_model(source):
        tensors = convert(source, target, module, module.layout, dtype)
    if isinstance(config, HartConfig | HartTokenizerConfig):
        write_text(dump_config(config), own_config_file(target))
    return tensors


def download_model(name: str, to: Path | None = None, convert: bool = False, offline: bool = False) -> dict[str, Path]:
    """Finds everything that a model needs, or fetches it into the hub's cache or below `to`. Returns paths by description.

    Files below `to` with another content than the hub's are fetched again. Offline, missing and changed files are errors.
    convert: also write pickled weights as safetensors where `load` finds them first.
    """
    spec, paths = model_spec(name), {}
    for artifact, path in download_artifacts(spec, to, offline, room=2.0 if convert else 1.0).items():
        files = path.iterdir() if path.is_dir() else [path]
        if convert and artifact.encoder is None and not any(file.suffix == ".safetensors" for file in files):
            source, path = path, converted_file(path)
            convert_weights(spec, source, path, is_model=artifact.source is spec.weights)
        paths[artifact.what] = path
    return paths


# --- without published weights


def without_weights(
    spec: ModelSpec, dtype: torch.dtype, quantize: Quantize | None = None, kv_dtype: KvDtype | None = None, weights: Path | None = None
) -> tuple[NextScaleModel, Tokenizer]:
    """Returns the model and its tokenizer on the meta device, as `load` with these options would make them."""
    check_quantized_dtype(quantize, dtype)
    model, tokenizer = build_on_meta(spec, kv_dtype)
    for module in (model, tokenizer):
        place(module, torch.device("meta"), dtype, module.float32)
    if quantize is not None:
        quantize_blocks(model, quantize)
    files = weights or local_weights(spec)
    model.rank_table = None if files is None else rank_table_of(model, files)
    return model, tokenizer


def random_pipeline(
    spec: str | ModelSpec,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    quantize: Quantize | None = None,
    kv_dtype: KvDtype | None = None,
    seed: int = 0,
) -> Pipeline:
    """Returns a pipeline with random weights; prompts are read by a random encoder."""
    spec, device = model_spec(spec), torch.device(device)
    quantize = check_quantize(quantize, device, dtype)
    model, tokenizer = build_on_meta(spec, choose_kv_dtype(kv_dtype))
    generator = torch.Generator(device).manual_seed(seed)
    fill_random(model, generator, dtype, model.float32, device if quantize is None else torch.device("cpu"))
    fill_random(tokenizer, generator, dtype, tokenizer.float32)
    if quantize is not None:
        quantize_model(model, quantize, device)
    pipe = Pipeline(model, tokenizer, prompt_reader(spec, random_encoder(spec.model, device), device), spec.settings, spec.name)
    pipe.partners.open = partial(random_pipeline, device=device, dtype=dtype, quantize=quantize, kv_dtype=kv_dtype, seed=seed)
    return pipe


def random_encoder(config: ModelConfig, device: torch.device) -> RandomEncoder | None:
    """Returns an encoder whose features have the form that the model reads; None for classes."""
    if not isinstance(config, HartConfig | StarConfig | InfinityConfig):
        return None
    tokens = config.text_tokens if isinstance(config, HartConfig) else None
    return RandomEncoder(config.text_channels, tokens=tokens, pooled=isinstance(config, StarConfig), device=device)


def fill_random(
    module: nn.Module, generator: torch.Generator, dtype: torch.dtype, float32: tuple[str, ...], device: torch.device | None = None
) -> None:
    """Replaces every parameter: matrices that keep the scale of their input, small biases, norms near one.

    device: where parameters go, one by one; by default the generator's, on which the numbers are drawn.
    """
    for name, parameter in list(module.named_parameters()):
        owner, last = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
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
        value = value.to(torch.float32 if name.startswith(float32) else dtype).to(device or generator.device)
        setattr(owner, last, nn.Parameter(value, requires_grad=False))
