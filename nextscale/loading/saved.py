"""A pipeline as one folder: settings, safetensors, tokenizer, tuning profiles, StageVAR ranks; read back bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import torch

from ..checkpoints import write_weights
from ..checkpoints.files import read_object
from ..errors import CheckpointError, SettingError
from ..guidance import ConstantGuidance, Guidance, RampGuidance, StageGuidance
from ..io import expanded, write_text
from ..methods.stagevar_ranks import rank_file, write_rank_table
from ..models.var import ClassConfig
from ..pipeline import Pipeline, Settings
from ..schedules import InfinitySchedules, Schedules, SquareSchedules
from ..serialization import from_plain, to_plain
from ..text import ClipEncoder, QwenEncoder, T5Encoder, TextEncoder, WordTextEncoder
from ..text.files import is_hub_name
from ..text.prompts import ClassReader, EncoderOpener, TextReader
from ..text.words import FILE_NAME as WORDS
from ..validation import require
from .load import load as load_model
from .presets import (
    MODEL_CLASSES,
    TOKENIZER_CLASSES,
    Embedded,
    ModelConfig,
    ModelSpec,
    TextSource,
    TokenizerConfig,
    build_on_meta,
    check_size,
)

INDEX, MODEL, TOKENIZER = "nextscale.json", "model.safetensors", "tokenizer.safetensors"
PROFILES = ("profile*.json", "*.profile.json")
FORMAT = 2
FORMAT_1_NAMES = {"SquareBook": "SquareSchedules", "InfinityBook": "InfinitySchedules", "forbidden": "suppressed_codes"}
ENCODERS: dict[str, Any] = {"T5Encoder": T5Encoder, "QwenEncoder": QwenEncoder, "ClipEncoder": ClipEncoder, "words": WordTextEncoder.load}
REPAIR = "Save the pipeline again."


@dataclass(frozen=True)
class EncoderEntry:
    kind: Literal["T5Encoder", "QwenEncoder", "ClipEncoder", "words"]
    source: str
    reads_empty: bool


@dataclass(frozen=True)
class Index:
    """The content of a folder's nextscale.json."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    model: ModelConfig
    tokenizer: TokenizerConfig
    settings: Settings
    text_encoder: EncoderEntry | None  # None for classes

    @classmethod
    def from_plain(cls, content: dict[str, Any], where: str) -> Index:
        """Raises ValueError for unknown classes and fields, and for sizes that no model has or that do not go together."""
        choices: Mapping[Any, tuple[type, ...]] = {
            ModelConfig: tuple(MODEL_CLASSES),
            TokenizerConfig: tuple(TOKENIZER_CLASSES),
            Schedules: (SquareSchedules, InfinitySchedules),
            Guidance: (ConstantGuidance, RampGuidance, StageGuidance),
        }
        index = from_plain(cls, content, where, choices)
        for part in (index.model, index.tokenizer, index.settings.schedules):
            for name, value in vars(part).items():
                check_size(name, value)
        if (index.text_encoder is None) != isinstance(index.model, ClassConfig):
            raise ValueError("text_encoder must be null for models of classes, and for no others")
        try:
            if index.model.dim % index.model.heads:
                raise ValueError(f"model.dim must be a multiple of model.heads; got {index.model.dim} and {index.model.heads}")
            build_on_meta(index.spec(Path()))  # takes 0.1 s for the largest model
        except (ArithmeticError, RuntimeError, ValueError) as error:
            raise ValueError(f"{index.model} with {index.tokenizer} cannot be built ({error})") from error
        return index

    def spec(self, folder: Path) -> ModelSpec:
        files = [Embedded(str(folder / file)) for file in (MODEL, TOKENIZER)]
        entry = self.text_encoder
        source = None if entry is None else TextSource(entry.source, ENCODERS[entry.kind], entry.reads_empty)
        return ModelSpec(self.name, self.model, self.tokenizer, self.settings, files[0], files[1], source)


def load(source: str | Path, **options: Any) -> Pipeline:
    folder = expanded(source)
    if folder.is_dir():
        return load_saved(folder, **options)
    if isinstance(source, Path) or str(source).startswith((".", "/", "~")):
        raise CheckpointError(f"{source} is not a folder. Pass one that save_pretrained wrote, or the name of a model.")
    return load_model(source, **options)


