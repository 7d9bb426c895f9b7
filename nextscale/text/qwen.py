"""Qwen2 text encoder of HART."""

from __future__ import annotations

from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..validation import require
from .encoder import TextEncoder
from .features import TextFeatures
from .files import EncoderFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Read as bytes, so that no platform changes the line endings.
SYSTEM_PROMPT = (package_files(__package__) / "hart_system_prompt.txt").read_bytes().decode("utf-8")


class QwenEncoder(TextEncoder):
    """The text model of Qwen2 or Qwen2-VL. `dtype` defaults to bfloat16 on CUDA and float32 elsewhere.

    Every prompt gets `tokens` rows, including padding on the side that the tokenizer's configuration specifies; `mask` marks the real ones.
    The model reads `system_prompt` before each prompt, and its features are dropped. A prompt takes 1.8 MiB of the cache.
    `source` is a folder with the model's files, or a hub name such as "mit-han-lab/Qwen2-VL-1.5B-Instruct".

    >>> encoder = QwenEncoder("mit-han-lab/Qwen2-VL-1.5B-Instruct", device="cuda")
    >>> features = encoder(["a red bicycle", "a lighthouse in the fog at dawn"])
    """

    files = EncoderFiles(
        kind="Qwen2",
        repository="mit-han-lab/Qwen2-VL-1.5B-Instruct",
        tokenizer_needs=(("tokenizer_config.json",), ("tokenizer.json", "vocab.json"), ("tokenizer.json", "merges.txt")),
        tokenizer_helps=("special_tokens_map.json", "added_tokens.json"),
        model_types=("qwen2", "qwen2_vl"),
    )
    cuda_dtype = torch.bfloat16
    cuda_bytes = 2 * 1_543_714_304
    limit_name = "tokens"

    def __init__(self, source: str | Path, *, tokens: int = 300, system_prompt: str | None = SYSTEM_PROMPT, **options: Any) -> None:
        require(tokens >= 1, "tokens", "an int of at least 1", tokens)
        self.tokens = tokens
        super().__init__(source, **options)
        system_ids = [] if system_prompt is None else self._tokenizer(system_prompt)["input_ids"]
        self._system_ids = torch.tensor(system_ids, dtype=torch.long)

    def _encode(self, prompts: list[str]) -> TextFeatures:
        prompt_ids = torch.tensor(self._tokenize(prompts, self.tokens, padding="max_length")["input_ids"])  # [B, tokens]
        # By id, like the reference implementation: a pad token spelled out in the prompt is treated as padding.
        mask = prompt_ids != self._tokenizer.pad_token_id
        system_ids = self._system_ids.expand(len(prompts), -1)
        read_ids = torch.cat([system_ids, prompt_ids], dim=1)
        read_mask = torch.cat([torch.ones_like(system_ids, dtype=torch.bool), mask], dim=1)
        hidden = self._run(read_ids, read_mask, use_cache=False).last_hidden_state[:, system_ids.shape[1] :]
        return TextFeatures(hidden.float().unbind(0), mask=mask.to(self.device))

    def _load_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        tokenizer = super()._load_tokenizer(folder)
        if tokenizer.pad_token_id is None:
            raise ValueError("tokenizer_config.json must define pad_token")
        return tokenizer

    def _load_model(self, folder: Path, **settings: Any) -> Any:
        from transformers import AutoConfig, Qwen2Model, Qwen2VLTextModel

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if config.model_type == "qwen2":
            return Qwen2Model.from_pretrained(folder, config=config, **settings)
        # Published files name the text weights "model.*"; newer versions of transformers write "model.language_model.*".
        names = {r"^model\.language_model\.": "model."}
        return Qwen2VLTextModel.from_pretrained(folder, config=config.text_config, key_mapping=names, **settings)
