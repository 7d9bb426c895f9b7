"""Base class of the published text encoders: loads files, and checks and caches prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from ..errors import NextscaleError, PromptError
from ..validation import require
from .features import TextFeatures
from .files import EncoderFiles

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


class Encoder(Protocol):
    """The interface of a text encoder."""

    def __call__(self, prompts: Sequence[str]) -> TextFeatures: ...

    def empty(self) -> TextFeatures | None:
        """Returns the features of the unconditional prompt for CFG; None if the model has its own."""
        ...


class TextEncoder(ABC):
    """A published text encoder with a cache of recent prompts. Prompts that are too long raise PromptError; they are not truncated.

    Args:
        source: folder with the model's files, which is never completed from the network, or a hub name.
        dtype: of the computation. Features are always float32.
        cache_size: maximum number of prompts in the cache.
        offload: keep the weights in host memory, except while encoding.
    """

    files: ClassVar[EncoderFiles]
    cuda_dtype: ClassVar[torch.dtype]  # default on CUDA; float32 elsewhere
    cuda_bytes: ClassVar[int]  # size of the published weights on CUDA
    limit_name: ClassVar[str]  # name of the length limit in error messages

    def __init__(
        self,
        source: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        cache_size: int = 64,
        offload: bool = False,
    ) -> None:
        require(cache_size >= 0, "cache_size", "an int of at least 0", cache_size)
        self.device = torch.device(device)
        if dtype is None:
            dtype = self.cuda_dtype if self.device.type == "cuda" else torch.float32
        require(dtype.is_floating_point, "dtype", "a floating type, such as torch.float16, torch.bfloat16 or torch.float32", dtype)
        self.source = source
        self._recent: dict[str, TextFeatures] = {}  # least recently used first
        self._cache_size = cache_size
        self._tokenizer, model = self._load(source, dtype)
        self.offload = offload
        self._model = model.eval().to(self._weights_device)

    @property
    def _weights_device(self) -> torch.device:
        return torch.device("cpu") if self.offload else self.device

    @property
    def channels(self) -> int:
        """Number of channels of the features."""
        return self._model.config.hidden_size

    def to(self, device: torch.device | str) -> Self:
        """Moves the encoder and its cached features."""
        self.device = torch.device(device)
        self._model.to(self._weights_device)
        self._recent = {prompt: features.to(self.device) for prompt, features in self._recent.items()}
        return self

    def __call__(self, prompts: Sequence[str]) -> TextFeatures:
        """Returns the float32 features of each prompt on the encoder's device; only prompts that are not cached are encoded."""
        check_prompts(prompts)
        return self._features(prompts)

    def empty(self) -> TextFeatures | None:
        """Returns the features of the unconditional prompt for CFG; None if the model has its own."""
        return None

    def _features(self, prompts: Sequence[str]) -> TextFeatures:
        features = {prompt: self._recent[prompt] for prompt in prompts if prompt in self._recent}
        if new := [prompt for prompt in dict.fromkeys(prompts) if prompt not in features]:
            encoded = TextFeatures.of(self._encode(new))
            # Cloned, because a view would keep the whole batch in memory.
            features.update((prompt, encoded.one(position).clone()) for position, prompt in enumerate(new))
        recent = {prompt: one for prompt, one in self._recent.items() if prompt not in features}
        recent |= {prompt: features[prompt] for prompt in prompts}
        self._recent = dict([*recent.items()][max(len(recent) - self._cache_size, 0) :])
        # Cloned, so that callers cannot modify the cache.
        return TextFeatures.joined([features[prompt].clone() for prompt in prompts])

    @abstractmethod
    def _encode(self, prompts: list[str]) -> TextFeatures:
        """Runs the model; returns float32 features on the encoder's device."""

    def _tokenize(self, prompts: list[str], limit: int, padding: Literal["max_length", False]) -> BatchEncoding:
        """Tokenizes prompts, padded to `limit` if padding is "max_length"; raises PromptError for longer prompts."""
        tokens = self._tokenizer(prompts, padding=padding, max_length=limit, truncation=False, verbose=False)
        for prompt, ids in zip(prompts, tokens["input_ids"], strict=True):
            check_length(prompt, len(ids), limit, self.limit_name)
        return tokens

    def _run(self, token_ids: Tensor, mask: Tensor, **options: Any) -> Any:
        """Returns the model's output for ids [B, T], with an attention mask [B, T] that is False for padding."""
        with self._weights_on_device(), torch.inference_mode():
            return self._model(input_ids=token_ids.to(self.device), attention_mask=mask.long().to(self.device), **options)

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Moves offloaded weights to the device inside the `with` block. The host keeps its copy, so nothing is copied back."""
        if not self.offload:
            yield
            return
        owners = [module._parameters for module in self._model.modules()]
        resting = [(own, name, weight, weight.data) for own in owners for name, weight in own.items() if weight is not None]
        try:
            self._model.to(self.device)
            yield
        finally:
            for own, name, weight, data in resting:
                weight.data = data
                own[name] = weight  # torch may have replaced the parameter

    def _load(self, given: str | Path, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
        self.files.require_package("transformers")
        folder = self.files.open(given)
        try:
            tokenizer = self._load_tokenizer(folder / self.files.tokenizer_folder)
            model, report = self._load_model(
                folder / self.files.model_folder,
                # Passed here, because transformers then keeps the layers that overflow in float16 in float32.
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except NextscaleError:
            raise
        # Damaged files raise OSError, ValueError, KeyError, RuntimeError, SafetensorError or plain Exception.
        except Exception as error:
            raise self.files.unavailable(given, f"could not be read: {error}.") from error
        if absent := report["missing_keys"]:  # transformers only warns, and initializes them randomly
            raise self.files.unavailable(
                given, f"is not a complete {self.files.kind} encoder: {len(absent)} weights are missing, for example {min(absent)}."
            )
        return tokenizer, model

    def _load_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    @abstractmethod
    def _load_model(self, folder: Path, **settings: Any) -> Any:
        """Calls `from_pretrained` of the model's class; returns the model and transformers' loading report."""


def check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str):
        raise PromptError(f"prompts must be a sequence; got the single string {prompts[:40]!r}. Write [prompt].")
    if len(prompts) == 0:
        raise PromptError("prompts must have at least one entry; got no prompt.")
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise PromptError(f"prompt {position} must be a str; got {type(prompt).__name__}.")
        if not prompt.strip():
            raise PromptError(f"prompt {position} must have at least one visible character; got {prompt!r}.")


def check_length(prompt: str, tokens: int, limit: int, name: str) -> None:
    if tokens > limit:
        raise PromptError(
            f"prompt must have at most {limit} tokens; got {tokens} ({name}). Shorten the prompt that begins with "
            f"{' '.join(prompt.split()[:8])[:80]!r}."
        )
