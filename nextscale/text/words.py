"""Text encoder of `nano`: frozen word vectors and a few trained layers. Needs no other package."""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints import Checkpoint, Layout, NoInitialValues, open_checkpoint, write_whole
from ..errors import CheckpointError, PromptError, SettingError
from ..io import expanded
from ..serialization import from_plain, parse_json
from ..validation import is_int, require
from .encoder import check_length, check_prompts
from .features import TextFeatures, pad

FILE_NAME = "words.safetensors"
PART_MARK = "##"
SINGLE_PARTS = tuple(PART_MARK + letter for letter in ascii_lowercase + digits)
SHORTEST_WORD_AS_PART = 4  # "snowmobile" is read as snow + mobile, but words are not split at an accidental "the" or "ran"

# Letters that Unicode does not decompose into a plain letter and an accent.
_PLAIN_LETTERS = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i"})
# Ending -> possible replacements in the stem, in this order.
_ENDINGS = (("ies", ("y",)), ("es", ("e", "")), ("s", ("",)), ("ing", ("e", "")), ("ed", ("e", "")))
_SHORTEST_STEM = 3


def plain_words(text: str) -> list[str]:
    """Returns runs of a-z and 0-9 in lower case without accents; other characters separate words or are dropped."""
    plain = unicodedata.normalize("NFKD", text.casefold().translate(_PLAIN_LETTERS))
    return re.findall("[a-z0-9]+", "".join(sign for sign in plain if not unicodedata.combining(sign)))


def stems(word: str) -> list[str]:
    """Returns possible stems of a word: "puppy" for "puppies", "runn" and "run" for "running"."""
    found = []
    for ending, replacements in _ENDINGS:
        body = word.removesuffix(ending)
        if body == word or len(body) < _SHORTEST_STEM:
            continue
        found += [body + replacement for replacement in replacements]
        if ending != "s" and len(body) > _SHORTEST_STEM and body[-1] == body[-2]:
            found.append(body[:-1])
    return found


class Vocabulary:
    """Tokens of texts: whole words, and word parts (marked "##") that spell all other words.

    The id of an entry is its position. Every letter and digit must be present as a part, so that any word can be spelled.

    >>> Vocabulary(["red", "snow", *SINGLE_PARTS]).split("Red snow!")
    [0, 1]
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        if bad := [entry for entry in self.entries if not re.fullmatch(f"({PART_MARK})?[a-z0-9]+", entry)]:
            raise SettingError(f"vocabulary entries must be a-z and 0-9, after {PART_MARK!r} for word parts; got {bad[0]!r}.")
        ids = {entry: position for position, entry in enumerate(self.entries)}
        if len(ids) < len(self.entries):
            raise SettingError(f"vocabulary entries must be unique; got {len(self.entries) - len(ids)} duplicates.")
        if absent := [part for part in SINGLE_PARTS if part not in ids]:
            raise SettingError(f"vocabulary must contain every letter and digit as a word part; missing: {' '.join(absent)}.")
        self._words = {entry: position for entry, position in ids.items() if not entry.startswith(PART_MARK)}
        self._parts = {entry: position for entry, position in self._words.items() if len(entry) >= SHORTEST_WORD_AS_PART}
        self._parts |= {entry.removeprefix(PART_MARK): place for entry, place in ids.items() if entry.startswith(PART_MARK)}
        self._longest_part = max(map(len, self._parts))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a text with one entry per line."""
        return cls(text.splitlines())

    def text(self) -> str:
        """Returns the entries as text, one per line."""
        return "\n".join(self.entries) + "\n"

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, word: str) -> bool:
        return word in self._words

    def split(self, text: str) -> list[int]:
        """Returns the ids of the words of a text, of their stems if a word is unknown, or else of the parts that spell it."""
        if lost := [word for word in text.split() if any(map(str.isalpha, word)) and not plain_words(word)]:
            raise PromptError(f"prompt must use the letters a-z; got {lost[0]!r} in {text[:80]!r}. Describe the image in English.")
        ids = [position for word in plain_words(text) for position in self._word(word)]
        if not ids:
            raise PromptError(f"prompt must have letters a-z or digits; got {text[:80]!r}. Describe the image in English.")
        return ids

    def _word(self, word: str) -> list[int]:
        known = next((form for form in (word, *stems(word)) if form in self._words), None)
        return self._spelled(word) if known is None else [self._words[known]]

    def _spelled(self, word: str) -> list[int]:
        ids, start = [], 0
        while start < len(word):
            lengths = range(min(self._longest_part, len(word) - start), 0, -1)
            length = next(length for length in lengths if word[start : start + length] in self._parts)
            ids.append(self._parts[word[start : start + length]])
            start += length
        return ids


@dataclass(frozen=True)
class WordEncoderConfig:
    words: int  # size of the vocabulary
    vector_channels: int = 128
    width: int = 192  # channels of the features; stored files use this name
    layers: int = 2
    heads: int = 3
    longest: int = 48  # maximum number of tokens, including the begin token

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require(is_int(value, least=1), f"{name} of a word encoder", "an int of at least 1", value)
        require(self.width % self.heads == 0, "heads of a word encoder", f"a divisor of its width {self.width}", self.heads)


