"""A pipeline as one folder: settings, safetensors, tokenizer, tuning profiles, StageVAR ranks; read back bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from ..checkpoints import write_weights
from ..checkpoints.files import read_object
from ..device import DTYPES, check_quantize, choose_device, choose_dtype, choose_kv_dtype
from ..errors import CheckpointError, SettingError
from ..io import write_text
from ..methods.stagevar_ranks import rank_file, write_rank_table
from ..models.base import KvDtype
from ..models.quantization import Quantize
from ..models.var import ClassConfig
from ..pipeline import Pipeline, Settings
from ..text import ClipEncoder, QwenEncoder, T5Encoder, TextEncoder, WordTextEncoder
from ..text.files import is_hub_name
from ..text.prompts import ClassReader, EncoderOpener, TextReader
from ..text.words import FILE_NAME as WORDS
from .load import assemble, load, prompt_reader, released_spec
from .plain_values import from_plain, to_plain
from .presets import ModelConfig, ModelSpec, Source, TextSource, TokenizerConfig, build_model, build_tokenizer

INDEX, MODEL, TOKENIZER = "nextscale.json", "model.safetensors", "tokenizer.safetensors"
PROFILES = ("profile*.json", "*.profile.json")  # of tuning: beside the weights that they were measured with
FORMAT = 1
ENCODERS: dict[str, Any] = {"T5Encoder": T5Encoder, "QwenEncoder": QwenEncoder, "ClipEncoder": ClipEncoder, "words": WordTextEncoder.load}
NOWHERE = Source("", "")  # a saved part comes with its folder


class Pretrained:
    """What a pipeline's `from_pretrained` and `save_pretrained` do."""

    def load(self, source: str | Path, **options: Any) -> Pipeline:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return load_saved(folder, **options)
        if isinstance(source, Path) or str(source).startswith((".", "/", "~")):
            raise CheckpointError(f"{source} is not a folder. Pass one that save_pretrained wrote, or the name of a model")
        return load(source, **options)

    def save(self, pipeline: Pipeline, folder: str | Path) -> Path:
        return save(pipeline, Path(folder).expanduser())


# --- writing


