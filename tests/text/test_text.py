"""Prompts to features, on a tiny T5 with random weights and a tokenizer built here."""

from __future__ import annotations

import fnmatch
import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nextscale.errors import MissingExtra, PromptError, SettingError, TextEncoderUnavailable
from nextscale.loading.load import prompt_reader
from nextscale.loading.presets import model_spec
from nextscale.text import RandomEncoder, T5Encoder, TextEncoder, with_positive_prompt

transformers = pytest.importorskip("transformers")

CHANNELS = 32
WORDS = ("a", "red", "cat", "dog", "sits", "on", "the", "mat", "and", "looks", "at", "Red")
SHORT = "a cat"
LONG = "a red dog sits on the mat and looks at the cat"


def save_tokenizer(folder: Path) -> None:
    """Saves a unigram tokenizer of words and letters with T5's layout: <pad>=0, </s>=1, <unk>=2, and an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0)]
    pieces += [(f"\u2581{word}", -2.0) for word in WORDS]
    pieces += [(letter, -6.0) for letter in "\u2581abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    fast.save_pretrained(folder)


def tiny_config() -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=128,
        d_model=CHANNELS,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    # The whole model, as published: the decoder and the head are in the file and the encoder leaves them alone.
    model = transformers.T5ForConditionalGeneration(tiny_config())
    # The default start values of T5 leave attention scores near zero; wider ones make a leak of padding visible.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(saved_model: Path, tmp_path: Path) -> Path:
    """Returns a copy that a test may modify."""
    return Path(shutil.copytree(saved_model, tmp_path / "t5"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("a test tried to open a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield


def count_encoded_prompts(encoder: TextEncoder) -> list[int]:
    """Records the number of prompts of each forward call."""
    batches: list[int] = []

    def note(_module: torch.nn.Module, _args: tuple[()], kwargs: dict[str, Tensor]) -> None:
        batches.append(kwargs["input_ids"].shape[0])

    encoder._model.register_forward_pre_hook(note, with_kwargs=True)
    return batches


def hub_that_returns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Records the repository and file patterns of each request."""
    requests: list[tuple[str, list[str]]] = []

    def download(name: str, patterns: list[str]) -> Path:
        requests.append((name, patterns))
        return folder

    monkeypatch.setattr("nextscale.text.files.snapshot", download)
    return requests


# --- positive prompt --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [("a woman and a man", True), ("the four seasons", True), ("an employee", True), ("a cat", False), ("A BOY", False), ("", False)],
)
def test_positive_prompt(prompt: str, changes: bool) -> None:
    added = ". very smooth faces, good looking faces, face to the camera, perfect facial features"
    assert with_positive_prompt(prompt) == (prompt + added if changes else prompt)


# --- encoding ---------------------------------------------------------------------------------------------------------------------


