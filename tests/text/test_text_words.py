"""The word encoder: splitting, features, files, and how its vocabulary and vectors are made."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import training.words as training
from nextscale.errors import CheckpointError, PromptError, SettingError, TextEncoderUnavailable
from nextscale.loading.load import fill_random
from nextscale.models import InfinityConfig
from nextscale.models.infinity import Infinity
from nextscale.text import Encoder, WordTextEncoder
from nextscale.text.words import FILE_NAME, SINGLE_PARTS, Vocabulary, WordEncoder, WordEncoderConfig, plain_words, stems
from tests.helpers.tiny import INFINITY_SCHEDULE
from training.records import Record
from training.words import SentenceModel, build_vocabulary, common_parts, distil_vectors, make_word_encoder

WORDS = ("a", "red", "cat", "on", "snow", "mobile", "3d", "smile", "run", "puppy", "shirt")
ENTRIES = (*WORDS, "##ish", "##ing", *SINGLE_PARTS)
VOCABULARY = Vocabulary(ENTRIES)
PROMPTS = ["a red cat", "cat", "a 3d smile on snow, puppy shirt"]
CHANNELS = 192


def tiny_encoder(longest: int = 12) -> WordTextEncoder:
    torch.manual_seed(0)
    model = WordEncoder(WordEncoderConfig(len(VOCABULARY), vector_channels=8, longest=longest))
    model.vectors.normal_()
    return WordTextEncoder(VOCABULARY, model.eval())


def read(text: str) -> list[str]:
    return [VOCABULARY.entries[position] for position in VOCABULARY.split(text)]


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("A red CAT!", ["a", "red", "cat"]),
        ("réd, \u2615 cat", ["red", "cat"]),
        ("red-cat's", ["red", "cat", "##s"]),
        ("３Ｄ cat", ["3d", "cat"]),
        ("cats puppies", ["cat", "puppy"]),
        ("smiling smiled running", ["smile", "smile", "run"]),
        ("snowmobile", ["snow", "mobile"]),
        ("reddish", ["##r", "##e", "##d", "##d", "##ish"]),
        ("øx", ["##o", "##x"]),
    ],
)
def test_words_then_stems_then_parts(text: str, entries: list[str]) -> None:
    assert read(text) == entries


def test_words_in_other_letters_are_not_left_out_silently() -> None:
    with pytest.raises(PromptError, match="prompt must use .* '猫'"):
        VOCABULARY.split("a red 猫")


@given(st.text())
def test_any_text_is_spelled_out_or_refused(text: str) -> None:
    words = plain_words(text)
    lost = [word for word in text.split() if any(sign.isalpha() for sign in word) and not plain_words(word)]
    if lost or not words:
        with pytest.raises(PromptError, match="prompt must"):
            VOCABULARY.split(text)
        return
    ids = VOCABULARY.split(text)
    assert all(0 <= position < len(VOCABULARY) for position in ids)
    assert not any(unicodedata.combining(sign) for word in words for sign in word)


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789", min_size=1))
def test_spelling_loses_nothing(word: str) -> None:
    if word not in VOCABULARY and not any(stem in VOCABULARY for stem in stems(word)):
        assert "".join(entry.removeprefix("##") for entry in read(word)) == word


def test_the_vocabulary_is_plain_text_with_an_entry_per_line() -> None:
    assert VOCABULARY.text().splitlines() == list(ENTRIES)
    assert Vocabulary.parse(VOCABULARY.text()).entries == ENTRIES


@pytest.mark.parametrize(
    ("entries", "message"),
    [(("Red", *SINGLE_PARTS), "'Red'"), (("red", "red", *SINGLE_PARTS), "must be unique; got 1"), (SINGLE_PARTS[1:], "missing: ##a")],
)
def test_vocabularies_that_cannot_work_are_refused(entries: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Vocabulary(entries)


@pytest.mark.parametrize(("setting", "message"), [({"layers": 0}, "layers"), ({"heads": 5}, "width 192; got 5"), ({"width": "8"}, "'8'")])
def test_configurations_that_cannot_work_are_refused(setting: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        WordEncoderConfig(words=10, **setting)


def test_a_model_for_another_vocabulary_is_refused() -> None:
    with pytest.raises(SettingError, match=f"vocabulary must have 5 .* got {len(ENTRIES)}"):
        WordTextEncoder(VOCABULARY, WordEncoder(WordEncoderConfig(words=5)))


def test_one_row_per_word_after_the_begin_token() -> None:
    encoder: Encoder = tiny_encoder()
    features = encoder(PROMPTS)
    assert (features.lengths, features.channels) == ((4, 2, 8), CHANNELS)
    assert features.mask is None
    assert encoder.empty() is None
    assert all(row.dtype == torch.float32 and not row.requires_grad for row in features.rows)


def test_a_batch_equals_its_texts_alone() -> None:
    encoder = tiny_encoder()
    together = encoder(PROMPTS)
    for prompt, row in zip(PROMPTS, together.rows, strict=True):
        assert torch.allclose(encoder([prompt]).rows[0], row, rtol=0, atol=1e-5)


def test_order_and_words_matter() -> None:
    one, other, third = tiny_encoder()(["red cat", "cat red", "red snow"]).rows
    assert (one[0] - other[0]).abs().max() > 1e-3
    assert (one[0] - third[0]).abs().max() > 1e-3  # the begin token reads the others


def test_long_and_empty_prompts_are_refused() -> None:
    encoder = tiny_encoder(longest=4)
    assert encoder(["a red cat"]).lengths == (4,)
    with pytest.raises(PromptError, match="prompt must have at most 4 tokens; got 5 .* begins with 'a red cat on'"):
        encoder(["a cat", "a red cat on"])
    with pytest.raises(PromptError, match="visible character"):
        encoder([" "])
    with pytest.raises(PromptError, match="single string"):
        encoder("a cat")


def test_gradients_reach_the_layers_but_not_the_vectors() -> None:
    encoder = tiny_encoder()
    features = encoder.encode(*encoder.tokenize(PROMPTS))
    torch.cat([row.square() for row in features.rows]).mul(torch.linspace(0, 1, CHANNELS)).sum().backward()
    assert "vectors" not in dict(encoder.model.named_parameters())
    assert not encoder.model.vectors.requires_grad
    for name, parameter in encoder.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_an_infinity_takes_the_features() -> None:
    model = Infinity(InfinityConfig(2, 64, 4, chunks=1, bits_per_token=6, text_channels=CHANNELS, longest_text=12))
    fill_random(model, torch.Generator().manual_seed(0), torch.float32, model.float32)
    conditioning = model.condition(tiny_encoder()(PROMPTS), guided=True, schedule=INFINITY_SCHEDULE)
    assert conditioning.start.shape == (6, 1, 64)
    assert conditioning.start.isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0), (torch.float16, 5e-3)])
def test_saved_and_loaded(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    encoder = tiny_encoder()
    encoder.save(tmp_path / FILE_NAME, dtype)
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]
    for source in (tmp_path, str(tmp_path / FILE_NAME)):
        loaded = WordTextEncoder.load(source)
        assert loaded.vocabulary.entries == ENTRIES
        assert loaded.model.config == encoder.model.config
        for ours, theirs in zip(loaded(PROMPTS).rows, encoder(PROMPTS).rows, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=tolerance)


def test_a_loaded_encoder_can_be_trained_on(tmp_path: Path) -> None:
    tiny_encoder().save(tmp_path / FILE_NAME)
    model = WordTextEncoder.load(tmp_path).model
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert "vectors" in dict(model.named_buffers())


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": None}, "'vocabulary' is missing"),
        ({"vocabulary": torch.zeros(3)}, "must be a 1-D uint8 tensor"),
        ({"vocabulary": as_bytes("\n".join(ENTRIES[1:]))}, f"vocabulary must have {len(ENTRIES)} entries"),
        ({"vocabulary": torch.tensor([255], dtype=torch.uint8)}, "utf-8"),
        ({"config": as_bytes("{")}, "Expecting"),
        ({"config": as_bytes("[1]")}, "config must be WordEncoderConfig"),
        ({"config": as_bytes("[" * 10**5)}, "recursion"),
        ({"config": as_bytes(json.dumps({"words": len(ENTRIES), "longest": True}))}, "config.longest must be int; got True"),
        ({"config": as_bytes(json.dumps({"words": 3, "color": 1}))}, "color"),
        ({"config": as_bytes(json.dumps({"words": len(ENTRIES), "layers": 10**9}))}, "too few or too small"),
        ({"config": as_bytes(json.dumps({"words": len(ENTRIES), "width": 3 * 10**9}))}, "too few or too small"),
        ({"begin": None}, "Missing key.*begin"),
        ({"begin": torch.zeros(5)}, r"begin: .*\[5\].*\[192\]"),
        ({"begin": torch.full((192,), torch.nan)}, "NaN or infinity in begin"),
        ({"more": torch.zeros(5)}, "Unexpected key.*more"),
    ],
)
def test_files_that_do_not_hold_together_are_refused(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    path = tmp_path / FILE_NAME
    tiny_encoder().save(path)
    save_file({name: tensor for name, tensor in (load_file(path) | changes).items() if tensor is not None}, path)
    with pytest.raises(CheckpointError, match=f"is not a valid word encoder: .*{message}"):
        WordTextEncoder.load(path)


def test_absent_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not an existing file"):
        WordTextEncoder.load(tmp_path)
    path = tmp_path / FILE_NAME
    tiny_encoder().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        WordTextEncoder.load(path)


def test_nothing_is_written_where_no_file_can_be(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "absent" / FILE_NAME):
        with pytest.raises(CheckpointError, match="existing folder"):
            tiny_encoder().save(target)
    assert not list(tmp_path.iterdir())


def test_captions_come_first_then_parts_then_extra_words_until_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "PARTS", 2)
    captions = ["A red cat", "a cat", "A dog"]
    vocabulary = build_vocabulary(captions, ["cats", "blue", "blue", "cat", "green", "gray"], size=4 + 36 + 2 + 2)
    assert vocabulary.entries[:4] == ("a", "cat", "red", "dog")
    assert vocabulary.entries[-2:] == ("blue", "green")  # "cats" is read as "cat"
    with pytest.raises(SettingError, match="no room for 4 words"):
        build_vocabulary(captions, [], size=30)


def test_a_size_without_room_is_refused_before_the_sentence_model_is_opened(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no room for 2 words"):
        make_word_encoder([Record("1.webp", "red fox")], tmp_path / "nowhere", size=30)


def test_parts_are_the_chunks_that_cover_most() -> None:
    assert common_parts(["singing", "ringing", "cat"])[0] == "##ing"


class LetterModel(SentenceModel):
    """Counts letters instead of reading meaning."""

    def __init__(self) -> None:
        pass

    def vectors(self, words: list[str]) -> Tensor:
        return torch.tensor([[float(word.count(letter)) for letter in "abcdef"] for word in words])


def test_vectors_are_centered_and_of_unit_size_and_keep_what_is_alike_together() -> None:
    words = ["aab", "aaab", "cd", "ccd", "ef", "eff", "##cd", "##x"]
    vectors = distil_vectors(words, LetterModel(), channels=4)
    assert vectors.shape == (8, 4)
    assert torch.allclose(vectors[:6].mean(0), torch.zeros(4), atol=1e-6)
    assert torch.allclose(vectors[:6].square().mean(), torch.ones(()))
    distances = torch.cdist(vectors[:6], vectors[:6]).fill_diagonal_(torch.inf)
    assert distances.argmin(1).tolist() == [1, 0, 3, 2, 5, 4]
    assert torch.allclose(vectors[6], vectors[2:4].mean(0))  # the words that hold "cd"
    assert not vectors[7].any()
    with pytest.raises(SettingError, match="6 words of 6 channels do not span 7"):
        distil_vectors(words, LetterModel(), channels=7)


@pytest.fixture(scope="module")
def sentence_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a random BERT whose vocabulary consists of words and letters."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "photo", "blue", "boat", *letters, *(f"##{s}" for s in letters)]
    tokenizer = transformers.BertTokenizerFast(vocab={entry: position for position, entry in enumerate(entries)})
    tokenizer.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(entries), encoding="utf-8")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(entries), hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_a_word_is_the_mean_of_its_tokens_in_any_batch(sentence_folder: Path) -> None:
    model = SentenceModel(sentence_folder)
    assert model.words() == ["the", "photo", "blue", "boat"]
    words = ["boat", "unknowable", "red"]
    together = model.vectors(words)
    assert together.shape == (3, 128)
    for position, word in enumerate(words):
        assert torch.allclose(model.vectors([word])[0], together[position], atol=1e-5)
    expected = [model([carrier.format("red")]).rows[0].mean(0) for carrier in ("{}", "a photo of a {}")]
    assert torch.allclose(together[2], torch.stack([row / row.norm() for row in expected]).mean(0), atol=1e-5)


def test_an_encoder_made_from_records_reads_all_their_words(sentence_folder: Path) -> None:
    records = [
        Record("1.webp", "an icon of a qwokka", subject="a qwokka", alt="small zorse", keywords=("vlip",)),
        Record("2.webp", "a photo of a shirt", caption_color="a photo of a gurple shirt"),
    ]
    encoder = make_word_encoder(records, sentence_folder, size=700)
    assert len(encoder.vocabulary) == len(encoder.model.vectors) == 700
    for word in ("qwokka", "zorse", "vlip", "gurple", "shirt", "the", "kitten"):
        assert word in encoder.vocabulary
    assert encoder(["a gurple zorse"]).lengths == (4,)


def test_a_folder_without_a_sentence_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TextEncoderUnavailable, match="vocab.txt"):
        SentenceModel(tmp_path)