class Layer(nn.Module):
    def __init__(self, config: WordEncoderConfig) -> None:
        super().__init__()
        dim = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Applies the layer to x [B, T, C]; mask [B, 1, 1, T] is False for padding."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class WordEncoder(nn.Module):
    """Encodes ids as features. The word vectors are a frozen buffer; the layers are trained together with the image model."""

    vectors: Tensor

    def __init__(self, config: WordEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("vectors", torch.zeros(config.words, config.vector_channels))
        self.embed = nn.Linear(config.vector_channels, config.width)
        self.begin = nn.Parameter(nn.init.normal_(torch.empty(config.width), std=0.5))  # similar in size to an embedded word
        self.positions = nn.Parameter(nn.init.normal_(torch.empty(config.longest, config.width), std=0.02))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns features [B, 1 + T, dim] of ids [B, T], starting with the begin token; mask [B, T] is False for padding."""
        words = self.embed(self.vectors[ids])
        x = torch.cat([self.begin.to(words.dtype).expand(len(ids), 1, -1), words], dim=1)
        x = x + self.positions[: x.shape[1]]
        mask = F.pad(mask, (1, 0), value=True)[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class WordTextEncoder:
    """A vocabulary and a `WordEncoder`; features have a begin token followed by one row per token.

    Prompts longer than the model's `longest` raise PromptError; they are not truncated. To train, pass the ids of `tokenize` to `encode`.

    >>> encoder = WordTextEncoder.load("words.safetensors", device="cuda")
    >>> features = encoder(["a red bicycle", "a lighthouse in the fog at dawn"])
    """

    def __init__(self, vocabulary: Vocabulary, model: WordEncoder) -> None:
        if len(vocabulary) != model.config.words:
            raise SettingError(f"vocabulary must have {model.config.words} entries for this word encoder; got {len(vocabulary)}.")
        self.vocabulary = vocabulary
        self.model = model

    @property
    def device(self) -> torch.device:
        return self.model.vectors.device

    @property
    def channels(self) -> int:
        """Number of channels of the features."""
        return self.model.config.width

    def to(self, device: torch.device | str) -> Self:
        self.model.to(device)
        return self

    def __call__(self, prompts: Sequence[str]) -> TextFeatures:
        """Returns the float32 features of each prompt on the encoder's device, without gradients."""
        check_prompts(prompts)
        with torch.no_grad():
            return self.encode(*self.tokenize(prompts))

    def empty(self) -> TextFeatures | None:
        return None

    def tokenize(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns ids [B, T] on the CPU, padded with zeros on the right, and a mask [B, T] that is False for padding."""
        rows = [self.vocabulary.split(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, rows, strict=True):
            check_length(prompt, len(ids) + 1, self.model.config.longest, "words or parts of words, and the begin token")
        return pad(rows)

    def encode(self, ids: Tensor, mask: Tensor) -> TextFeatures:
        """Returns float32 features of the output of `tokenize`, with one row for the begin token; gradients reach the layers."""
        return TextFeatures.unpad(self.model(ids.to(self.device), mask.to(self.device)), F.pad(mask, (1, 0), value=True))

    @classmethod
    def load(cls, source: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Loads a file written by `save`, or a folder with such a file under its default name, in float32."""
        path = expanded(source)
        checkpoint = open_checkpoint(path / FILE_NAME if path.is_dir() else path, _LAYOUT)
        try:
            vocabulary = Vocabulary.parse(_stored_text(checkpoint, "vocabulary"))
            config = from_plain(WordEncoderConfig, parse_json(_stored_text(checkpoint, "config")), "config")
            longest_side = max((side for shape in checkpoint.shapes.values() for side in shape), default=0)
            if config.layers > len(checkpoint.shapes) or max(asdict(config).values()) > longest_side:
                raise ValueError(f"its tensors are too few or too small for {config}")  # before a huge module is created
            with torch.device("meta"), NoInitialValues():
                model = WordEncoder(config)
            stored = checkpoint.tensors(key for key in checkpoint.entries if key not in _LAYOUT.ignored)
            weights = {name: tensor.to(device, torch.float32, copy=True) for name, tensor in stored}
            if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
                raise ValueError(f"NaN or infinity in {', '.join(broken)}")
            model.load_state_dict(weights, assign=True)
            return cls(vocabulary, model.eval())
        except (RuntimeError, ValueError) as error:
            problem = " ".join(str(error).split()).rstrip(". ")
            message = f"{checkpoint.path} is not a valid word encoder: {problem}. Pass a file written by WordTextEncoder.save."
            raise CheckpointError(message) from error

    def save(self, target: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes the weights as `dtype`, the vocabulary and the configuration to one safetensors file, atomically."""
        target = Path(target)
        if target.is_dir() or not target.parent.is_dir():
            raise CheckpointError(f"target must be a file name in an existing folder, for example {FILE_NAME}; got {target}.")
        weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.model.state_dict().items()}
        settings = {"vocabulary": self.vocabulary.text(), "config": json.dumps(asdict(self.model.config))}
        stored = {name: torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in settings.items()}
        write_whole(weights | stored, target)


# The vocabulary and the configuration are stored as byte tensors, so that programs that copy tensors keep them.
_LAYOUT = Layout(ignored=("vocabulary", "config"))


def _stored_text(checkpoint: Checkpoint, key: str) -> str:
    if key not in checkpoint.entries:
        raise ValueError(f"{key!r} is missing")
    (_, tensor), *_ = checkpoint.tensors([key])
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise ValueError(f"{key!r} must be a 1-D uint8 tensor; got {tensor.dtype} {list(tensor.shape)}")
    return tensor.numpy().tobytes().decode("utf-8")
