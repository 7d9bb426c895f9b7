"""T5 text encoder of Infinity (flan-t5-xl)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..validation import require
from .encoder import TextEncoder
from .features import TextFeatures, pad
from .files import EncoderFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PERSON_WORDS = (
    "man", "woman", "men", "women", "boy", "girl", "child", "person", "human", "adult", "teenager", "employee", "employer", "worker",
    "mother", "father", "sister", "brother", "grandmother", "grandfather", "son", "daughter",
)  # fmt: skip
_FACE_WORDS = ". very smooth faces, good looking faces, face to the camera, perfect facial features"


def with_positive_prompt(prompt: str) -> str:
    """Appends Infinity's optional words for good faces to prompts that seem to mention a person.

    Like the reference implementation, this searches for case-sensitive substrings, so "season" matches because it contains "son".
    """
    return prompt + _FACE_WORDS if any(word in prompt for word in _PERSON_WORDS) else prompt


class T5Encoder(TextEncoder):
    """A T5 encoder. `dtype` defaults to float16 on CUDA and float32 elsewhere. A prompt of 512 tokens takes 4 MiB of the cache.

    Args:
        source: folder with the files of a T5 model, or a hub name such as "google/flan-t5-xl".
        max_length: maximum number of tokens of a prompt.

    >>> encoder = T5Encoder("google/flan-t5-xl", device="cuda")
    >>> features = encoder(["a red bicycle", "a lighthouse in the fog at dawn"])
    """

    files = EncoderFiles(
        kind="T5",
        repository="google/flan-t5-xl",
        tokenizer_needs=(("tokenizer.json", "spiece.model"),),
        tokenizer_helps=("tokenizer_config.json", "special_tokens_map.json"),
    )
    cuda_dtype = torch.float16
    cuda_bytes = 2 * 1_223_527_424 + 2 * 251_658_240  # transformers keeps the second layer of every feed-forward in float32
    limit_name = "max_length"

    def __init__(self, source: str | Path, *, max_length: int = 512, **options: Any) -> None:
        require(max_length >= 1, "max_length", "an int of at least 1", max_length)
        self.max_length = max_length
        super().__init__(source, **options)

    def _encode(self, prompts: list[str]) -> TextFeatures:
        ids, mask = pad(self._tokenize(prompts, self.max_length, padding=False)["input_ids"])
        return TextFeatures.unpad(self._run(ids, mask).last_hidden_state, mask)

    def _load_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        if not (folder / "tokenizer.json").is_file():  # checked here, because transformers' message names another tokenizer
            for module in ("sentencepiece", "google.protobuf"):
                self.files.require_package(module)
        return super()._load_tokenizer(folder)

    def _load_model(self, folder: Path, **settings: Any) -> Any:
        from transformers import T5EncoderModel

        return T5EncoderModel.from_pretrained(folder, **settings)
