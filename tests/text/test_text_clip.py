"""STAR's text encoder, on a tiny CLIP text model with random weights and a tokenizer built here, in the folders of Stable Diffusion 2.1."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nextscale.errors import PromptError, TextEncoderUnavailable
from nextscale.text import ClipEncoder
from tests.text.test_text import count_encoded_prompts, no_network  # noqa: F401  (no_network is an autouse fixture)

transformers = pytest.importorskip("transformers")

CHANNELS = 32
START, END = "<|startoftext|>", "<|endoftext|>"
SHORT = "a cat"
LONG = "a red dog on a mat"


def save_tokenizer(folder: Path, pad_token: str = "!", **settings: Any) -> None:
    """Saves a tokenizer with one token per letter, and start and end tokens, in the files of Stable Diffusion 2.1 (no tokenizer.json)."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # "!" is the first
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), START, END]
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad_token}
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    config = {"tokenizer_class": "CLIPTokenizer", "do_lower_case": True, "model_max_length": 77, **special, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_clip(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(
        vocab_size=514,
        hidden_size=CHANNELS,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_act="gelu",
        # As published, although it is not the id of the end token: transformers then looks for the largest id.
        eos_token_id=2,
    )
    model = transformers.CLIPTextModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder / "text_encoder")
    weights = load_file(folder / "text_encoder" / "model.safetensors")
    published = {name if name.startswith("text_model.") else f"text_model.{name}": weight for name, weight in weights.items()}
    published["text_model.embeddings.position_ids"] = torch.arange(77).unsqueeze(0)
    save_file(published, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def folder(saved_model: Path, tmp_path: Path) -> Path:
    """Returns a copy that a test may modify."""
    return Path(shutil.copytree(saved_model, tmp_path / "clip"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "text_encoder" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def by_hand(folder: Path, text: str) -> Tensor:
    """Features of the real tokens [n, channels]; the last of them is the end token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = transformers.CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
    tokens = tokenizer([text], padding="max_length", max_length=77, truncation=True, return_tensors="pt")
    assert tokens["input_ids"].shape == (1, 77)
    with torch.inference_mode():
        hidden = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    return hidden[0, : int(tokens["attention_mask"].sum())].clone()


def assert_features(folder: Path, encoder: ClipEncoder) -> None:
    features = encoder([SHORT, LONG])
    assert features.mask is None
    assert features.pooled is not None
    assert features.lengths == (6, 15)  # letters, the start and the end token
    assert features.pooled.dtype == features.rows[0].dtype == torch.float32
    for text, row, pooled in zip((SHORT, LONG), features.rows, features.pooled, strict=True):
        expected = by_hand(folder, text)
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pooled, expected[-1], atol=1e-4, rtol=1e-4)


# --- encoding ---------------------------------------------------------------------------------------------------------------------


def test_equals_transformers(saved_model: Path) -> None:
    encoder = ClipEncoder(saved_model)
    assert encoder.channels == CHANNELS
    assert encoder.max_length == 77
    assert_features(saved_model, encoder)


def test_end_token_named_by_the_configuration(folder: Path) -> None:
    edit_config(folder, eos_token_id=513)
    assert_features(folder, ClipEncoder(folder))


@pytest.mark.parametrize("pad_token", ["!", END])
def test_choice_of_pad_token_changes_nothing(folder: Path, pad_token: str) -> None:
    published = ClipEncoder(folder)([SHORT])
    save_tokenizer(folder / "tokenizer", pad_token)
    encoder = ClipEncoder(folder)
    assert encoder._tokenizer.pad_token == pad_token
    other = encoder([SHORT])
    assert published.pooled is not None
    assert other.pooled is not None
    torch.testing.assert_close(other.rows[0], published.rows[0])
    torch.testing.assert_close(other.pooled, published.pooled)


def test_model_gets_padded_ids_and_the_mask(saved_model: Path) -> None:
    encoder = ClipEncoder(saved_model)
    seen: dict[str, Tensor] = {}
    encoder._model.register_forward_pre_hook(lambda _module, _args, kwargs: seen.update(kwargs), with_kwargs=True)
    encoder([SHORT])
    assert seen["input_ids"].shape == seen["attention_mask"].shape == (1, 77)
    assert seen["attention_mask"][0].tolist() == [1] * 6 + [0] * 71
    assert seen["input_ids"][0, 6:].unique().tolist() == [0]  # "!"


def test_left_padding_is_left_out_too(folder: Path) -> None:
    """Here the mask changes the features: real tokens would attend to the padding before them."""
    save_tokenizer(folder / "tokenizer", padding_side="left")
    encoder = ClipEncoder(folder)
    tokens = encoder._tokenizer([SHORT], padding="max_length", max_length=77, return_tensors="pt")
    assert tokens["attention_mask"][0].tolist() == [0] * 71 + [1] * 6
    with torch.inference_mode():
        hidden = encoder._model(**tokens).last_hidden_state[0, 71:].clone()
        leaking = encoder._model(input_ids=tokens["input_ids"]).last_hidden_state[0, 71:].clone()
    row = encoder([SHORT]).rows[0]
    torch.testing.assert_close(row, hidden, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(row, leaking, atol=1e-2)


def test_cached_features_move_with_the_encoder(saved_model: Path) -> None:
    encoder = ClipEncoder(saved_model)
    encoder([SHORT])
    moved = encoder.to("meta")([SHORT])
    assert moved.pooled is not None
    assert (moved.rows[0].device.type, moved.pooled.device.type) == ("meta", "meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_runs_in_float32_and_moves_its_cache(saved_model: Path) -> None:
    encoder = ClipEncoder(saved_model, device="cuda")
    features = encoder([SHORT])
    assert features.pooled is not None
    assert (features.rows[0].device.type, features.pooled.device.type, encoder._model.dtype) == ("cuda", "cuda", torch.float32)
    assert encoder.to("cpu")([SHORT]).rows[0].device.type == "cpu"


# --- no prompt --------------------------------------------------------------------------------------------------------------------


def test_empty_text_stands_for_no_prompt(saved_model: Path) -> None:
    features = ClipEncoder(saved_model).empty()
    expected = by_hand(saved_model, "")
    assert features.pooled is not None
    assert features.lengths == (2,)  # start and end
    torch.testing.assert_close(features.rows[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features.pooled[0], expected[-1], atol=1e-4, rtol=1e-4)


def test_empty_text_is_encoded_once_and_stays_no_prompt(saved_model: Path) -> None:
    encoder = ClipEncoder(saved_model)
    batches = count_encoded_prompts(encoder)
    first, second = encoder.empty(), encoder.empty()
    assert batches == [1]
    assert torch.equal(first.rows[0], second.rows[0])
    with pytest.raises(PromptError, match="prompt 0 must .*; got ''"):
        encoder([""])


# --- refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [77, None], ids=["published", "no maximum in the tokenizer"])
def test_long_prompt_is_refused_and_the_limit_is_exact(folder: Path, largest: int | None) -> None:
    save_tokenizer(folder / "tokenizer", model_max_length=largest)
    encoder = ClipEncoder(folder)
    assert encoder(["c" * 75]).lengths == (77,)
    with pytest.raises(PromptError, match=r"at most 77 tokens; got 78 \(including the start and end tokens\)\. .*'ccc"):
        encoder(["c" * 76])


def test_shorter_maximum_of_the_tokenizer(folder: Path) -> None:
    save_tokenizer(folder / "tokenizer", model_max_length=8)
    encoder = ClipEncoder(folder)
    assert encoder(["c" * 6]).lengths == (8,)
    with pytest.raises(PromptError, match="at most 8 tokens; got 9"):
        encoder(["c" * 7])


def test_other_model_types_are_refused(folder: Path) -> None:
    edit_config(folder, model_type="t5")
    with pytest.raises(TextEncoderUnavailable, match=r"must have model_type 'clip_text_model' .*; got 't5'"):
        ClipEncoder(folder)


def test_tokenizer_json_replaces_vocabulary_and_merges(folder: Path) -> None:
    expected = ClipEncoder(folder)([LONG]).rows[0]
    tokenizer_folder = folder / "tokenizer"
    transformers.AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(tokenizer_folder)
    assert (tokenizer_folder / "tokenizer.json").is_file()
    (tokenizer_folder / "vocab.json").unlink()
    (tokenizer_folder / "merges.txt").unlink()
    assert torch.equal(ClipEncoder(folder)([LONG]).rows[0], expected)