def test_equals_transformers_padded_to_512(saved_model: Path) -> None:
    prompts = [SHORT, LONG, "Red cat"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved_model)
    model = transformers.T5EncoderModel.from_pretrained(saved_model).eval()
    tokens = tokenizer(prompts, max_length=512, padding="max_length", truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    features = T5Encoder(saved_model)(prompts)
    assert features.lengths == (3, 13, 3)  # words and the end token
    for row, states, mask in zip(features.rows, hidden, tokens["attention_mask"], strict=True):
        torch.testing.assert_close(row, states[mask == 1].clone(), atol=1e-4, rtol=1e-4)


def test_batch_equals_single_prompts_in_any_order(saved_model: Path) -> None:
    prompts = [SHORT, LONG, "the mat"]
    encoder = T5Encoder(saved_model, cache_size=0)
    together = encoder(prompts)
    reversed_order = encoder(prompts[::-1])
    for index, prompt in enumerate(prompts):
        torch.testing.assert_close(together.rows[index], encoder([prompt]).rows[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together.rows[index], reversed_order.rows[-1 - index], atol=1e-4, rtol=1e-4)


def test_case_is_kept(saved_model: Path) -> None:
    lower, upper = T5Encoder(saved_model)(["red cat", "Red cat"]).rows
    assert lower.shape == upper.shape
    assert not torch.allclose(lower, upper, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_float32_rows_near_float32(saved_model: Path, dtype: torch.dtype) -> None:
    exact = T5Encoder(saved_model)([SHORT, LONG])
    half = T5Encoder(saved_model, dtype=dtype)([SHORT, LONG])
    for row, reference in zip(half.rows, exact.rows, strict=True):
        assert row.dtype == torch.float32
        error = (row - reference).norm() / reference.norm()
        assert 0 < error < 0.05  # zero would mean that dtype was ignored


def test_float16_keeps_the_overflowing_layers_in_float32(saved_model: Path) -> None:
    model = T5Encoder(saved_model, dtype=torch.float16)._model
    assert {parameter.dtype for name, parameter in model.named_parameters() if ".wo." in name} == {torch.float32}
    assert model.shared.weight.dtype == torch.float16


def test_rows_are_plain_tensors(saved_model: Path) -> None:
    """Inference tensors could not pass through a layer that records gradients."""
    row = T5Encoder(saved_model)([SHORT]).rows[0]
    assert not row.is_inference()
    assert not row.requires_grad
    torch.nn.Linear(CHANNELS, 1)(row).sum().backward()


def test_channels_and_to(saved_model: Path) -> None:
    encoder = T5Encoder(saved_model)
    before = encoder([SHORT])
    assert encoder.channels == before.channels == CHANNELS
    assert encoder.to("cpu") is encoder
    assert torch.equal(encoder([SHORT]).rows[0], before.rows[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_runs_in_float16_and_moves_its_cache(saved_model: Path) -> None:
    encoder = T5Encoder(saved_model, device="cuda")
    row = encoder([SHORT]).rows[0]
    assert (row.device.type, row.dtype, encoder._model.dtype) == ("cuda", torch.float32, torch.float16)
    assert encoder.to("cpu")([SHORT]).rows[0].device.type == "cpu"


# --- cache ------------------------------------------------------------------------------------------------------------------------


def test_only_new_prompts_are_encoded(saved_model: Path) -> None:
    encoder = T5Encoder(saved_model)
    batches = count_encoded_prompts(encoder)
    first = encoder([SHORT, LONG, SHORT])
    assert batches == [2]
    second = encoder([LONG, "the mat", SHORT])
    assert batches == [2, 1]
    encoder([LONG])
    assert batches == [2, 1]
    assert torch.equal(first.rows[0], first.rows[2])
    assert torch.equal(first.rows[0], second.rows[2])
    assert torch.equal(first.rows[1], second.rows[0])


def test_cache_drops_the_prompt_used_longest_ago(saved_model: Path) -> None:
    encoder = T5Encoder(saved_model, cache_size=2)
    batches = count_encoded_prompts(encoder)
    encoder(["cat"])
    encoder(["dog"])
    encoder(["cat"])
    encoder(["mat"])  # now "dog" is the oldest and leaves
    assert batches == [1, 1, 1]
    encoder(["cat"])
    encoder(["mat"])
    assert batches == [1, 1, 1]
    encoder(["dog"])
    assert batches == [1, 1, 1, 1]


def test_batch_larger_than_the_cache(saved_model: Path) -> None:
    prompts = ["cat", "dog", "mat"]
    small = T5Encoder(saved_model, cache_size=1)(prompts)
    whole = T5Encoder(saved_model)(prompts)
    assert all(torch.equal(a, b) for a, b in zip(small.rows, whole.rows, strict=True))


def test_cache_size_zero_encodes_every_time(saved_model: Path) -> None:
    encoder = T5Encoder(saved_model, cache_size=0)
    batches = count_encoded_prompts(encoder)
    encoder([SHORT])
    encoder([SHORT])
    assert batches == [1, 1]


def test_writing_into_the_result_leaves_the_cache_alone(saved_model: Path) -> None:
    encoder = T5Encoder(saved_model)
    row = encoder([SHORT]).rows[0]
    kept = row.clone()
    row.zero_()
    assert torch.equal(encoder([SHORT]).rows[0], kept)


# --- prompts and settings that are refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([""], "prompt 0 must .*; got ''"),
        ([SHORT, " \n\t"], "prompt 1 must"),
        ([SHORT, 3], "prompt 1 must be a str; got int"),
        ([None], "prompt 0 must be a str; got NoneType"),
        ([], "no prompt"),
        (SHORT, r"Write \[prompt\]"),
    ],
)
def test_prompts_refused(saved_model: Path, prompts: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        T5Encoder(saved_model)(prompts)  # type: ignore[arg-type]


def test_long_prompt_is_refused_and_the_limit_is_exact(saved_model: Path) -> None:
    encoder = T5Encoder(saved_model, max_length=5)
    assert encoder(["a red cat sits"]).lengths == (5,)
    with pytest.raises(PromptError, match=r"at most 5 tokens; got 6 .*'a red cat sits on'"):
        encoder([SHORT, "a red cat sits on"])
    with pytest.raises(PromptError, match="at most 512 tokens; got 601"):
        T5Encoder(saved_model)(["cat " * 600])


@pytest.mark.parametrize("setting", [{"max_length": 0}, {"cache_size": -1}, {"dtype": torch.int8}])
def test_settings_refused(saved_model: Path, setting: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=next(iter(setting))):
        T5Encoder(saved_model, **setting)  # type: ignore[arg-type]


# --- files ------------------------------------------------------------------------------------------------------------------------


def assert_says_what_to_fetch(error: Exception, name: str = "google/flan-t5-xl") -> None:
    for part in (
        "config.json",
        "tokenizer.json or spiece.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "model.safetensors or model.safetensors.index.json (with its shards)",
        f"https://huggingface.co/{name} ",
        'text_encoder="<folder>"',
    ):
        assert part in str(error)


@pytest.mark.parametrize("source", ["./absent", "/absent/t5", "~/absent-t5", "weights/text/t5", Path("absent")])
def test_missing_folder_is_not_taken_for_a_hub_name(source: str | Path) -> None:
    with pytest.raises(TextEncoderUnavailable, match="is not a local folder") as raised:
        T5Encoder(source)
    assert_says_what_to_fetch(raised.value)


@pytest.mark.parametrize(
    ("removed", "reported"),
    [
        ("config.json", "missing: config.json"),
        ("tokenizer.json", "missing: tokenizer.json or spiece.model"),
        ("model.safetensors", "missing: model.safetensors or model.safetensors.index.json"),
    ],
)
def test_incomplete_folder_names_the_absent_file(folder: Path, removed: str, reported: str) -> None:
    (folder / removed).unlink()
    with pytest.raises(TextEncoderUnavailable, match=reported) as raised:
        T5Encoder(folder)
    assert_says_what_to_fetch(raised.value)


def test_folder_name_as_text_and_relative(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert T5Encoder(folder.name)([SHORT]).lengths == (3,)


def test_files_that_help_only_a_little_may_be_absent(folder: Path) -> None:
    whole = T5Encoder(folder)([SHORT])
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    assert torch.equal(T5Encoder(folder)([SHORT]).rows[0], whole.rows[0])


def test_shards(folder: Path) -> None:
    whole = T5Encoder(folder)([LONG])
    transformers.T5EncoderModel.from_pretrained(folder).save_pretrained(folder / "sharded", max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    for file in (folder / "sharded").glob("model*"):
        file.rename(folder / file.name)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert torch.equal(T5Encoder(folder)([LONG]).rows[0], whole.rows[0])

    shards[1].unlink()
    with pytest.raises(TextEncoderUnavailable, match=f"missing: {shards[1].name}"):
        T5Encoder(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(TextEncoderUnavailable, match="must be a JSON object; got a list"):
        T5Encoder(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (5, 'must have a "weight_map"'),
        (None, 'must have a "weight_map"'),
        ("../model.safetensors", "got '../model.safetensors', which is outside"),
        ("/etc/passwd", "outside its folder"),
        ("C:\\model.safetensors", "outside its folder"),
        ("absent.safetensors", "missing: absent.safetensors"),
    ],
)
def test_an_index_names_files_of_its_folder(name: object, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "t5"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "../model.safetensors"):
        (folder / file).write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(TextEncoderUnavailable, match=message):
        T5Encoder.files.open(folder)


@pytest.mark.parametrize("damaged", ["config.json", "tokenizer.json", "model.safetensors"])
def test_damaged_file(folder: Path, damaged: str) -> None:
    (folder / damaged).write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(TextEncoderUnavailable, match="could not be read"):
        T5Encoder(folder)


def test_weights_of_a_smaller_encoder_are_refused(folder: Path) -> None:
    """transformers would fill the absent layer with random numbers."""
    config = json.loads((folder / "config.json").read_text())
    config["num_layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TextEncoderUnavailable, match=r"not a complete T5 encoder: \d+ weights .* encoder\.block\.2"):
        T5Encoder(folder)


def test_pickled_weights_are_not_taken(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TextEncoderUnavailable, match=r"missing: model\.safetensors"):
        T5Encoder(folder)


def test_sentencepiece_file_alone_is_enough(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SHORT, LONG, "the dog and the cat"] * 10),
        model_prefix=str(folder / "spiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    assert T5Encoder(folder)([SHORT, LONG]).lengths == (len(pieces.encode(SHORT)) + 1, len(pieces.encode(LONG)) + 1)


@pytest.mark.parametrize("absent", ["sentencepiece", "google.protobuf"])
def test_sentencepiece_file_without_its_readers(folder: Path, monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    (folder / "tokenizer.json").rename(folder / "spiece.model")
    for module in ("sentencepiece", "google.protobuf"):
        monkeypatch.setitem(sys.modules, module, None if module == absent else sys)
    with pytest.raises(MissingExtra, match=rf"'{absent}'.*pip install 'nextscale\[text\]'"):
        T5Encoder(folder)


def test_missing_extra(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'nextscale\[text\]'"):
        T5Encoder(saved_model)


# --- hub --------------------------------------------------------------------------------------------------------------------------


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TextEncoderUnavailable, match="'nobody/absent-t5' is not on this machine.* could not be downloaded") as raised:
        T5Encoder("nobody/absent-t5")
    assert_says_what_to_fetch(raised.value, name="nobody/absent-t5")


def test_hub_download_asks_for_safetensors_only(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = hub_that_returns(saved_model, monkeypatch)
    assert T5Encoder("google/flan-t5-xl")([SHORT]).lengths == (3,)
    [(name, patterns)] = requests
    assert name == "google/flan-t5-xl"

    def wanted(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

    assert all(map(wanted, ("config.json", "tokenizer.json", "spiece.model", "model-00001-of-00002.safetensors")))
    assert not any(map(wanted, ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "tf_model.h5", "modeling_custom.py")))


def test_hub_repository_without_safetensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()
    hub_that_returns(folder, monkeypatch)
    with pytest.raises(TextEncoderUnavailable, match=r"'some/t5' is incomplete; missing: model\.safetensors") as raised:
        T5Encoder("some/t5")
    assert_says_what_to_fetch(raised.value, name="some/t5")


def test_what_cannot_be_offloaded_is_refused() -> None:
    spec = model_spec("infinity-2b")
    with pytest.raises(SettingError, match="offload=True"):
        prompt_reader(spec, RandomEncoder(2048), torch.device("cpu"), offload=True)
    with pytest.raises(SettingError, match="leave out offload_text"):
        prompt_reader(model_spec("nano"), None, torch.device("cpu"), offload=True)
    reader = prompt_reader(spec, "no-such-folder/encoder", torch.device("cpu"), offload=True)
    assert reader.open_encoder.offload is True  # type: ignore[attr-defined]