def save(pipeline: Pipeline, folder: Path) -> Path:
    """The index is written last and taken away first: a folder that has one is whole."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file: give a folder")
    if pipeline.model.quantize is not None:
        raise SettingError(
            f"these weights were quantised to {pipeline.model.quantize} when they were loaded, and cannot be saved: save the pipeline"
            " loaded without quantize, and give quantize to from_pretrained"
        )
    index = {
        "format": FORMAT,
        "name": pipeline.name,
        "dtype": str(pipeline.model.dtype).removeprefix("torch."),
        "model": to_plain(pipeline.model.config),
        "tokenizer": to_plain(pipeline.tokenizer.config),
        "settings": to_plain(pipeline.settings),
        "text_encoder": encoder_entry(pipeline.reader),
    }
    beside = pipeline.weights_folder
    profiles = {profile for pattern in PROFILES for profile in beside.glob(pattern)} if beside else set()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    write_weights(pipeline.model, folder / MODEL, pipeline.model.layout, dtype=None)
    write_weights(pipeline.tokenizer, folder / TOKENIZER, pipeline.tokenizer.layout, dtype=None)
    if isinstance(pipeline.reader, TextReader) and index["text_encoder"]["kind"] == "words":
        encoder = pipeline.reader.encoder
        assert isinstance(encoder, WordTextEncoder)
        encoder.save(folder / WORDS)
    for profile in profiles:
        if profile.resolve().parent != folder.resolve():
            shutil.copyfile(profile, folder / profile.name)
    ranks = rank_file(folder / MODEL)
    if pipeline.model.rank_table is None:
        ranks.unlink(missing_ok=True)  # of a model that was saved here before
    else:
        write_rank_table(pipeline.model.rank_table, ranks)
    write_text(json.dumps(index, indent=2) + "\n", folder / INDEX)
    return folder


def encoder_entry(reader: object) -> dict[str, Any] | None:
    """How prompts are read: None for classes."""
    if isinstance(reader, ClassReader):
        return None
    assert isinstance(reader, TextReader)
    opener = reader.open_encoder
    if isinstance(opener, EncoderOpener) and opener.source is not None and not reader.is_open:
        return {"kind": opener.kind, "source": portable(opener.source), "reads_empty": reader.reads_empty}
    encoder = reader.encoder
    if isinstance(encoder, WordTextEncoder):
        return {"kind": "words", "source": WORDS, "reads_empty": reader.reads_empty}
    if isinstance(encoder, TextEncoder) and type(encoder).__name__ in ENCODERS:
        return {"kind": type(encoder).__name__, "source": portable(encoder.source), "reads_empty": reader.reads_empty}
    raise SettingError(f"a {type(encoder).__name__} cannot be saved: load the model with a folder or a hub name as text_encoder")


def portable(source: str | Path) -> str:
    """A hub name as it is, a folder by its whole path."""
    return str(source) if is_hub_name(source) else str(Path(source).expanduser().resolve())


# --- reading


@dataclass(frozen=True)
class Saved:
    """What the index of a folder says."""

    spec: ModelSpec
    dtype: torch.dtype
    encoder: str | None  # where its files are; None for classes


def load_saved(
    folder: Path,
    *,
    text_encoder: Any = None,
    offload_text: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    quantize: Quantize | None = None,
    kv_dtype: KvDtype | None = None,
    as_released: bool = False,
    engine: Any = None,
    graph_memory: int | None = None,
    download: bool = True,
) -> Pipeline:
    saved = read_index(folder)
    spec = released_spec(saved.spec) if as_released else saved.spec
    device = choose_device(device)
    reader = prompt_reader(spec, text_encoder or saved.encoder, device, offload_text, download)
    dtype, kv_dtype = choose_dtype(dtype or saved.dtype, device), choose_kv_dtype(kv_dtype)
    quantize = check_quantize(quantize, device, dtype)
    pipeline = assemble(spec, folder / MODEL, folder / TOKENIZER, reader, device, dtype, quantize, engine, graph_memory)
    pipeline.model.kv_dtype = kv_dtype
    return pipeline


def read_index(folder: Path) -> Saved:
    path = folder / INDEX
    if not path.exists():
        raise CheckpointError(f"{folder} has no {INDEX}: it is no folder that save_pretrained wrote, or writing it was interrupted")
    index = read_object(path)
    if index.get("format") != FORMAT:
        raise CheckpointError(f"{path} has the format {index.get('format')!r}; this version of nextscale reads {FORMAT}")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    try:
        model, tokenizer, settings = (from_plain(index.get(key), f"{path}: {key}") for key in ("model", "tokenizer", "settings"))
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply. Save the pipeline again") from error
    expected = ((model, get_args(ModelConfig)), (tokenizer, get_args(TokenizerConfig)), (settings, (Settings,)))
    dtype = index.get("dtype")
    if any(not isinstance(found, kinds) for found, kinds in expected) or not isinstance(dtype, str) or dtype not in dtypes:
        raise CheckpointError(f"{path} does not describe a model, a tokenizer, settings and a dtype. Save the pipeline again")
    check_buildable(path, model, tokenizer)
    source, encoder = text_source(index.get("text_encoder"), folder)
    if (source is None) != isinstance(model, ClassConfig):
        raise CheckpointError(f"{path}: text_encoder must be null exactly for models of classes; got {encoder!r}. Save the pipeline again")
    spec = ModelSpec(str(index.get("name")), model, tokenizer, settings, NOWHERE, NOWHERE, source)
    return Saved(spec, dtypes[dtype], encoder)


def check_buildable(path: Path, model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Raises CheckpointError for sizes that do not go together, such as fewer blocks than chunks. Takes 0.1 s for the largest model."""
    if model.dim % model.heads:
        raise CheckpointError(f"{path}: model.dim must be a multiple of model.heads; got {model.dim} and {model.heads}")
    builders: tuple[tuple[Any, Any], ...] = ((build_model, model), (build_tokenizer, tokenizer))
    for build, config in builders:
        try:
            with torch.device("meta"):
                build(config)
        except (ArithmeticError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path}: {config} cannot be built ({error}). Save the pipeline again") from error


def text_source(entry: object, folder: Path) -> tuple[TextSource | None, str | None]:
    match entry:
        case None:
            return None, None
        case {"kind": "words"}:
            return TextSource(str(folder / WORDS), WordTextEncoder.load), str(folder / WORDS)
        case {"kind": str(kind), "source": str(source), "reads_empty": bool(reads_empty)} if kind in ENCODERS:
            return TextSource(source, ENCODERS[kind], reads_empty), source
    raise CheckpointError(f"{folder / INDEX}: text_encoder is {entry!r}; expected one of the kinds {', '.join(ENCODERS)}")
