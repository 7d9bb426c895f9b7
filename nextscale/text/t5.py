"""T5 text encoder: prompts to token features, as Infinity takes them (flan-t5-xl)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import MissingExtra, PromptError, SettingError, TextEncoderUnavailable
from .features import TextFeatures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, T5EncoderModel

_INFINITY_ENCODER = "google/flan-t5-xl"

# Each entry is one thing the folder must hold, under any of the names given.
_NEEDED_FILES = (
    ("config.json",),
    ("tokenizer.json", "spiece.model"),
    ("model.safetensors", "model.safetensors.index.json"),
)
_HELPFUL_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_DOWNLOADED_FILES = (*(name for names in _NEEDED_FILES for name in names), *_HELPFUL_FILES, "model-*.safetensors")

_PERSON_WORDS = (
    "man", "woman", "men", "women", "boy", "girl", "child", "person", "human", "adult", "teenager", "employee", "employer", "worker",
    "mother", "father", "sister", "brother", "grandmother", "grandfather", "son", "daughter",
)  # fmt: skip
_FACE_WORDS = ". very smooth faces, good looking faces, face to the camera, perfect facial features"


def with_positive_prompt(prompt: str) -> str:
    """Infinity's optional prompt addition: words for good faces after any prompt that seems to mention a person.

    The test is a case-sensitive substring test, as in the official program, so "season" counts through "son".
    """
    return prompt + _FACE_WORDS if any(word in prompt for word in _PERSON_WORDS) else prompt


class T5Encoder:
    """Encode prompts with a T5 encoder.

    `source` is a folder with the files of a T5 model, or a hub name such as "google/flan-t5-xl". A folder never touches the network.
    `dtype` defaults to float16 on CUDA and float32 elsewhere; the features are float32 in either case.
    Prompts longer than `max_length` tokens are refused, not cut. The features of the last `cache_size` prompts are kept
    (0 keeps none): a prompt of 512 tokens takes 4 MiB with flan-t5-xl.

    >>> encoder = T5Encoder("google/flan-t5-xl", device="cuda")
    >>> features = encoder(["a red bicycle", "a lighthouse in the fog at dawn"])
    """

    def __init__(
        self,
        source: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_length: int = 512,
        cache_size: int = 64,
    ) -> None:
        if max_length < 1:
            raise SettingError(f"max_length is {max_length}; expected 1 or more tokens")
        if cache_size < 0:
            raise SettingError(f"cache_size is {cache_size}; expected 0 (no cache) or more prompts")
        self.device = torch.device(device)
        if dtype is None:
            dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        if not dtype.is_floating_point:
            raise SettingError(f"dtype is {dtype}; expected a floating type: torch.float16, torch.bfloat16 or torch.float32")
        self.max_length = max_length
        self._cache = _RecentRows(cache_size)
        self._tokenizer, model = _load(source, dtype)
        self._model = model.eval().to(self.device)

    @property
    def channels(self) -> int:
        """Width of the features, 2048 for flan-t5-xl."""
        return self._model.config.d_model

    def to(self, device: torch.device | str) -> T5Encoder:
        """Move the encoder and its cached features; the dtype stays what it was."""
        self.device = torch.device(device)
        self._model.to(self.device)
        self._cache.to(self.device)
        return self

    def __call__(self, prompts: Sequence[str]) -> TextFeatures:
        """Features of each prompt, float32, on the encoder's device. Only prompts that are not in the cache are encoded."""
        _check_prompts(prompts)
        new_prompts = [prompt for prompt in dict.fromkeys(prompts) if self._cache.get(prompt) is None]
        rows = {prompt: row for prompt in prompts if (row := self._cache.get(prompt)) is not None}
        if new_prompts:
            rows.update(zip(new_prompts, self._encode(new_prompts).rows, strict=True))
        for prompt in dict.fromkeys(prompts):
            self._cache.put(prompt, rows[prompt])
        # Copies, so that a caller who writes into the result does not change the cache.
        return TextFeatures(tuple(rows[prompt].clone() for prompt in prompts))

    def _encode(self, prompts: list[str]) -> TextFeatures:
        token_ids = self._tokenizer(prompts, padding=False, truncation=False, verbose=False)["input_ids"]
        for prompt, ids in zip(prompts, token_ids, strict=True):
            if len(ids) > self.max_length:
                raise PromptError(
                    f"prompt has {len(ids)} tokens; expected at most {self.max_length} (max_length). Shorten the prompt that begins with "
                    f"{' '.join(prompt.split()[:8])[:80]!r}"
                )
        lengths = [len(ids) for ids in token_ids]
        padded = pad_sequence([torch.tensor(ids) for ids in token_ids], batch_first=True)  # [B, longest]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, longest]
        with torch.inference_mode():
            output = self._model(input_ids=padded.to(self.device), attention_mask=mask.long().to(self.device))
        hidden = output.last_hidden_state  # [B, longest, channels]
        # Copies, because a view would keep the padded batch alive in the cache.
        return TextFeatures.of([row[:length].to(torch.float32, copy=True) for row, length in zip(hidden, lengths, strict=True)])


