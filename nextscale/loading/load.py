"""`load` makes a pipeline from a model's name and its published files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints import Layout, fits, load_weights, open_checkpoint, published_slots
from ..errors import CheckpointError, SettingError, WeightsMismatch
from ..io import home
from ..models import HartConfig, StarConfig
from ..models.base import NextScaleModel
from ..models.var import ClassConfig
from ..pipeline import Engine, Pipeline
from ..text import Encoder
from ..text.prompts import ClassReader, PromptReader, TextReader
from ..tokenizers import HartTokenizerConfig
from ..tokenizers.base import Tokenizer
from .hart_config import check_pair, hart_model_config, hart_tokenizer_config
from .presets import MODELS, Embedded, ModelConfig, ModelSpec, Source, TextSource, build_model, build_tokenizer, hart_settings, model_spec

PathLike = str | Path
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load(
    name: str,
    *,
    weights: PathLike | None = None,
    tokenizer: PathLike | None = None,
    text_encoder: Encoder | PathLike | None = None,
    offload_text: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    as_released: bool = False,
    engine: Engine | None = None,
    graph_memory: int | None = None,
) -> Pipeline:
    """A pipeline for one of `nextscale models`. "nano" comes with the package and needs nothing else.

    weights, tokenizer: the published files or folders (.pth, shards, safetensors); by default they are looked for under their
        published names in the folder that NEXTSCALE_HOME names, ~/.cache/nextscale if it is not set. HART: the config.json beside
        them is read as well, and a folder stands for the averaged weights in it (ema_model.bin).
    text_encoder: folder or hub name for text models, a file of words for nano; by default the one that the model was trained with.
        It is opened at the first text prompt.
    offload_text: its weights lie in the host's memory and are on the GPU only while a new prompt is encoded.
    device: by default the GPU if there is one. dtype: bfloat16 on a GPU, float32 on the CPU; float16 works too.
    as_released: STAR: all images read the first prompt's text, as in the released program.
    engine: "graphs" captures requests that come again as CUDA graphs, the default on a GPU; "eager" never does.
    graph_memory: bytes of the GPU that captured graphs may keep; None is 40 % of what it has.
    """
    spec = released_spec(model_spec(name)) if as_released else model_spec(name)
    device = choose_device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype not in DTYPES:
        raise SettingError(f"dtype {dtype}: choose one of {', '.join(str(known) for known in DTYPES)}")
    weights_path = find(weights, spec.weights, f"weights of {name}")
    tokenizer_path = find(tokenizer, spec.tokenizer_weights, f"tokenizer of {name}")
    spec = checkpoint_spec(spec, weights_path, tokenizer_path)
    reader = prompt_reader(spec, text_encoder, device, offload_text)
    with torch.device("meta"):
        model, images = build_model(spec.model), build_tokenizer(spec.tokenizer)
    load_module(model, weights_path, device, dtype)
    load_module(images, tokenizer_path, device, dtype)
    if isinstance(spec.model, HartConfig) and isinstance(spec.tokenizer, HartTokenizerConfig):
        check_pair(spec.model, spec.tokenizer)  # not earlier: a part that is no part of HART has a clearer refusal of its own
    pipe = Pipeline(model, images, reader, spec.settings, name, engine, graph_memory)
    pipe.refiners.open = lambda other: load_partner(spec, other, tokenizer=tokenizer, device=device, dtype=dtype, engine=engine)
    return pipe


def load_partner(spec: ModelSpec, name: str, **settings: Any) -> Pipeline:
    """A smaller model that shares a tokenizer with the one of `spec`, loaded in the same way."""
    if model_spec(name).tokenizer_weights != spec.tokenizer_weights:
        raise SettingError(f"{spec.name} and {name} were trained with different tokenizers: choose two models that share one")
    return load(name, **settings)


def released_spec(spec: ModelSpec) -> ModelSpec:
    if not isinstance(spec.model, StarConfig):
        raise SettingError(f"{spec.name} always does what its reference implementation does: leave out as_released, which is STAR's")
    return replace(spec, model=replace(spec.model, as_released=True))


def checkpoint_spec(spec: ModelSpec, weights: Path | None, tokenizer: Path | None) -> ModelSpec:
    """The spec as the checkpoints themselves have it, where they say so: HART's do. None for a part that is not going to be loaded."""
    if not isinstance(spec.model, HartConfig) or not isinstance(spec.tokenizer, HartTokenizerConfig):
        return spec
    model = spec.model if weights is None else hart_model_config(spec.model, weights)
    images = spec.tokenizer if tokenizer is None else hart_tokenizer_config(spec.tokenizer, tokenizer)
    return replace(spec, model=model, tokenizer=images, settings=hart_settings(model.sides))


def choose_device(wanted: str | torch.device | None) -> torch.device:
    """The one asked for if it is there; by default the GPU if there is one."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(wanted)):
        raise SettingError(f"device {str(wanted)!r}: choose cpu, cuda or cuda:N")
    device, gpus = torch.device(wanted), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise SettingError(f"device {wanted}: torch {torch.__version__} finds {gpus} GPU(s) here; cpu always works")
    return device


def prompt_reader(spec: ModelSpec, text_encoder: Encoder | PathLike | None, device: torch.device, offload: bool = False) -> PromptReader:
    source = spec.text_encoder
    if offload and (source is None or isinstance(source.origin, Embedded)):
        raise SettingError(f"{spec.name} has no text model that is worth moving: leave out offload_text")
    if offload and text_encoder is not None and not isinstance(text_encoder, str | Path):
        raise SettingError("offload_text is for text encoders that load opens: give your own one offload=True")
    if source is not None:
        return TextReader(partial(open_encoder, source, spec.model, text_encoder, device, offload), source.reads_empty)
    assert isinstance(spec.model, ClassConfig)
    if text_encoder is not None:
        raise SettingError(f"{spec.name} generates classes and reads no text: leave out text_encoder")
    return ClassReader(spec.model.classes)


def open_encoder(
    source: TextSource, config: ModelConfig, given: Encoder | PathLike | None, device: torch.device, offload: bool = False
) -> Encoder:
    if given is not None and not isinstance(given, str | Path):
        return given
    options: dict[str, Any] = {"tokens": config.text_tokens} if isinstance(config, HartConfig) else {}
    if offload:
        options["offload"] = True
    origin = source.origin
    opened = given or (find(None, origin, "text encoder") if isinstance(origin, Embedded) else origin)
    return source.encoder(opened, device=device, **options)


def find(given: PathLike | None, source: Source | Embedded | None, what: str) -> Path:
    if given is not None:
        return Path(given).expanduser()
    if isinstance(source, Embedded):
        if not source.path.is_file():
            raise CheckpointError(f"{what}: {source.path} comes with the package, but it is not there. Install nextscale again")
        return source.path
    if source is None:
        raise CheckpointError(f"the {what} have not been released: pass weights=... with your own file")
    path = home() / source.local
    if not path.exists():
        raise CheckpointError(f"{what}: nothing at {path}. Fetch {source.url} and put it there, or pass its path")
    return path


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
