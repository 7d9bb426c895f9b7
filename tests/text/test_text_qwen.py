"""HART's text encoder, on tiny Qwen2 and Qwen2-VL models with random weights and a tokenizer built here."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nextscale.errors import PromptError, SettingError, TextEncoderUnavailable
from nextscale.text import SYSTEM_PROMPT, QwenEncoder
from tests.text.test_text import no_network  # noqa: F401  (an autouse fixture)

transformers = pytest.importorskip("transformers")

CHANNELS = 32
TOKENS = 24
PAD = "<|endoftext|>"
SHORT = "a cat"
LONG = "a red dog on a mat"
SIDES = ("left", "right")
MODEL_TYPES = ("qwen2", "qwen2_vl")
TEXT_SHAPE = {
    "vocab_size": 300,
    "hidden_size": CHANNELS,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def save_tokenizer(folder: Path, padding_side: str = "right", pad_token: str | None = PAD) -> None:
    """Saves a tokenizer with one token per byte, without start and end tokens, like Qwen2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad_token, padding_side=padding_side)
    fast.save_pretrained(folder)


def save_qwen(folder: Path, model_type: str = "qwen2", padding_side: str = "right") -> Path:
    torch.manual_seed(0)
    # Whole models, as published: the head and the vision part are in the file and the encoder leaves them alone.
    if model_type == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT_SHAPE))
    else:
        rope = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": CHANNELS, "num_heads": 2}
        config = transformers.Qwen2VLConfig(text_config={**TEXT_SHAPE, "rope_parameters": rope}, vision_config=vision)
        model = transformers.Qwen2VLForConditionalGeneration(config)
    # Wider than the default start values, which leave attention scores near zero and would hide a leak of padding.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, padding_side)
    return folder


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("qwen")
    return {(kind, side): save_qwen(root / f"{kind}-{side}", kind, side) for kind in MODEL_TYPES for side in SIDES}


@pytest.fixture
def saved_model(saved_models: dict[tuple[str, str], Path]) -> Path:
    return saved_models["qwen2", "right"]


@pytest.fixture
def folder(saved_model: Path, tmp_path: Path) -> Path:
    """Returns a copy that a test may modify."""
    return Path(shutil.copytree(saved_model, tmp_path / "qwen"))


