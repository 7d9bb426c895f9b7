"""T5 text encoder: prompts to token features, as Infinity takes them (flan-t5-xl)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import SettingError
from .encoder import TextEncoder
from .features import TextFeatures
from .files import EncoderFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PERSON_WORDS = (
    "man", "woman", "men", "women", "boy", "girl", "child", "person", "human", "adult", "teenager", "employee", "employer", "worker",
    "mother", "father", "sister", "brother", "grandmother", "grandfather", "son", "daughter",
)  # fmt: skip
_FACE_WORDS = ". very smooth faces, good looking faces, face to the camera, perfect facial features"


def with_positive_prompt(prompt: str) -> str:
    """Infinity's optional prompt addition: words for good faces after any prompt that seems to mention a person.

    The test is a case-sensitive substring test, as in the reference implementation, so "season" counts through "son".
    """
    return prompt + _FACE_WORDS if any(word in prompt for word in _PERSON_WORDS) else prompt


class T5Encoder(TextEncoder):
    """Encode prompts with a T5 encoder.

    `source` is a folder with the files of a T5 model, or a hub name such as "google/flan-t5-xl". A folder never touches the network.
    `dtype` defaults to float16 on CUDA and float32 elsewhere; the features are float32 in either case.
    Prompts longer than `max_length` tokens are refused, not cut. The features of the last `cache_size` prompts are kept
    (0 keeps none): a prompt of 512 tokens takes 4 MiB with flan-t5-xl.

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
    cuda_bytes = 2 * 1_223_527_424 + 2 * 251_658_240  # transformers keeps the last product of every feed-forward in float32
    limit_name = "max_length"

    def __init__(
        self,
        source: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_length: int = 512,
        cache_size: int = 64,
        offload: bool = False,
    ) -> None:
        if max_length < 1:
            raise SettingError(f"max_length is {max_length}; expected 1 or more tokens")
        self.max_length = max_length
        super().__init__(source, device=device, dtype=dtype, cache_size=cache_size, offload=offload)

    def _encode(self, prompts: list[str]) -> TextFeatures:
        token_ids = self._tokenise(prompts, self.max_length, padding=False)["input_ids"]
        lengths = [len(ids) for ids in token_ids]
        padded = pad_sequence([torch.tensor(ids) for ids in token_ids], batch_first=True)  # [B, longest]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, longest]
        hidden = self._run(padded, mask).last_hidden_state.float()  # [B, longest, channels]
        return TextFeatures(tuple(row[:length] for row, length in zip(hidden, lengths, strict=True)))

    def _load_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        if not (folder / "tokenizer.json").is_file():
            self._require_sentencepiece_reader()
        return super()._load_tokenizer(folder)

    def _require_sentencepiece_reader(self) -> None:
        """spiece.model is a protobuf file; without its readers transformers fails with a message about another tokenizer."""
        for module in ("sentencepiece", "google.protobuf"):
            try:
                import_module(module)
            except ImportError as error:
                raise self.files.missing_extra(module) from error

    def _load_model(self, folder: Path, **settings: Any) -> Any:
        from transformers import T5EncoderModel

        return T5EncoderModel.from_pretrained(folder, **settings)
