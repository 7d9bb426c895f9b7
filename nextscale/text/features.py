"""What a text encoder hands to a model: one matrix of token features per prompt, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PromptError

_ACCEPTED = (
    "a TextFeatures, one [tokens, channels] tensor, a [prompts, tokens, channels] tensor, or a sequence of [tokens, channels] tensors"
)


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """The encoded prompts of one request.

    `rows[i]` is a floating [n_i, channels] tensor for prompt i; n_i counts its real tokens, the end token included.
    `TextFeatures.of` builds one from stored tensors, so a model can run without its text encoder.
    """

    rows: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise PromptError("text features hold no prompt; give at least one [tokens, channels] tensor")
        for position, row in enumerate(self.rows):
            if not isinstance(row, Tensor):
                raise PromptError(
                    f"text features of prompt {position} have type {type(row).__name__}; expected a [tokens, channels] tensor"
                )
            if row.ndim != 2 or row.shape[0] < 1 or row.shape[1] < 1:
                raise PromptError(
                    f"text features of prompt {position} have shape {list(row.shape)}; expected [tokens, channels], each at least 1"
                )
            if not row.is_floating_point():
                raise PromptError(
                    f"text features of prompt {position} are {row.dtype}; expected a floating type, for example torch.float32"
                )
        channel_counts = sorted({row.shape[1] for row in self.rows})
        if len(channel_counts) > 1:
            raise PromptError(f"text features have {channel_counts} channels; expected one count, so encode all prompts with one encoder")

    @classmethod
    def of(cls, value: TextFeatures | Tensor | Sequence[Tensor]) -> TextFeatures:
        """Accept features in any of their shapes and check them.

        A 2-D tensor is one prompt, a 3-D tensor holds prompts of equal length, a sequence holds one 2-D tensor per prompt.
        """
        if isinstance(value, TextFeatures):
            features = value
        elif isinstance(value, Tensor):
            if value.ndim not in (2, 3):
                raise PromptError(f"text features have shape {list(value.shape)}; expected {_ACCEPTED}")
            features = cls(value.unbind(0) if value.ndim == 3 else (value,))
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            features = cls(tuple(value))
        else:
            raise PromptError(f"text features have type {type(value).__name__}; expected {_ACCEPTED}")
        for position, row in enumerate(features.rows):
            if not torch.isfinite(row).all():
                raise PromptError(
                    f"text features of prompt {position} contain NaN or infinity; expected finite numbers. "
                    "If the encoder ran in float16, run it in torch.bfloat16 or torch.float32"
                )
        return features

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(row.shape[0] for row in self.rows)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def channels(self) -> int:
        return self.rows[0].shape[1]

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.rows)

    def to(self, device: torch.device | str) -> TextFeatures:
        return TextFeatures(tuple(row.to(device) for row in self.rows))

    def repeat(self, images: int) -> TextFeatures:
        """The same prompt for several images; the rows share memory."""
        if len(self) != 1:
            raise PromptError(f"cannot repeat {len(self)} prompts; expected exactly one, so give one prompt per image instead")
        if images < 1:
            raise PromptError(f"cannot repeat a prompt {images} times; expected 1 or more")
        return TextFeatures(self.rows * images)

    def compact(self) -> tuple[Tensor, tuple[int, ...]]:
        """All rows under one another without padding, [sum n_i, channels], and the lengths n_i that split them again."""
        return torch.cat(self.rows), self.lengths