class _RecentRows:
    """Features of the prompts used last, at most `size` of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, prompt: str) -> Tensor | None:
        return self._rows.get(prompt)

    def put(self, prompt: str, row: Tensor) -> None:
        self._rows[prompt] = row
        self._rows.move_to_end(prompt)
        while len(self._rows) > self._size:
            self._rows.popitem(last=False)

    def to(self, device: torch.device) -> None:
        for prompt, row in self._rows.items():
            self._rows[prompt] = row.to(device)


def _check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str):
        raise PromptError(f"prompts are the single string {prompts[:40]!r}; expected a sequence of prompts, so write [prompt]")
    if len(prompts) == 0:
        raise PromptError("no prompt given; expected at least one")
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise PromptError(f"prompt {position} has type {type(prompt).__name__}; expected str")
        if not prompt.strip():
            raise PromptError(f"prompt {position} is {prompt!r}; expected at least one visible character")


def _load(source: str | Path, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, T5EncoderModel]:
    try:
        from transformers import AutoTokenizer, T5EncoderModel
    except ImportError as error:
        raise _missing_extra("transformers") from error

    if _is_hub_name(source):
        name = str(source)
        folder = _download(name)
    else:
        name = _INFINITY_ENCODER
        folder = Path(source).expanduser()
    if not folder.is_dir():
        raise TextEncoderUnavailable(f"text encoder {str(source)!r} is not a folder on this machine. {_how_to_fetch(name)}")
    absent = _absent_files(folder)
    if absent:
        raise TextEncoderUnavailable(f"text encoder {str(source)!r} is incomplete; absent: {', '.join(absent)}. {_how_to_fetch(name)}")
    if not (folder / "tokenizer.json").is_file():
        _require_sentencepiece_reader()

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # float16 has to be asked for here: transformers then keeps the layers that overflow in float32.
        loaded: Any = T5EncoderModel.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # damaged files surface as OSError, ValueError, KeyError, RuntimeError, SafetensorError or plain Exception
        raise TextEncoderUnavailable(f"text encoder {str(source)!r} could not be read: {error}. {_how_to_fetch(name)}") from error
    model, report = loaded
    # transformers fills absent weights with random numbers and only warns.
    if report["missing_keys"]:
        raise TextEncoderUnavailable(
            f"text encoder {str(source)!r} is not a whole T5 encoder: {len(report['missing_keys'])} weights are absent, "
            f"for example {min(report['missing_keys'])}. {_how_to_fetch(name)}"
        )
    return tokenizer, model


def _is_hub_name(source: str | Path) -> bool:
    if isinstance(source, Path):
        return False
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source
    return not looks_like_path and not Path(source).exists()


def _download(name: str) -> Path:
    """Fetch into the hub's own cache, or find it there, with one look-up: from_pretrained would retry each file for most of a minute."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_DOWNLOADED_FILES)))
    except Exception as error:  # the hub client passes on errors of whichever HTTP package it uses
        raise TextEncoderUnavailable(f"text encoder {name!r} could not be fetched: {error} {_how_to_fetch(name)}") from error


def _absent_files(folder: Path) -> list[str]:
    """Names to show when something needed is absent; empty when the folder can be loaded."""
    absent = [" or ".join(names) for names in _NEEDED_FILES if not any((folder / name).is_file() for name in names)]
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        absent += [shard for shard in _shards(index) if not (folder / shard).is_file()]
    if absent:
        absent += [f"{name} (optional)" for name in _HELPFUL_FILES if not (folder / name).is_file()]
    return absent


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TextEncoderUnavailable(
            f"{str(index)!r} is not a weights index; expected JSON with a 'weight_map' table. Fetch it again"
        ) from error


def _require_sentencepiece_reader() -> None:
    """spiece.model is a protobuf file; without its readers transformers fails with a message about another tokenizer."""
    for module in ("sentencepiece", "google.protobuf"):
        try:
            import_module(module)
        except ImportError as error:
            raise _missing_extra(module) from error


def _missing_extra(module: str) -> MissingExtra:
    return MissingExtra(f"the T5 text encoder needs the package {module!r}, which is not installed: pip install 'nextscale[text]'")


def _how_to_fetch(name: str) -> str:
    needed = ", ".join(" or ".join(names) for names in _NEEDED_FILES)
    return (
        f"Fetch {needed} (with its shards), {' and '.join(_HELPFUL_FILES)} from https://huggingface.co/{name} "
        'into any folder and pass that folder: text_encoder="<folder>"'
    )
