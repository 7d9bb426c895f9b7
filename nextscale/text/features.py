"""What a text encoder hands to a model: one matrix of token features per prompt, and what some models read besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from ..errors import PromptError

_ACCEPTED = (
    "a TextFeatures, one [tokens, channels] tensor, a [prompts, tokens, channels] tensor, or a sequence of [tokens, channels] tensors"
)

State = tuple[tuple[int, int], ...]
"""Of each tensor where its numbers lie, and how often torch has written them."""


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """The encoded prompts of one request.

    `rows[i]` is a floating [n_i, channels] tensor for prompt i; n_i counts its real tokens, the end token included.
    `pooled` holds one vector per prompt, [prompts, channels of its own], where the encoder makes one (CLIP).
    `mask` is given only where the rows are padded and the padding carries features that take part (HART): every row then has T tokens,
    and `mask` [prompts, T] is True on the real ones.
    `TextFeatures.of` builds one from stored tensors, so a model can run without its text encoder.
    """

    rows: tuple[Tensor, ...]
    pooled: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_rows()
        if self.pooled is not None:
            self._check_pooled(self.pooled)
        if self.mask is not None:
            self._check_mask(self.mask)

    def _check_rows(self) -> None:
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

    def _check_pooled(self, pooled: Tensor) -> None:
        if not isinstance(pooled, Tensor):
            raise PromptError(f"pooled text features have type {type(pooled).__name__}; expected a [prompts, channels] tensor")
        if pooled.ndim != 2 or pooled.shape[0] != len(self) or pooled.shape[1] < 1:
            raise PromptError(
                f"pooled text features have shape {list(pooled.shape)}; expected [{len(self)}, channels], one vector for each prompt"
            )
        if not pooled.is_floating_point():
            raise PromptError(f"pooled text features are {pooled.dtype}; expected a floating type, for example torch.float32")

    def _check_mask(self, mask: Tensor) -> None:
        if not isinstance(mask, Tensor):
            raise PromptError(f"the text mask has type {type(mask).__name__}; expected a [prompts, tokens] tensor of torch.bool")
        if mask.dtype != torch.bool:
            raise PromptError(f"the text mask is {mask.dtype}; expected torch.bool, True on real tokens")
        if len(set(self.lengths)) > 1:
            raise PromptError(f"text features with a mask have {list(self.lengths)} tokens; expected one count, so pad all rows to it")
        if mask.shape != (len(self), self.longest):
            raise PromptError(f"the text mask has shape {list(mask.shape)}; expected {[len(self), self.longest]}, as the rows have")
        real_tokens = mask.sum(1).tolist()
        if 0 in real_tokens:
            raise PromptError(f"the text mask of prompt {real_tokens.index(0)} is False everywhere; expected True on at least one token")

    def _check_finite(self) -> None:
        state = self._state()
        if state is not None and state in self._found_finite:
            return
        named = {f"text features of prompt {position}": row for position, row in enumerate(self.rows)}
        if self.pooled is not None:
            named["pooled text features"] = self.pooled
        bounds = [bound for tensor in named.values() for bound in tensor.aminmax()]  # NaN where there is one
        found = torch.stack([bound.to(bounds[0].device) for bound in bounds]).tolist()  # one read from the device for all
        for name, low, high in zip(named, found[::2], found[1::2], strict=True):
            if not (isfinite(low) and isfinite(high)):
                raise PromptError(
                    f"{name} contain NaN or infinity; expected finite numbers. "
                    "If the encoder ran in float16, run it in torch.bfloat16 or torch.float32"
                )
        self._found_finite[:] = [state]

    @cached_property
    def _found_finite(self) -> list[State | None]:
        """The state in which they were checked last: else the host would wait for the device at every request with the same features."""
        return []

    def _state(self) -> State | None:
        """Changes when numbers are written; None where torch does not count that."""
        tensors = self.rows if self.pooled is None else (*self.rows, self.pooled)
        if any(map(Tensor.is_inference, tensors)):
            return None
        return tuple([(tensor.data_ptr(), tensor._version) for tensor in tensors])

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
        features._check_finite()
        return features

    @classmethod
    def joined(cls, parts: Sequence[TextFeatures]) -> TextFeatures:
        """The prompts of several requests as one request, in this order."""
        return cls(
            tuple(row for part in parts for row in part.rows),
            _joined_field("pooled", [part.pooled for part in parts]),
            _joined_field("mask", [part.mask for part in parts]),
        )

    def one(self, position: int) -> TextFeatures:
        """The features of one prompt; they share memory."""
        return TextFeatures(
            (self.rows[position],),
            None if self.pooled is None else self.pooled[position].unsqueeze(0),
            None if self.mask is None else self.mask[position].unsqueeze(0),
        )

    def take(self, positions: Sequence[int]) -> TextFeatures:
        """The features of some prompts."""
        return TextFeatures.joined([self.one(position) for position in positions])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt, padding included where there is a mask."""
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
        there = all(tensor.device == torch.device(device) for tensor in (*self.rows, self.pooled, self.mask) if tensor is not None)
        return self if there else self._each(lambda tensor: tensor.to(device))  # checks of a mask would wait for the device

    def clone(self) -> TextFeatures:
        return self._each(Tensor.clone)

    def _each(self, change: Callable[[Tensor], Tensor]) -> TextFeatures:
        return TextFeatures(
            tuple(change(row) for row in self.rows),
            None if self.pooled is None else change(self.pooled),
            None if self.mask is None else change(self.mask),
        )

    def repeat(self, images: int) -> TextFeatures:
        """The same prompt for several images; they share memory."""
        if len(self) != 1:
            raise PromptError(f"cannot repeat {len(self)} prompts; expected exactly one, so give one prompt per image instead")
        if images < 1:
            raise PromptError(f"cannot repeat a prompt {images} times; expected 1 or more")
        return TextFeatures(
            self.rows * images,
            None if self.pooled is None else self.pooled.expand(images, -1),
            None if self.mask is None else self.mask.expand(images, -1),
        )

    def unpadded(self) -> TextFeatures:
        """The features without padding, for models that do not read it."""
        if self.mask is None:
            return self
        return TextFeatures(tuple(row[mask] for row, mask in zip(self.rows, self.mask, strict=True)), self.pooled)

    def compact(self) -> tuple[Tensor, tuple[int, ...]]:
        """All rows under one another without padding, [sum n_i, channels], and the lengths n_i that split them again."""
        return torch.cat(self.rows), self.lengths


def _joined_field(name: str, tensors: list[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return None
    if len(given) < len(tensors):
        raise PromptError(f"{len(given)} of {len(tensors)} text features have `{name}`; expected all or none, so use one encoder for all")
    sizes = sorted({tensor.shape[1] for tensor in given})
    if len(sizes) > 1:
        raise PromptError(f"text features have `{name}` of sizes {sizes}; expected one size, so use one encoder for all")
    return torch.cat(given)
