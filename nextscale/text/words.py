"""The text encoder of `nano`: frozen word vectors under a few trained layers. It needs no further package."""

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
SHORTEST_WORD_AS_PART = 4  # "snowmobile" reads as snow + mobile, but no word is cut at a chance "the" or "ran"

# Letters that Unicode does not take apart into a plain one and its accent.
_PLAIN_LETTERS = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i"})
# Ending -> what may stand in its place in the stem, tried in this order.
_ENDINGS = (("ies", ("y",)), ("es", ("e", "")), ("s", ("",)), ("ing", ("e", "")), ("ed", ("e", "")))
_SHORTEST_STEM = 3


def plain_words(text: str) -> list[str]:
    """Returns runs of a-z and 0-9 in lower case without accents; everything else separates words or is dropped."""
    plain = unicodedata.normalize("NFKD", text.casefold().translate(_PLAIN_LETTERS))
    return re.findall("[a-z0-9]+", "".join(sign for sign in plain if not unicodedata.combining(sign)))


def stems(word: str) -> list[str]:
    """Returns the words that this one may be a form of: "puppies" of "puppy", "running" of "runn" and "run"."""
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
    """The tokens of texts: whole words, and parts (marked "##") that spell the other words.

    An entry's place is its id. Every single letter and digit has to be there as a part, so that any word can be spelt.

    >>> Vocabulary(["red", "snow", *SINGLE_PARTS]).split("Red snow!")
    [0, 1]
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        if bad := [entry for entry in self.entries if not re.fullmatch(f"({PART_MARK})?[a-z0-9]+", entry)]:
            raise SettingError(f"vocabulary entry {bad[0]!r}: expected lower case letters a-z and digits, after {PART_MARK!r} for a part")
        ids = {entry: position for position, entry in enumerate(self.entries)}
        if len(ids) < len(self.entries):
            raise SettingError(f"the vocabulary has {len(self.entries) - len(ids)} entries twice; expected each once")
        if absent := [part for part in SINGLE_PARTS if part not in ids]:
            raise SettingError(f"the vocabulary lacks the parts {' '.join(absent)}; expected every letter and digit, to spell with")
        self._words = {entry: position for entry, position in ids.items() if not entry.startswith(PART_MARK)}
        self._parts = {entry: position for entry, position in self._words.items() if len(entry) >= SHORTEST_WORD_AS_PART}
        self._parts |= {entry.removeprefix(PART_MARK): place for entry, place in ids.items() if entry.startswith(PART_MARK)}
        self._longest_part = max(map(len, self._parts))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the vocabulary of a plain text with one entry per line."""
        return cls(text.splitlines())

    def text(self) -> str:
        """Returns a plain text with one entry per line."""
        return "\n".join(self.entries) + "\n"

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, word: str) -> bool:
        return word in self._words

    def split(self, text: str) -> list[int]:
        """Returns the ids of a text's words, else of their stems, else of the parts that spell them."""
        if lost := [word for word in text.split() if any(map(str.isalpha, word)) and not plain_words(word)]:
            raise PromptError(f"prompt {text[:80]!r}: {lost[0]!r} has none of the letters a-z; describe the picture in English words")
        ids = [position for word in plain_words(text) for position in self._word(word)]
        if not ids:
            raise PromptError(f"prompt {text[:80]!r} has none of the letters a-z and no digit; describe the picture in English words")
        return ids

    def _word(self, word: str) -> list[int]:
        known = next((form for form in (word, *stems(word)) if form in self._words), None)
        return self._spelt(word) if known is None else [self._words[known]]

    def _spelt(self, word: str) -> list[int]:
        ids, start = [], 0
        while start < len(word):
            lengths = range(min(self._longest_part, len(word) - start), 0, -1)
            length = next(length for length in lengths if word[start : start + length] in self._parts)
            ids.append(self._parts[word[start : start + length]])
            start += length
        return ids


