"""Random text features, for tests and speed measurements."""

import zlib
from collections.abc import Sequence
from typing import Self

import torch

from .encoder import check_prompts
from .features import TextFeatures


class RandomEncoder:
    """Normally distributed features that depend only on the prompt, and are equal in all processes and on all devices.

    A prompt has one token per word and an end token. With `tokens`, rows are padded or truncated to that length, padding has features too,
    and `mask` marks the real tokens. With `pooled`, there is one vector per prompt, and CFG uses the empty prompt.
    """

    def __init__(self, channels: int, *, tokens: int | None = None, pooled: bool = False, device: torch.device | str = "cpu") -> None:
        self.channels, self.tokens, self.pooled, self.device = channels, tokens, pooled, torch.device(device)

    def to(self, device: torch.device | str) -> Self:
        self.device = torch.device(device)
        return self

    def __call__(self, prompts: Sequence[str]) -> TextFeatures:
        check_prompts(prompts)
        return TextFeatures.joined([self._features(prompt) for prompt in prompts])

    def empty(self) -> TextFeatures | None:
        return self._features("") if self.pooled else None

    def _features(self, prompt: str) -> TextFeatures:
        generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode("utf-8")))
        real_tokens = len(prompt.split()) + 1
        rows = torch.randn(self.tokens or real_tokens, self.channels, generator=generator)
        pooled = torch.randn(1, self.channels, generator=generator) if self.pooled else None
        mask = None if self.tokens is None else torch.arange(self.tokens).unsqueeze(0) < real_tokens
        return TextFeatures((rows,), pooled, mask).to(self.device)