@pytest.fixture
def vision_folder(saved_models: dict[tuple[str, str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_models["qwen2_vl", "right"], tmp_path / "qwen2_vl"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def by_hand(folder: Path, text: str, system_prompt: str, padding_side: str) -> tuple[Tensor, Tensor]:
    """Features [TOKENS, channels] and mask [TOKENS], padded without the tokenizer and run through the whole model with its head."""
    auto = transformers.Qwen2ForCausalLM if "qwen2_vl" not in str(folder) else transformers.Qwen2VLForConditionalGeneration
    model = auto.from_pretrained(folder).eval()
    language_model = model.model if auto is transformers.Qwen2ForCausalLM else model.model.language_model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt, system = tokenizer(text)["input_ids"], tokenizer(system_prompt)["input_ids"]
    padding = [tokenizer.convert_tokens_to_ids(PAD)] * (TOKENS - len(prompt))
    real, filler = [1] * len(prompt), [0] * len(padding)
    padded, mask = (padding + prompt, filler + real) if padding_side == "left" else (prompt + padding, real + filler)
    with torch.inference_mode():
        output = language_model(
            input_ids=torch.tensor([system + padded]),
            attention_mask=torch.tensor([[1] * len(system) + mask]),
            output_hidden_states=True,
        )
    return output.hidden_states[-1][0, len(system) :].clone(), torch.tensor(mask).bool()


# --- encoding ---------------------------------------------------------------------------------------------------------------------


def test_system_prompt_is_the_published_text() -> None:
    assert len(SYSTEM_PROMPT) == 705
    assert hashlib.sha256(SYSTEM_PROMPT.encode()).hexdigest() == "424f7aa7b1119f8ed1e329140e5941dfe308183bea0af59041dad5527a9b8f20"


@pytest.mark.parametrize("padding_side", SIDES)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_equals_transformers(saved_models: dict[tuple[str, str], Path], model_type: str, padding_side: str) -> None:
    folder = saved_models[model_type, padding_side]
    features = QwenEncoder(folder, tokens=TOKENS)([SHORT, LONG])
    assert features.pooled is None
    assert features.mask is not None
    assert features.lengths == (TOKENS, TOKENS)
    for text, row, mask in zip((SHORT, LONG), features.rows, features.mask, strict=True):
        expected_row, expected_mask = by_hand(folder, text, SYSTEM_PROMPT, padding_side)
        assert row.dtype == torch.float32
        assert torch.equal(mask, expected_mask)
        torch.testing.assert_close(row, expected_row, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padding_side", SIDES)
def test_mask_and_positions(saved_models: dict[tuple[str, str], Path], padding_side: str) -> None:
    """HART counts real tokens; the count minus one is the position of the last column on either side."""
    mask = QwenEncoder(saved_models["qwen2", padding_side], tokens=TOKENS)([SHORT, LONG]).mask
    assert mask is not None
    assert mask.sum(1).tolist() == [len(SHORT), len(LONG)]
    positions = mask.long().cumsum(1) - 1
    assert positions[:, -1].tolist() == [len(SHORT) - 1, len(LONG) - 1]
    assert positions[0, 0] == (-1 if padding_side == "left" else 0)


@pytest.mark.parametrize("padding_side", SIDES)
def test_padding_carries_features(saved_models: dict[tuple[str, str], Path], padding_side: str) -> None:
    features = QwenEncoder(saved_models["qwen2", padding_side], tokens=TOKENS)([SHORT])
    assert features.mask is not None
    padding = features.rows[0][~features.mask[0]]
    assert padding.abs().amax(1).min() > 0.1
    assert not torch.allclose(padding[0], padding[1], atol=1e-3)


def test_published_length(saved_model: Path) -> None:
    features = QwenEncoder(saved_model)([SHORT])
    assert features.lengths == (300,)
    assert features.mask is not None
    assert features.mask.shape == (1, 300)


def test_system_prompt_is_read_and_can_be_changed(saved_model: Path) -> None:
    by_default = QwenEncoder(saved_model, tokens=TOKENS)([SHORT]).rows[0]
    other = QwenEncoder(saved_model, tokens=TOKENS, system_prompt="draw ")([SHORT]).rows[0]
    without = QwenEncoder(saved_model, tokens=TOKENS, system_prompt=None)([SHORT]).rows[0]
    torch.testing.assert_close(other, by_hand(saved_model, SHORT, "draw ", "right")[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(by_default, other, atol=1e-2)
    assert not torch.allclose(without, other, atol=1e-2)


def test_left_padding_in_front_of_everything_is_finite(saved_models: dict[tuple[str, str], Path]) -> None:
    """Without a system prompt, the first padding positions have no tokens to attend to."""
    row = QwenEncoder(saved_models["qwen2", "left"], tokens=TOKENS, system_prompt=None)([SHORT]).rows[0]
    assert torch.isfinite(row).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_float32_rows_near_float32(saved_model: Path, dtype: torch.dtype) -> None:
    exact = QwenEncoder(saved_model, tokens=TOKENS)([SHORT]).rows[0]
    half = QwenEncoder(saved_model, tokens=TOKENS, dtype=dtype)([SHORT]).rows[0]
    assert half.dtype == torch.float32
    assert 0 < (half - exact).norm() / exact.norm() < 0.05  # zero would mean that dtype was ignored


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_runs_in_bfloat16_and_moves_its_cache(saved_model: Path) -> None:
    encoder = QwenEncoder(saved_model, tokens=TOKENS, device="cuda")
    features = encoder([SHORT])
    assert features.mask is not None
    assert (features.rows[0].device.type, features.mask.device.type, encoder._model.dtype) == ("cuda", "cuda", torch.bfloat16)
    assert encoder.to("cpu")([SHORT]).rows[0].device.type == "cpu"


def test_pad_token_in_a_prompt_counts_as_padding(saved_model: Path) -> None:
    encoder = QwenEncoder(saved_model, tokens=TOKENS)
    mask = encoder([f"cat{PAD}dog"]).mask
    assert mask is not None
    assert mask[0, :8].tolist() == [True, True, True, False, True, True, True, False]
    with pytest.raises(PromptError, match="mask must .*prompt 0"):
        encoder([PAD])


def test_guidance_needs_no_empty_text(saved_model: Path) -> None:
    assert QwenEncoder(saved_model).empty() is None


# --- refused ----------------------------------------------------------------------------------------------------------------------


def test_long_prompt_is_refused_and_the_limit_is_exact(saved_model: Path) -> None:
    encoder = QwenEncoder(saved_model, tokens=5)
    mask = encoder(["a cat"]).mask
    assert mask is not None
    assert mask.all()
    with pytest.raises(PromptError, match=r"at most 5 tokens; got 6 \(tokens\)\. .*'a cats'"):
        encoder([SHORT, "a cats"])
    with pytest.raises(PromptError, match="at most 300 tokens; got 301"):
        QwenEncoder(saved_model)(["c" * 301])


def test_no_tokens(saved_model: Path) -> None:
    with pytest.raises(SettingError, match="tokens must .*; got 0"):
        QwenEncoder(saved_model, tokens=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2_vl_text", None])
def test_other_model_types_are_refused(folder: Path, model_type: str | None) -> None:
    edit_config(folder, model_type=model_type)
    with pytest.raises(TextEncoderUnavailable, match=rf"must have model_type 'qwen2' or 'qwen2_vl' .*; got {model_type!r}"):
        QwenEncoder(folder)


def test_tokenizer_without_a_pad_token(folder: Path) -> None:
    save_tokenizer(folder, pad_token=None)
    with pytest.raises(TextEncoderUnavailable, match="pad_token"):
        QwenEncoder(folder)


# --- Qwen2-VL ---------------------------------------------------------------------------------------------------------------------


def test_vision_weights_are_not_needed(vision_folder: Path) -> None:
    whole = QwenEncoder(vision_folder, tokens=TOKENS)
    assert not any("visual" in name for name, _ in whole._model.named_parameters())
    weights = load_file(vision_folder / "model.safetensors")
    assert any(name.startswith("visual.") for name in weights)
    kept = {name: weight for name, weight in weights.items() if not name.startswith("visual.")}
    save_file(kept, vision_folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(QwenEncoder(vision_folder, tokens=TOKENS)([SHORT]).rows[0], whole([SHORT]).rows[0])


def test_newer_names_of_the_text_weights(vision_folder: Path) -> None:
    expected = QwenEncoder(vision_folder, tokens=TOKENS)([SHORT]).rows[0]
    weights = load_file(vision_folder / "model.safetensors")
    assert "model.embed_tokens.weight" in weights
    renamed = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file(renamed, vision_folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(QwenEncoder(vision_folder, tokens=TOKENS)([SHORT]).rows[0], expected)


def test_published_form_of_the_configuration(vision_folder: Path) -> None:
    """The published config.json has the text settings at its top level."""
    expected = QwenEncoder(vision_folder, tokens=TOKENS)([SHORT]).rows[0]
    config = json.loads((vision_folder / "config.json").read_text())
    flat = {**config.pop("text_config"), **config, "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    del flat["rope_parameters"]
    (vision_folder / "config.json").write_text(json.dumps(flat))
    assert torch.equal(QwenEncoder(vision_folder, tokens=TOKENS)([SHORT]).rows[0], expected)