def save(pipeline: Pipeline, folder: str | Path) -> Path:
    """Writes the index last and removes it first, so that a folder with an index is complete."""
    model: Any = pipeline.model
    tokenizer: Any = pipeline.tokenizer
    folder = expanded(folder)
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"the target must be a folder; got the file {folder}.")
    if model.quantize is not None:
        raise SettingError(
            f"the model must not be quantized; got {model.quantize}. Save the pipeline loaded without quantize, and pass "
            "quantize to from_pretrained."
        )
    dtype: Any = str(model.dtype).removeprefix("torch.")
    index = Index(pipeline.name, dtype, model.config, tokenizer.config, pipeline.settings, encoder_entry(pipeline.reader))
    content = {field.name: to_plain(getattr(index, field.name)) for field in fields(index)}
    try:
        Index.from_plain(content, "the pipeline")
    except ValueError as error:
        raise SettingError(f"a pipeline must consist of classes of nextscale to be saved: {error}.") from error
    beside = pipeline.weights_folder
    profiles = {profile for pattern in PROFILES for profile in beside.glob(pattern)} if beside else set()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    write_weights(model, folder / MODEL, model.layout, dtype=None)
    write_weights(tokenizer, folder / TOKENIZER, tokenizer.layout, dtype=None)
    if isinstance(pipeline.reader, TextReader) and index.text_encoder is not None and index.text_encoder.kind == "words":
        pipeline.reader.encoder.save(folder / WORDS)  # type: ignore[attr-defined]
    for profile in profiles:
        with suppress(shutil.SameFileError):
            shutil.copyfile(profile, folder / profile.name)
    ranks = rank_file(folder / MODEL)
    if model.rank_table is None:
        ranks.unlink(missing_ok=True)  # of a model that was saved here before
    else:
        write_rank_table(model.rank_table, ranks)
    write_text(json.dumps({"format": FORMAT} | content, indent=2) + "\n", folder / INDEX)
    return folder


def encoder_entry(reader: object) -> EncoderEntry | None:
    if isinstance(reader, ClassReader):
        return None
    assert isinstance(reader, TextReader)
    opener = reader.open_encoder
    if isinstance(opener, EncoderOpener) and opener.source is not None and not reader.is_open:
        kind, source = opener.kind, opener.source
    elif isinstance(reader.encoder, WordTextEncoder):
        return EncoderEntry("words", WORDS, reader.reads_empty)
    else:
        kind, source = type(reader.encoder).__name__, getattr(reader.encoder, "source", "")
        expected = f"one of {', '.join(ENCODERS)} to be saved: load the model with a folder or a hub name as text_encoder"
        require(isinstance(reader.encoder, TextEncoder) and kind in ENCODERS, "the text encoder", expected, kind)
    source = str(source) if is_hub_name(source) else str(expanded(source).resolve())
    return EncoderEntry(cast(Any, kind), source, reader.reads_empty)


def load_saved(folder: Path, *, text_encoder: Any = None, dtype: Any = None, **options: Any) -> Pipeline:
    """Returns the pipeline of a folder that `save` wrote, by default in the dtype that it was saved in."""
    index = read_index(folder)
    if index.text_encoder is not None and text_encoder is None:
        text_encoder = folder / WORDS if index.text_encoder.kind == "words" else index.text_encoder.source
    return load_model(index.spec(folder), text_encoder=text_encoder, dtype=dtype or getattr(torch, index.dtype), **options)


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    if not path.exists():
        raise CheckpointError(f"{folder} has no {INDEX}: save_pretrained did not write it, or was interrupted. {REPAIR}")
    content = read_object(path)
    if (format := content.pop("format", None)) not in (1, FORMAT):
        raise CheckpointError(f"{path}: format must be 1 or {FORMAT}; got {format!r}. {REPAIR}")
    try:
        return Index.from_plain(upgraded(content) if format == 1 else content, "index")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}. {REPAIR}") from error


def upgraded(value: Any) -> Any:
    """Returns values of format 1, which had other names and tagged sets, in format 2."""
    match value:
        case {"type": "set", "values": values}:
            return values
        case dict():
            renamed = {FORMAT_1_NAMES.get(name, name): upgraded(one) for name, one in value.items()}
            kind = renamed.get("type")
            return renamed | ({"type": FORMAT_1_NAMES[kind]} if isinstance(kind, str) and kind in FORMAT_1_NAMES else {})
        case list():
            return [upgraded(one) for one in value]
    return value
