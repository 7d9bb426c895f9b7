"""What all text encoders share: prompts are checked, encoded once and remembered; the model is read from a folder or the hub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from ..errors import NextscaleError, PromptError, SettingError
from .features import TextFeatures
from .files import EncoderFiles, EncoderSource

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


class Encoder(Protocol):
    """All that a pipeline asks of a text encoder."""

    def __call__(self, prompts: Sequence[str]) -> TextFeatures: ...

    def empty(self) -> TextFeatures | None:
        """One prompt that stands for "no prompt" in guidance; None where the model has its own."""
        ...


class TextEncoder(ABC):
    """A published text model behind a cache of recent prompts.

    `source` is a folder with the files of the model, or a hub name. A folder never touches the network.
    `dtype` is the one the model computes in; the features are float32 in any case.
    Prompts that are too long are refused, not cut. The features of the last `cache_size` prompts are kept (0 keeps none).
    `offload`: between prompts the weights lie in the host's memory, and a GPU has them only while it encodes.
    """

    files: ClassVar[EncoderFiles]
    cuda_dtype: ClassVar[torch.dtype]  # the default there; float32 elsewhere
    cuda_bytes: ClassVar[int]  # of the published weights there
    limit_name: ClassVar[str]  # how the refusal of a long prompt names the limit

    def __init__(
        self,
        source: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        cache_size: int = 64,
        offload: bool = False,
    ) -> None:
        if cache_size < 0:
            raise SettingError(f"cache_size is {cache_size}; expected 0 (no cache) or more prompts")
        self.device = torch.device(device)
        if dtype is None:
            dtype = self.cuda_dtype if self.device.type == "cuda" else torch.float32
        if not dtype.is_floating_point:
            raise SettingError(f"dtype is {dtype}; expected a floating type: torch.float16, torch.bfloat16 or torch.float32")
        self.source = source
        self._cache = _RecentPrompts(cache_size)
        self._tokenizer, model = self._load(source, dtype)
        self.offload = offload
        self._model = model.eval().to(self._resting_place)

    @property
    def _resting_place(self) -> torch.device:
        return torch.device("cpu") if self.offload else self.device

    @property
    def channels(self) -> int:
        """Channels of the features."""
        return self._model.config.hidden_size

    def to(self, device: torch.device | str) -> Self:
        """Move the encoder and its cached features; the dtype stays what it was."""
        self.device = torch.device(device)
        self._model.to(self._resting_place)
        self._cache.to(self.device)
        return self

    def __call__(self, prompts: Sequence[str]) -> TextFeatures:
        """Features of each prompt, float32, on the encoder's device. Only prompts that are not in the cache are encoded."""
        check_prompts(prompts)
        return self._features(prompts)

    def empty(self) -> TextFeatures | None:
        """The features that stand for "no prompt" in guidance; None where the model has its own."""
        return None

    def _features(self, prompts: Sequence[str]) -> TextFeatures:
        features = {prompt: known for prompt in prompts if (known := self._cache.get(prompt)) is not None}
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in features]
        if new:
            encoded = TextFeatures.of(self._encode(new))
            # Copies, because a view would keep the whole batch alive in the cache.
            features.update((prompt, encoded.one(position).clone()) for position, prompt in enumerate(new))
        for prompt in dict.fromkeys(prompts):
            self._cache.put(prompt, features[prompt])
        # Copies, so that a caller who writes into the result does not change the cache.
        return TextFeatures.joined([features[prompt].clone() for prompt in prompts])

    @abstractmethod
    def _encode(self, prompts: list[str]) -> TextFeatures:
        """Run the model; float32, on the encoder's device."""

    def _tokenise(self, prompts: list[str], limit: int, padding: Literal["max_length", False]) -> BatchEncoding:
        """One list of ids per prompt, refused where it is longer than `limit`; padding "max_length" fills each up to it."""
        tokens = self._tokenizer(prompts, padding=padding, max_length=limit, truncation=False, verbose=False)
        for prompt, ids in zip(prompts, tokens["input_ids"], strict=True):
            if len(ids) > limit:
                raise PromptError(
                    f"prompt has {len(ids)} tokens; expected at most {limit} ({self.limit_name}). Shorten the prompt that begins with "
                    f"{' '.join(prompt.split()[:8])[:80]!r}"
                )
        return tokens

    def _run(self, token_ids: Tensor, mask: Tensor, **options: Any) -> Any:
        """The model's output for ids and mask [B, T]; tokens where the mask is False are not attended to."""
        with self._weights_on_device(), torch.inference_mode():
            return self._model(input_ids=token_ids.to(self.device), attention_mask=mask.long().to(self.device), **options)

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Keeps the weights on the device inside the `with` block. Those on the host stay there, so that nothing has to be copied back."""
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
                own[name] = weight  # torch puts new ones in their place where it cannot move them

    def _load(self, given: str | Path, dtype: torch.dtype) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
        try:
            import_module("transformers")
        except ImportError as error:
            raise self.files.missing_extra("transformers") from error

        source = EncoderSource(given, self.files)
        folder = source.open()
        try:
            source.check_model_type(folder)
            tokenizer = self._load_tokenizer(folder / self.files.tokenizer_folder)
            model, report = self._load_model(
                folder / self.files.model_folder,
                # float16 has to be asked for here: transformers then keeps the layers that overflow in float32.
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except NextscaleError:
            raise
        # Damaged files surface as OSError, ValueError, KeyError, RuntimeError, SafetensorError or plain Exception.
        except Exception as error:
            raise source.unavailable(f"could not be read: {error}.") from error
        # transformers fills absent weights with random numbers and only warns.
        if report["missing_keys"]:
            raise source.unavailable(
                f"is not a whole {self.files.kind} encoder: {len(report['missing_keys'])} weights are absent, "
                f"for example {min(report['missing_keys'])}."
            )
        return tokenizer, model

    def _load_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    @abstractmethod
    def _load_model(self, folder: Path, **settings: Any) -> Any:
        """The model and transformers' report on its weights: `from_pretrained` of the right class, with these settings."""


def check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str):
        raise PromptError(f"prompts are the single string {prompts[:40]!r}; expected a sequence of prompts, so write [prompt]")
    if len(prompts) == 0:
        raise PromptError("no prompt given; expected at least one")
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise PromptError(f"prompt {position} has type {type(prompt).__name__}; expected str")
        if not prompt.strip():
            raise PromptError(f"prompt {position} is {prompt!r}; expected at least one visible character")


class _RecentPrompts:
    """Features of the prompts used last, at most `size` of them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._features: OrderedDict[str, TextFeatures] = OrderedDict()

    def get(self, prompt: str) -> TextFeatures | None:
        return self._features.get(prompt)

    def put(self, prompt: str, features: TextFeatures) -> None:
        self._features[prompt] = features
        self._features.move_to_end(prompt)
        while len(self._features) > self._size:
            self._features.popitem(last=False)

    def to(self, device: torch.device) -> None:
        for prompt, features in self._features.items():
            self._features[prompt] = features.to(device)
