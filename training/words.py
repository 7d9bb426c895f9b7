"""The frozen half of `nano`'s text encoder: its vocabulary, and word vectors distilled from a sentence model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.text.encoder import TextEncoder
from nextscale.text.features import TextFeatures, pad
from nextscale.text.files import EncoderFiles
from nextscale.text.words import PART_MARK, SINGLE_PARTS, Vocabulary, WordEncoder, WordEncoderConfig, WordTextEncoder, plain_words, stems

from .records import Record

# Of the 3 nearest of 517 emoji names, in the same Unicode subgroup with 128 channels: 42.0 % for the word alone, 45.7 % in the sentence,
# 44.3 % averaged. Averaged, because colors hardly look alike in the sentence: cosine of "red" and "blue" 0.75, 0.04 and 0.46.
CARRIERS = ("{}", "a photo of a {}")
BATCH = 256
PARTS = 300  # besides single letters and digits
PART_LENGTHS = range(2, 5)
COMMON_WORDS = 150  # of the sentence model's vocabulary, which is ordered by frequency: "in", "with", "under"
CANDIDATES = 12000  # further words of it among which to choose
RIDGE = 10.0

# What people ask for; captions of emoji and clothes lack many of them.
EVERYDAY_WORDS = (package_files(__package__) / "everyday_words.txt").read_text(encoding="utf-8").split()


def make_word_encoder(records: Sequence[Record], model_folder: str | Path, size: int = 5000) -> WordTextEncoder:
    """Returns an encoder with vectors for all words of the records and for further words up to `entries`. Its layers are random.

    Held-out records may be among them: their words get vectors, which come from the sentence model alone, and nothing is trained on them.
    """
    captions = [text for record in records for text in record_captions(record)]
    build_vocabulary(captions, [], size)  # refuses a size without room for the captions before the sentence model reads thousands of words
    model = SentenceModel(model_folder)
    known = list(dict.fromkeys(word for text in captions for word in plain_words(text)))
    further = further_words(list(dict.fromkeys([*known, *EVERYDAY_WORDS])), model)
    vocabulary = build_vocabulary(captions, [*model.words()[:COMMON_WORDS], *EVERYDAY_WORDS, *further], size)
    encoder = WordEncoder(WordEncoderConfig(words=len(vocabulary)))
    encoder.vectors.copy_(distil_vectors(vocabulary.entries, model, encoder.config.vector_channels))
    return WordTextEncoder(vocabulary, encoder.eval())


def record_captions(record: Record) -> Iterator[str]:
    """Yields all texts from which captions of this picture are composed."""
    yield from (record.caption, record.subject, record.label, record.alt, record.caption_color, *record.keywords)


def build_vocabulary(captions: Iterable[str], extra_words: Iterable[str], size: int) -> Vocabulary:
    """Returns `size` entries: all words of the captions, the most common first, then parts, then extra words in their order.

    Extra words whose stem is there are left out: prompts are read by the stem.
    """
    counts = Counter(word for caption in captions for word in plain_words(caption))
    words = [word for word, _ in counts.most_common()]
    extra = [word for word in dict.fromkeys(extra_words) if word not in counts]
    parts = [*SINGLE_PARTS, *common_parts([*words, *extra])]
    if len(words) + len(parts) > size:
        raise SettingError(f"a vocabulary of {size} entries has no room for {len(words)} words of the captions and {len(parts)} parts")
    known = set(words)
    added: list[str] = []
    for word in extra:
        if len(words) + len(parts) + len(added) == size:
            break
        if not known.intersection(stems(word)):
            known.add(word)
            added.append(word)
    return Vocabulary([*words, *parts, *added])


def common_parts(words: Iterable[str]) -> list[str]:
    """Returns the parts of words that cover the most letters of these words, marked as parts."""
    counts: Counter[str] = Counter()
    for word in words:
        counts.update(word[start : start + length] for length in PART_LENGTHS for start in range(len(word) - length + 1))
    chunks = sorted((chunk for chunk in counts if chunk.isalpha()), key=lambda chunk: (-counts[chunk] * len(chunk) ** 2, chunk))
    return [PART_MARK + chunk for chunk in chunks[:PARTS]]


def further_words(known: Sequence[str], model: SentenceModel) -> list[str]:
    """Returns other words of the model's vocabulary, sorted by similarity of their vectors to words of captions.

    A ridge regression separates the words of the captions from the others; its mistakes among the others are the words we want.
    """
    taken = set(known)
    others = [word for word in model.words()[:CANDIDATES] if word not in taken]
    vectors = model.vectors([*known, *others])
    vectors = F.normalize(vectors - vectors.mean(0), dim=1)
    is_known = (torch.arange(len(vectors)) < len(known)).float()
    weights = torch.linalg.solve(vectors.T @ vectors + RIDGE * torch.eye(vectors.shape[1]), vectors.T @ (is_known - is_known.mean()))
    order = (vectors[len(known) :] @ weights).argsort(descending=True)
    return [others[position] for position in order.tolist()]


def distil_vectors(words: Sequence[str], model: SentenceModel | str | Path, channels: int = 128) -> Tensor:
    """Returns the sentence model's vectors, centered, in principal components and with unit variance: float32 [words, channels].

    A part ("##ing") is the mean of the words that contain it, which carries little where they differ much.
    """
    model = model if isinstance(model, SentenceModel) else SentenceModel(model)
    whole = [position for position, word in enumerate(words) if not word.startswith(PART_MARK)]
    names = [words[position] for position in whole]
    vectors = model.vectors(names)
    if min(vectors.shape) < channels:
        raise SettingError(f"{len(names)} words of {vectors.shape[1]} channels do not span {channels} directions; give more words")
    vectors = vectors - vectors.mean(0)
    directions = torch.linalg.svd(vectors, full_matrices=False).Vh[:channels]
    vectors = vectors @ directions.T
    vectors = vectors / vectors.square().mean().sqrt()
    distilled = torch.zeros(len(words), channels)
    distilled[whole] = vectors
    for position in set(range(len(words))) - set(whole):
        part = words[position].removeprefix(PART_MARK)
        holders = [place for place, name in enumerate(names) if part in name]
        if holders:
            distilled[position] = vectors[holders].mean(0)
    return distilled


class SentenceModel(TextEncoder):
    """A BERT sentence model such as all-MiniLM-L6-v2: one vector per text, the mean over its tokens."""

    files = EncoderFiles(
        kind="BERT",
        repository="sentence-transformers/all-MiniLM-L6-v2",
        tokenizer_needs=(("tokenizer.json",), ("vocab.txt",)),
        tokenizer_helps=("tokenizer_config.json", "special_tokens_map.json"),
        model_types=("bert",),
    )
    cuda_dtype = torch.float32
    limit_name = "tokens"
    longest = 128

    def __init__(self, source: str | Path) -> None:
        super().__init__(source, cache_size=0)

    def words(self) -> list[str]:
        """Returns the whole words of the vocabulary, the most frequent first."""
        entries = sorted(self._tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        return [word for word, _ in entries if re.fullmatch("[a-z]{3,}|in|of|on|to|at|by|up|an|is|it", word)]

    def vectors(self, words: Sequence[str]) -> Tensor:
        """Returns vectors [words, channels]: means over all carriers of each word."""
        prompts = [carrier.format(word) for word in words for carrier in CARRIERS]
        order = sorted(range(len(prompts)), key=lambda position: len(prompts[position]))  # prompts of about one length share a batch
        vectors = torch.empty(len(prompts), self.channels)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            rows = self._encode([prompts[position] for position in batch]).rows
            vectors[batch] = F.normalize(torch.stack([row.mean(0) for row in rows]), dim=1)
        return vectors.unflatten(0, (-1, len(CARRIERS))).mean(1)

    def _encode(self, texts: list[str]) -> TextFeatures:
        ids, mask = pad(self._tokenize(texts, self.longest, padding=False)["input_ids"])  # [B, longest]
        return TextFeatures.unpad(self._run(ids, mask).last_hidden_state, mask)

    def _load_model(self, folder: Path, **settings: Any) -> Any:
        from transformers import BertModel

        return BertModel.from_pretrained(folder, **settings)
