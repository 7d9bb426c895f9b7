"""Output of a text encoder: token features per prompt, with an optional pooled vector and mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import PromptError

State = tuple[tuple[int, int], ...]
"""Address and version counter of each tensor."""


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """Encoded prompts of one request. `TextFeatures.of` builds them from tensors, to use a model without its text encoder.

    Attributes:
        rows: for each prompt, a floating tensor [n_i, channels] with its n_i tokens, including the end token.
        pooled: one vector per prompt, [prompts, pooled channels], if the model uses one (STAR).
        mask: [prompts, T], True for real tokens, if the model reads the features of padding tokens (HART). Every row then has T tokens.
    """

    rows: tuple[Tensor, ...]
    pooled: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise PromptError("text features must hold at least one [tokens, channels] tensor; got no prompt.")
        for position, row in enumerate(self.rows):
            fits = isinstance(row, Tensor) and row.ndim == 2 and 0 not in row.shape and row.is_floating_point()
            require(fits, f"text features of prompt {position}", "a floating [tokens, channels] tensor", row)
        channels, images = sorted({row.shape[1] for row in self.rows}), len(self)
        if len(channels) > 1:
            raise PromptError(f"text features must have one number of channels; got {channels}. Encode all prompts with one encoder.")
        if (pooled := self.pooled) is not None:
            fits = isinstance(pooled, Tensor) and pooled.ndim == 2 and pooled.shape[0] == images and pooled.shape[1] > 0
            require(fits and pooled.is_floating_point(), "pooled text features", f"a floating [{images}, channels] tensor", pooled)
        if (mask := self.mask) is not None:
            if len(set(self.lengths)) > 1:
                raise PromptError(f"text features with a mask must all have as many tokens; got {list(self.lengths)}. Pad them.")
            fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (images, self.longest)
            require(fits, "the text mask", f"a torch.bool tensor {[images, self.longest]}, True on real tokens", mask)
            real_tokens = mask.sum(1).tolist()
            if 0 in real_tokens:
                raise PromptError(f"the text mask must be True on at least one token; got none for prompt {real_tokens.index(0)}.")

    def _check_finite(self) -> None:
        state = self._state()
        if state is not None and state in self._found_finite:
            return
        named = {f"text features of prompt {position}": row for position, row in enumerate(self.rows)}
        if self.pooled is not None:
            named["pooled text features"] = self.pooled
        bounds = [bound for tensor in named.values() for bound in tensor.aminmax()]  # NaN if the tensor has any
        found = torch.stack([bound.to(bounds[0].device) for bound in bounds]).tolist()  # one device-to-host copy
        for name, low, high in zip(named, found[::2], found[1::2], strict=True):
            if not (isfinite(low) and isfinite(high)):
                raise PromptError(
                    f"{name} must be finite; got NaN or infinity. If the encoder ran in float16, run it in torch.bfloat16 or torch.float32."
                )
        self._found_finite[:] = [state]

    @cached_property
    def _found_finite(self) -> list[State | None]:
        """State of the tensors at the last check, which saves a device synchronization per request."""
        return []

    def _state(self) -> State | None:
        """Returns a value that changes when a tensor is written; None if torch does not track that."""
        tensors = self.rows if self.pooled is None else (*self.rows, self.pooled)
        if any(map(Tensor.is_inference, tensors)):
            return None
        return tuple([(tensor.data_ptr(), tensor._version) for tensor in tensors])

    @classmethod
    def of(cls, value: TextFeatures | Tensor | Sequence[Tensor]) -> TextFeatures:
        """Returns checked features.

        A 2-D tensor is one prompt, a 3-D tensor is several prompts of equal length, and a sequence has one 2-D tensor per prompt.
        """
        if isinstance(value, TextFeatures):
            features = value
        elif isinstance(value, Tensor) and value.ndim in (2, 3):
            features = cls(value.unbind(0) if value.ndim == 3 else (value,))
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            features = cls(tuple(value))
        else:
            require(False, "text features", "TextFeatures, a [tokens, channels] or [prompts, tokens, channels] tensor, or a list", value)
        features._check_finite()
        return features

    @classmethod
    def unpad(cls, hidden: Tensor, mask: Tensor, pooled: Tensor | None = None) -> TextFeatures:
        """Returns the float32 rows of hidden states [B, T, C] where the mask [B, T] is True."""
        return cls(tuple(row[real] for row, real in zip(hidden.float(), mask.to(hidden.device), strict=True)), pooled)

    @classmethod
    def joined(cls, parts: Sequence[TextFeatures]) -> TextFeatures:
        """Concatenates the prompts of several requests."""
        rows = tuple(row for part in parts for row in part.rows)
        return cls(rows, _joined("pooled", [part.pooled for part in parts]), _joined("mask", [part.mask for part in parts]))

    def one(self, position: int) -> TextFeatures:
        """Returns the features of one prompt, without copying."""
        return self._with((self.rows[position],), lambda tensor: tensor[position].unsqueeze(0))

    def take(self, positions: Sequence[int]) -> TextFeatures:
        """Returns the features of some prompts."""
        return self._with(tuple(self.rows[position] for position in positions), lambda tensor: tensor[list(positions)])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt, including padding."""
        return tuple(row.shape[0] for row in self.rows)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def channels(self) -> int:
        return self.rows[0].shape[1]

    def __len__(self) -> int:
        """Returns the number of prompts."""
        return len(self.rows)

    def to(self, device: torch.device | str) -> TextFeatures:
        there = all(tensor.device == torch.device(device) for tensor in (*self.rows, self.pooled, self.mask) if tensor is not None)
        return self if there else self._each(lambda tensor: tensor.to(device))  # a copy would check the mask and synchronize

    def clone(self) -> TextFeatures:
        return self._each(Tensor.clone)

    def _each(self, change: Callable[[Tensor], Tensor]) -> TextFeatures:
        return self._with(tuple(map(change, self.rows)), change)

    def _with(self, rows: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> TextFeatures:
        return TextFeatures(rows, *(None if tensor is None else change(tensor) for tensor in (self.pooled, self.mask)))

    def repeat(self, images: int) -> TextFeatures:
        """Repeats a single prompt for several images, without copying."""
        if len(self) != 1 or images < 1:
            raise PromptError(f"one prompt can be repeated 1 or more times; got {len(self)} prompts and {images} times.")
        return self._with(self.rows * images, lambda tensor: tensor.expand(images, -1))

    def unpadded(self) -> TextFeatures:
        """Returns the features without padding tokens."""
        if self.mask is None:
            return self
        return TextFeatures(tuple(row[mask] for row, mask in zip(self.rows, self.mask, strict=True)), self.pooled)

    def compact(self) -> tuple[Tensor, tuple[int, ...]]:
        """Returns all rows concatenated, [sum n_i, channels], and their lengths n_i."""
        return torch.cat(self.rows), self.lengths


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads lists of ids on the right with zeros; returns ids [B, T] and a mask [B, T] that is True for the given ids."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def require(fits: bool, name: str, expected: str, value: object) -> None:
    if not fits:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise PromptError(f"{name} must be {expected}; got {got}.")


def _joined(name: str, tensors: list[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    if not given:
        return None
    sizes = sorted({tensor.shape[1] for tensor in given})
    if len(given) < len(tensors) or len(sizes) > 1:
        raise PromptError(
            f"all text features must have a `{name}` of one size, or none; got {len(given)} of {len(tensors)}, of sizes {sizes}. "
            "Encode all prompts with one encoder."
        )
    return torch.cat(given)