@dataclass(frozen=True)
class WordEncoderConfig:
    words: int  # entries of the vocabulary
    vector_channels: int = 128
    width: int = 192  # channels of the features; not `dim`, since stored files have it under this name
    layers: int = 2
    heads: int = 3
    longest: int = 48  # tokens of a text, the begin token included

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
        """x [B, T, C]; mask [B, 1, 1, T] is True on the tokens that are read."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class WordEncoder(nn.Module):
    """Ids to features. The vectors are a buffer and stay as they are; the layers are trained together with the image model."""

    vectors: Tensor

    def __init__(self, config: WordEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("vectors", torch.zeros(config.words, config.vector_channels))
        self.embed = nn.Linear(config.vector_channels, config.width)
        self.begin = nn.Parameter(nn.init.normal_(torch.empty(config.width), std=0.5))  # about the size of an embedded word
        self.positions = nn.Parameter(nn.init.normal_(torch.empty(config.longest, config.width), std=0.02))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns features [B, 1 + T, dim] of ids [B, T], the begin token first. mask [B, T] is False on padding."""
        words = self.embed(self.vectors[ids])
        x = torch.cat([self.begin.to(words.dtype).expand(len(ids), 1, -1), words], dim=1)
        x = x + self.positions[: x.shape[1]]
        mask = F.pad(mask, (1, 0), value=True)[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class WordTextEncoder:
    """Prompts to features by a vocabulary and a `WordEncoder`; one row per word after a begin token.

    Prompts longer than the model's `longest` tokens are refused, not cut. To train, pass the ids of `tokenize` to `encode`.

    >>> encoder = WordTextEncoder.load("words.safetensors", device="cuda")
    >>> features = encoder(["a red bicycle", "a lighthouse in the fog at dawn"])
    """

    def __init__(self, vocabulary: Vocabulary, model: WordEncoder) -> None:
        if len(vocabulary) != model.config.words:
            raise SettingError(f"a vocabulary of {len(vocabulary)} entries and a word encoder for {model.config.words}; expected one count")
        self.vocabulary = vocabulary
        self.model = model

    @property
    def device(self) -> torch.device:
        return self.model.vectors.device

    @property
    def channels(self) -> int:
        """Width of the features."""
        return self.model.config.width

    def to(self, device: torch.device | str) -> Self:
        self.model.to(device)
        return self

    def __call__(self, prompts: Sequence[str]) -> TextFeatures:
        """Returns the features of each prompt, float32, on the encoder's device, without gradients."""
        check_prompts(prompts)
        with torch.no_grad():
            return self.encode(*self.tokenize(prompts))

    def empty(self) -> TextFeatures | None:
        return None

    def tokenize(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns ids [B, T] on the CPU, padded with zeros on the right, and their mask [B, T]."""
        rows = [self.vocabulary.split(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, rows, strict=True):
            check_length(prompt, len(ids) + 1, self.model.config.longest, "one for each word or part of one, one for the beginning")
        return pad(rows)

    def encode(self, ids: Tensor, mask: Tensor) -> TextFeatures:
        """Returns float32 features of what `tokenize` returned, one row more than words; gradients reach the layers."""
        return TextFeatures.unpad(self.model(ids.to(self.device), mask.to(self.device)), F.pad(mask, (1, 0), value=True))

    @classmethod
    def load(cls, source: str | Path, *, device: torch.device | str = "cpu") -> Self:
        """Reads the file that `save` wrote, or a folder with it under its usual name. Float32, whatever the file has."""
        path = expanded(source)
        checkpoint = open_checkpoint(path / FILE_NAME if path.is_dir() else path, _LAYOUT)
        try:
            vocabulary = Vocabulary.parse(_stored_text(checkpoint, "vocabulary"))
            config = from_plain(WordEncoderConfig, parse_json(_stored_text(checkpoint, "config")), "config")
            longest_side = max((side for shape in checkpoint.shapes.values() for side in shape), default=0)
            if config.layers > len(checkpoint.shapes) or max(asdict(config).values()) > longest_side:
                raise ValueError(f"its tensors are too few or too small for {config}")  # and for a module of that size
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
            message = f"{checkpoint.path} is not a whole word encoder: {problem}. Pass a file that WordTextEncoder.save wrote."
            raise CheckpointError(message) from error

    def save(self, target: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes one safetensors file with the weights as `dtype`, the vocabulary and the configuration; whole or not at all."""
        target = Path(target)
        if target.is_dir() or not target.parent.is_dir():
            raise CheckpointError(f"{target} cannot be written. Expected a file name in an existing folder, for example {FILE_NAME}")
        weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.model.state_dict().items()}
        settings = {"vocabulary": self.vocabulary.text(), "config": json.dumps(asdict(self.model.config))}
        stored = {name: torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in settings.items()}
        write_whole(weights | stored, target)


# The vocabulary and the configuration travel as tensors of bytes, so that no program which copies tensors loses them.
_LAYOUT = Layout(ignored=("vocabulary", "config"))


def _stored_text(checkpoint: Checkpoint, key: str) -> str:
    if key not in checkpoint.entries:
        raise ValueError(f"it has no {key!r}")
    (_, tensor), *_ = checkpoint.tensors([key])
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise ValueError(f"its {key!r} is {tensor.dtype} {list(tensor.shape)}, not a row of bytes")
    return tensor.numpy().tobytes().decode("utf-8")
