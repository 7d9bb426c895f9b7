"""Prompt readers: convert class numbers or texts to model inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import PromptError, TextEncoderUnavailable
from . import Encoder, TextEncoder, TextFeatures


class Prompts(Protocol):
    """The prompts of a request, one entry per image."""

    def __len__(self) -> int: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; 0 for class numbers."""
        ...

    def repeat(self, images: int) -> Prompts:
        """Repeats a single prompt for several images."""
        ...

    def take(self, images: Sequence[int]) -> Prompts:
        """Returns the prompts of some images."""
        ...


@dataclass(frozen=True, eq=False)
class Labels:
    """Class numbers [B]; a number equal to the number of classes means "no class"."""

    numbers: Tensor

    def __len__(self) -> int:
        return self.numbers.shape[0]

    @property
    def longest(self) -> int:
        return 0

    def repeat(self, images: int) -> Labels:
        return Labels(self.numbers.expand(images))

    def take(self, images: Sequence[int]) -> Labels:
        return Labels(self.numbers[list(images)])


class PromptReader(Protocol):
    def read(self, prompt: Any) -> Prompts: ...

    def to(self, device: torch.device) -> None:
        """Moves the reader to a device."""
        ...

    def empty(self) -> Prompts | None:
        """Returns the unconditional prompt for CFG; None if the model has its own."""
        ...


@dataclass(frozen=True)
class ClassReader:
    """Reads class numbers. Negative numbers and the number of classes mean "no class"."""

    classes: int

    def read(self, prompt: Any) -> Labels:
        if hasattr(prompt, "tolist"):  # torch or numpy
            prompt = prompt.tolist()
        numbers = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else [prompt]
        if not numbers:
            raise PromptError("classes must be one number per image; got none.")
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number > self.classes:
                raise PromptError(f"class must be an int from 0 to {self.classes - 1}, or -1 for no class; got {number!r}.")
        return Labels(torch.tensor([number if number >= 0 else self.classes for number in numbers]))

    def to(self, device: torch.device) -> None:
        """Does nothing: the model moves class numbers."""

    def empty(self) -> None:
        return None


@dataclass
class EncoderOpener:
    """Opens the text encoder of a model on the current `device`."""

    open: Callable[[torch.device, bool], Encoder]  # device, offload
    source: str | Path | None  # folder or hub name; None for a user's encoder or a word encoder
    kind: str  # class name of the encoder
    device: torch.device
    offload: bool = False

    def __call__(self) -> Encoder:
        return self.open(self.device, self.offload)


class TextReader:
    """Reads text prompts with an encoder that is opened at first use, or accepts features.

    reads_empty: CFG of the model uses the features of an empty prompt.
    """

    def __init__(self, open_encoder: Callable[[], Encoder], reads_empty: bool = False) -> None:
        self.open_encoder = open_encoder
        self.reads_empty = reads_empty

    @cached_property
    def encoder(self) -> Encoder:
        return self.open_encoder()

    @property
    def is_open(self) -> bool:
        return "encoder" in self.__dict__

    def to(self, device: torch.device) -> None:
        if isinstance(self.open_encoder, EncoderOpener):
            self.open_encoder.device = device
            if not self.is_open:
                return
        if hasattr(self.encoder, "to"):  # optional for a user's encoder
            self.encoder.to(device)

    @property
    def can_offload(self) -> bool:
        return isinstance(self.encoder, TextEncoder) if self.is_open else getattr(self.open_encoder, "source", None) is not None

    def offload(self) -> None:
        """Keeps the encoder's weights in host memory, except while it encodes."""
        if isinstance(self.open_encoder, EncoderOpener):
            self.open_encoder.offload = True
        if self.is_open and isinstance(self.encoder, TextEncoder):
            self.encoder.offload = True
            self.encoder.to(self.encoder.device)

    def read(self, prompt: Any) -> TextFeatures:
        prompts: Any = [prompt] if isinstance(prompt, str) else prompt
        if isinstance(prompts, Sequence) and prompts and all(isinstance(one, str) for one in prompts):
            return self.encoder(prompts)
        if isinstance(prompts, TextFeatures | Tensor) or (isinstance(prompts, Sequence) and prompts):
            return TextFeatures.of(prompts)
        raise PromptError(f"prompt must be a string, a list of strings or text features [tokens, channels]; got {prompt!r:.80}.")

    def empty(self) -> TextFeatures | None:
        if not self.reads_empty:
            return None
        try:
            return self.encoder.empty()
        except TextEncoderUnavailable as error:
            raise TextEncoderUnavailable(
                f"CFG of this model uses an empty prompt, which needs the text encoder, or its features as negative=. {error}"
            ) from error
