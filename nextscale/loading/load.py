"""`load` makes a pipeline from a model's name and its published files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..device import check_quantize, choose_device, choose_dtype, choose_kv_dtype
from ..errors import CheckpointError, SettingError
from ..io import home
from ..models import HartConfig, StarConfig
from ..models.base import KvDtype
from ..models.quantization import Quantize
from ..models.var import ClassConfig
from ..pipeline import Engine, Pipeline
from ..profiles import own_profiles
from ..text import Encoder
from ..text.files import EncoderSource
from ..text.prompts import ClassReader, EncoderOpener, PromptReader, TextReader
from ..tokenizers import HartTokenizerConfig
from .artifacts import Weights, encoder_part, weight_parts
from .beside import profile_folders, rank_table_of
from .fetch import locate, require_parts
from .hart_config import check_pair
from .modules import checkpoint_spec, load_module
from .presets import Embedded, ModelSpec, Source, build_model, build_tokenizer, model_spec, require_shared_tokenizer, smaller_models
from .quantizing import quantize_model

PathLike = str | Path


def load(
    name: str,
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
    engine: Engine | None = None,
    graph_memory: int | None = None,
    download: bool = True,
) -> Pipeline:
    """A pipeline for one of `nextscale models`. "nano" comes with the package and needs nothing else.

    weights, tokenizer: the published files or folders (.pth, shards, safetensors); by default they are looked for under their
        published names in the folder that NEXTSCALE_HOME names, ~/.cache/nextscale if it is not set, then in the hub's cache.
        HART: the config.json beside them is read as well, and a folder stands for the averaged weights in it (ema_model.bin).
    text_encoder: folder or hub name for text models, a file of words for nano; by default the one that the model was trained with.
        It is opened at the first text prompt.
    offload_text: its weights lie in the host's memory and are on the GPU only while a new prompt is encoded.
    device: by default the GPU if there is one. dtype: bfloat16 on a GPU, float32 on the CPU; float16 works too.
    quantize: "fp8" runs the products of the blocks in eight bits, on Ada, Hopper and newer GPUs; "int8" keeps their weights in eight bits,
        anywhere. Both take about half the memory of bfloat16: see docs/quantisation.md.
    kv_dtype: "int8" keeps keys and values of earlier stages in 8 bits, which halves them; None keeps them in `dtype`.
    as_released: STAR: all images read the first prompt's text, as in the released program.
    engine: "graphs" captures requests that come again as CUDA graphs, the default on a GPU; "eager" never does.
    graph_memory: bytes of the GPU that captured graphs may keep; None is 40 % of what it has.
    download: fetch what is on no disk from the hub, after saying what and how much; False never asks the network.
    """
    spec = released_spec(model_spec(name)) if as_released else model_spec(name)
    device = choose_device(device)
    dtype, kv_dtype = choose_dtype(dtype, device), choose_kv_dtype(kv_dtype)
    quantize = check_quantize(quantize, device, dtype)
    prompt_reader(spec, text_encoder, device, offload_text)  # what does not fit is refused before anything is fetched
    if download and (weights or spec.weights) is not None:  # weights that nobody has released are refused below
        not_given = {source for given, source in ((weights, spec.weights), (tokenizer, spec.tokenizer_weights)) if given is None}
        require_parts(spec, [part for part in weight_parts(spec) if part.source in not_given], with_encoder=text_encoder is None)
    weights_path = find(weights, spec.weights, f"weights of {name}")
    tokenizer_path = find(tokenizer, spec.tokenizer_weights, f"tokenizer of {name}")
    spec = checkpoint_spec(spec, weights_path, tokenizer_path)
    reader = prompt_reader(spec, text_encoder, device, offload_text, download)
    pipeline = assemble(spec, weights_path, tokenizer_path, reader, device, dtype, quantize, engine, graph_memory)
    pipeline.model.kv_dtype = kv_dtype
    pipeline.refiners.open = lambda other: load_partner(
        spec,
        other,
        tokenizer=tokenizer_path,
        text_encoder=text_encoder,
        offload_text=offload_text,
        device=pipeline.model.device,
        dtype=pipeline.model.dtype,
        quantize=quantize,
        kv_dtype=pipeline.model.kv_dtype,
        as_released=as_released,
        engine=engine,
        graph_memory=graph_memory,
        download=download,
    )
    return pipeline


def assemble(
    spec: ModelSpec,
    weights: Path,
    tokenizer: Path,
    reader: PromptReader,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize | None,
    engine: Engine | None,
    graph_memory: int | None,
) -> Pipeline:
    """Reads the weights of both modules and puts them together."""
    with torch.device("meta"):
        model, images = build_model(spec.model), build_tokenizer(spec.tokenizer)
    load_module(model, weights, device if quantize is None else torch.device("cpu"), dtype)
    if quantize is not None:
        quantize_model(model, quantize, device)
    load_module(images, tokenizer, device, dtype)
    model.rank_table = rank_table_of(model, weights)
    if isinstance(spec.model, HartConfig) and isinstance(spec.tokenizer, HartTokenizerConfig):
        check_pair(spec.model, spec.tokenizer)  # not earlier: a part that is no part of HART has a clearer refusal of its own
    profiles = own_profiles(profile_folders(spec, weights), model)
    pipeline = Pipeline(model, images, reader, spec.settings, spec.name, engine, graph_memory, profiles)
    pipeline.weights_folder = weights if weights.is_dir() else weights.parent
    pipeline.refiners.fitting = smaller_models(spec)
    return pipeline


def load_partner(spec: ModelSpec, name: str, **settings: Any) -> Pipeline:
    """A smaller model that shares a tokenizer with the one of `spec`, loaded in the same way."""
    require_shared_tokenizer(spec, model_spec(name))
    return load(name, **settings)


def released_spec(spec: ModelSpec) -> ModelSpec:
    if not isinstance(spec.model, StarConfig):
        raise SettingError(f"{spec.name} always does what its reference implementation does: leave out as_released, which is STAR's")
    return replace(spec, model=replace(spec.model, as_released=True))


def prompt_reader(
    spec: ModelSpec, text_encoder: Encoder | PathLike | None, device: torch.device, offload: bool = False, download: bool = True
) -> PromptReader:
    source = spec.text_encoder
    if offload and encoder_part(spec) is None:
        raise SettingError(f"{spec.name} has no text model that is worth moving: leave out offload_text")
    if offload and text_encoder is not None and not isinstance(text_encoder, str | Path):
        raise SettingError("offload_text is for text encoders that load opens: give your own one offload=True")
    if source is not None:
        named = text_encoder if isinstance(text_encoder, str | Path) else source.origin if text_encoder is None else None
        if isinstance(named, Embedded) or encoder_part(spec) is None:
            named = None  # it is small: what is saved is the encoder itself
        opened = partial(open_encoder, spec, text_encoder, download)
        kind = getattr(source.encoder, "__name__", "")
        return TextReader(EncoderOpener(opened, named, kind, device, offload, can_offload=named is not None), source.reads_empty)
    assert isinstance(spec.model, ClassConfig)
    if text_encoder is not None:
        raise SettingError(f"{spec.name} generates classes and reads no text: leave out text_encoder")
    return ClassReader(spec.model.classes)


def open_encoder(spec: ModelSpec, given: Encoder | PathLike | None, download: bool, device: torch.device, offload: bool) -> Encoder:
    if given is not None and not isinstance(given, str | Path):
        return given
    source = spec.text_encoder
    assert source is not None
    options: dict[str, Any] = {"tokens": spec.model.text_tokens} if isinstance(spec.model, HartConfig) else {}
    if offload:
        options["offload"] = True
    return source.encoder(encoder_path(spec, given, download), device=device, **options)


def encoder_path(spec: ModelSpec, given: PathLike | None, download: bool) -> PathLike:
    """What was given, or what the model was trained with: the file of the package, a folder, or a hub name where that may be fetched."""
    source, part = spec.text_encoder, encoder_part(spec)
    assert source is not None
    if given is None and isinstance(source.origin, Embedded):
        return find(None, source.origin, "text encoder")
    named = given or (part and part.below(home())) or str(source.origin)
    return named if download or part is None else EncoderSource(named, part.files, download=False).open()


def find(given: PathLike | None, source: Source | Embedded | None, what: str) -> Path:
    """The path that was given, the file of the package, or where a published one lies on this machine."""
    if given is not None:
        return Path(given).expanduser()
    if isinstance(source, Embedded):
        if not source.path.is_file():
            raise CheckpointError(f"{what}: {source.path} comes with the package, but it is not there. Install nextscale again")
        return source.path
    if source is None:
        raise CheckpointError(f"the {what} have not been released: pass weights=... with your own file")
    path = locate(Weights(what, source))
    if path is None:
        raise CheckpointError(
            f"{what}: nothing at {home() / source.local}, and nothing in the hub's cache. Fetch {source.url} and put it there, "
            "or pass its path, or allow downloads"
        )
    return path
