"""What a HART checkpoint tells of itself, on tiny checkpoints written here under the published names."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import nextscale
from nextscale.checkpoints import published_tensors
from nextscale.errors import CheckpointError, PromptError, SettingError, WeightsMismatch
from nextscale.loading import presets
from nextscale.loading.hart_config import MODEL, TOKENIZER, dump_config, own_config_file
from nextscale.loading.load import checkpoint_spec, fill_random
from nextscale.loading.presets import (
    HART_REPOSITORY,
    ModelConfig,
    ModelSpec,
    Source,
    TextSource,
    TokenizerConfig,
    build_model,
    build_tokenizer,
)
from nextscale.models import HartConfig
from nextscale.pipeline import Pipeline
from nextscale.serialization import MAX_BYTES
from nextscale.text import TextFeatures
from nextscale.tokenizers import HartTokenizerConfig
from tests.helpers import tiny
from tests.helpers.cli import run_cli

NAME = "hart-0.7b"
SIDES = (1, 2, 3, 4)
TEXT_TOKENS, TEXT_CHANNELS = 12, 40
POSITIONS = TEXT_TOKENS + 4 + 9 + 16
LEVEL_NUMBERS = {"lvl_1L": torch.zeros(1, POSITIONS, dtype=torch.int64)}
BUFFERS = {**LEVEL_NUMBERS, "attn_bias_for_masking": torch.zeros(1, 1, POSITIONS, POSITIONS)}

MODEL_CONFIG = HartConfig(
    depth=2,
    dim=64,
    heads=4,
    sides=SIDES,
    codes=640,
    latent_channels=8,
    text_channels=TEXT_CHANNELS,
    text_tokens=TEXT_TOKENS,
    residual_dim=48,
    residual_depth=3,
    residual_steps=6,
)
MODEL_JSON: dict[str, Any] = {
    "context_token": TEXT_TOKENS,
    "context_dim": TEXT_CHANNELS,
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "patch_nums": list(SIDES),
    "diff_width": 48,
    "diff_depth": 3,
    "mlp_type": "llama",
    "attn_type": "llama",
    "disable_aln": True,
    "use_timestep_embed": True,
    "use_context_norm": True,
    "num_sampling_steps": "6",
    "mlp_ratio": 4.0,
    "norm_eps": 1e-06,
    "shared_aln": False,
    "attn_l2_norm": False,
    "use_cross_attn": False,
}
WRITTEN_BY_TRANSFORMERS = {"architectures": ["HARTForT2I"], "torch_dtype": "float32", "transformers_version": "4.42.2", "vae_path": None}

TOKENIZER_CONFIG = HartTokenizerConfig(codes=640, latent_channels=8, channels=32, multipliers=(1, 2))
TOKENIZER_JSON: dict[str, Any] = {
    "quantizer_type": "var_hybrid",
    "ch": 32,
    "vocab_size": 640,
    "z_channels": 8,
    "ch_mult": [1, 2],
    "v_patch_nums": [1, 2, 3],
    "quant_conv_ks": 3,
    "quant_resi": 0.5,
    "share_quant_resi": 4,
    "using_znorm": False,
    "double_decoder": False,
}


@cache
def published(config: ModelConfig | TokenizerConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the part that `config` describes, under their published names."""
    with torch.device("meta"):
        build: Callable[[Any], Any] = build_tokenizer if hasattr(config, "autoencoder") else build_model
        module = build(config)
    fill_random(module, torch.Generator().manual_seed(seed), torch.float32, module.float32)
    ours = module.state_dict()
    slots = published_tensors(module, module.layout)
    return {key: ours[slot.parameter][slot.rows].reshape(slot.shape).clone() for key, slot in slots.items()}


def write_part(folder: Path, tensors: Mapping[str, Tensor], config: object | None = None, name: str = "model.safetensors") -> Path:
    """A folder with one file of weights and, unless it is None, config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (save_file if name.endswith(".safetensors") else torch.save)(dict(tensors), folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, config: object | None = MODEL_JSON, changed: Mapping[str, Tensor | None] | None = None) -> Path:
    """As published, with some tensors changed, added, or taken away (None)."""
    tensors = {**published(MODEL_CONFIG), **BUFFERS, **(changed or {})}
    return write_part(folder, {key: tensor for key, tensor in tensors.items() if tensor is not None}, config)


def write_tokenizer(folder: Path, config: object | None = TOKENIZER_JSON) -> Path:
    return write_part(folder, published(TOKENIZER_CONFIG), config)


def hart_model_config(preset: HartConfig, path: Path) -> HartConfig:
    found = checkpoint_spec(replace(presets.MODELS[NAME], model=preset), path, None).model
    assert isinstance(found, HartConfig)
    return found


def hart_tokenizer_config(preset: HartTokenizerConfig, path: Path) -> HartTokenizerConfig:
    found = checkpoint_spec(replace(presets.MODELS[NAME], tokenizer=preset), None, path).tokenizer
    assert isinstance(found, HartTokenizerConfig)
    return found


def refusal_of_model(path: Path, preset: HartConfig | None = None) -> str:
    with pytest.raises(CheckpointError) as refusal:
        hart_model_config(preset or HartConfig(), path)
    return str(refusal.value)


def refusal_of_tokenizer(path: Path) -> str:
    with pytest.raises(CheckpointError) as refusal:
        hart_tokenizer_config(HartTokenizerConfig(), path)
    return str(refusal.value)


# --- config.json and weights that agree ---------------------------------------------------------------------------------------------


def test_the_preset_does_not_matter_where_the_checkpoint_tells(tmp_path: Path) -> None:
    llm = write_model(tmp_path / "llm", MODEL_JSON | WRITTEN_BY_TRANSFORMERS)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    assert hart_model_config(HartConfig(), llm) == MODEL_CONFIG
    assert hart_model_config(HartConfig(), llm / "model.safetensors") == MODEL_CONFIG
    assert hart_tokenizer_config(HartTokenizerConfig(), tokenizer) == TOKENIZER_CONFIG
    assert hart_tokenizer_config(HartTokenizerConfig(), tokenizer / "model.safetensors") == TOKENIZER_CONFIG


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cosine": ({"cosine": True, "heads": 2}, {"attn_l2_norm": True, "num_heads": 2}),
    "level table": ({"level_table": True}, {"use_timestep_embed": False}),
    "no text norm": ({"text_norm": False}, {"use_context_norm": False}),
    "wider": ({"dim": 128, "mlp_ratio": 8.0}, {"embed_dim": 128, "mlp_ratio": 8}),
    "other residual": (
        {"residual_depth": 1, "residual_dim": 16, "residual_steps": 8},
        {"diff_depth": 1, "diff_width": 16, "num_sampling_steps": 8},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_with_config(variant: str, tmp_path: Path) -> None:
    fields, entries = VARIANTS[variant]
    config = replace(MODEL_CONFIG, **fields)
    assert hart_model_config(HartConfig(), write_part(tmp_path, published(config), MODEL_JSON | entries)) == config


@pytest.mark.parametrize("key", [*MODEL.fields, *MODEL.fixed])
def test_an_entry_that_is_not_there_is_the_presets(key: str, tmp_path: Path) -> None:
    config = {known: value for known, value in MODEL_JSON.items() if known != key}
    assert hart_model_config(MODEL_CONFIG, write_model(tmp_path, config)) == MODEL_CONFIG


def test_without_config_everything_is_the_presets(tmp_path: Path) -> None:
    assert hart_model_config(HartConfig(), write_model(tmp_path / "llm", None)) == HartConfig(codes=640, latent_channels=8)
    assert hart_tokenizer_config(HartTokenizerConfig(), write_tokenizer(tmp_path / "tokenizer", None)) == HartTokenizerConfig()


def test_tokenizer_settings_that_no_shape_tells(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, TOKENIZER_JSON | {"quant_resi": 0.25})
    assert hart_tokenizer_config(HartTokenizerConfig(), folder) == replace(TOKENIZER_CONFIG, blend_share=0.25)


# --- contradictions -----------------------------------------------------------------------------------------------------------------

UNFIT: dict[str, dict[str, Any]] = {
    "depth": {"depth": 24},
    "dim": {"embed_dim": 128},
    "text channels": {"context_dim": 41},
    "text norm": {"use_context_norm": False},
    "levels": {"use_timestep_embed": False},
    "cosine": {"attn_l2_norm": True},
    "residual dim": {"diff_width": 1024},
    "residual depth": {"diff_depth": 6},
    "feed-forward": {"mlp_ratio": 40},
}


@pytest.mark.parametrize("entries", UNFIT.values(), ids=UNFIT)
def test_settings_that_the_weights_do_not_have_are_refused_by_the_strict_loader(entries: dict[str, Any], tmp_path: Path) -> None:
    weights, tokenizer = write_model(tmp_path / "llm", MODEL_JSON | entries), write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(WeightsMismatch, match="does not match Hart"):
        load(weights, tokenizer)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_heads": 5}, "a multiple of 4 num_heads; got 64 and 5"),
    "narrow heads": ({"num_heads": 32}, "got 64 and 32"),
    "MLP type": ({"mlp_type": "gpt2"}, "only 'llama' is implemented"),
    "attention type": ({"attn_type": "gpt2"}, "only 'llama' is implemented"),
    "adaptive norms": ({"disable_aln": False}, "only True is implemented"),
    "shared norms": ({"shared_aln": True}, "only False is implemented"),
    "cross-attention": ({"use_cross_attn": True}, "only False is implemented"),
    "epsilon": ({"norm_eps": 1e-5}, "only 1e-06 is implemented"),
}


@pytest.mark.parametrize("setting", UNKNOWN)
def test_what_is_not_implemented_is_named(setting: str, tmp_path: Path) -> None:
    entries, expected = UNKNOWN[setting]
    message = refusal_of_model(write_model(tmp_path, MODEL_JSON | entries))
    assert expected in message and all(key in message for key in entries)
    assert len(message.splitlines()) == 2


def test_all_wrong_entries_are_named_together(tmp_path: Path) -> None:
    entries = {key: value for entries, _ in UNKNOWN.values() for key, value in entries.items()}
    message = refusal_of_model(write_model(tmp_path, MODEL_JSON | entries))
    assert all(key in message for key in entries)


@pytest.mark.parametrize(
    "key",
    [
        "blocks.1.ada_lin.1.weight",
        "blocks.0.scale_shift_table",
        "blocks.1.cross_attn.proj.weight",
        "blocks.0.ffn.fc1.weight",
        "blocks.0.attn.mat_qkv.weight",
    ],
)
def test_unreleased_variants_are_refused_by_the_strict_loader(key: str, tmp_path: Path) -> None:
    weights, tokenizer = write_model(tmp_path / "llm", changed={key: torch.zeros(2, 2)}), write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(WeightsMismatch, match=re.escape(f"unexpected (1): {key}")):
        load(weights, tokenizer)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"using_znorm": True}, "only False is implemented"),
        ({"double_decoder": True}, "only False is implemented"),
        ({"quantizer_type": "fsq"}, "only 'var_hybrid' is implemented"),
        ({"quant_resi": 2}, "blend_share must be"),
        ({"ch": 33}, "multiples of 32 or 24; got"),
    ],
)
def test_wrong_entries_of_a_tokenizer(entries: dict[str, Any], expected: str, tmp_path: Path) -> None:
    message = refusal_of_tokenizer(write_tokenizer(tmp_path, TOKENIZER_JSON | entries))
    assert expected in message and all(key in message for key in entries)
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize("entries", [{"vocab_size": 4096}, {"z_channels": 32}, {"ch": 160}, {"ch_mult": [1, 1]}, {"num_res_blocks": 3}])
def test_a_tokenizer_with_other_sizes_is_refused_by_the_strict_loader(entries: dict[str, Any], tmp_path: Path) -> None:
    weights, tokenizer = write_model(tmp_path / "llm"), write_tokenizer(tmp_path / "tokenizer", TOKENIZER_JSON | entries)
    with pytest.raises(WeightsMismatch, match="does not match HartTokenizer"):
        load(weights, tokenizer)


# --- hostile files ------------------------------------------------------------------------------------------------------------------

WRONG_VALUES: dict[str, list[Any]] = {
    "depth": ["many", -1, 0, 2.0, 10**30, True, None, [2], {"depth": 2}],
    "patch_nums": ["1_2_3", [], [1, "2"], [2, 3], [1, -2], [1, 2.5], [1, 10**9], [1, 3, 2], [1, 2, 2], [True, 2], 1],
    "num_sampling_steps": ["", "many", "ddim8", "1", 1, 0, 1001, "99999999", 8.0, "٣"],
    "mlp_ratio": ["4", 0, -4.0, 10**400, False],
    "attn_l2_norm": [0, "false", None],
    "use_timestep_embed": [1, "true"],
    "norm_eps": ["1e-6", 10**400, True],
    "disable_aln": [1, "true", None],
    "mlp_type": [None, ["llama"], "x" * 500_000],
}
WRONG_TOKENIZER_VALUES: dict[str, list[Any]] = {
    "ch_mult": [[], "1,2", [0], [1] * 1000, [1, 2.0], 2],
    "quant_resi": [0, -0.5, 1.5, "0.5"],
    "share_quant_resi": [0, -1, 10**9],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_VALUES.items() for value in values])
def test_wrong_values(key: str, value: Any, tmp_path: Path) -> None:
    message = refusal_of_model(write_model(tmp_path, MODEL_JSON | {key: value}))
    assert f"config.json says {key} " in message
    assert len(message) < 1000


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_TOKENIZER_VALUES.items() for value in values])
def test_wrong_values_of_a_tokenizer(key: str, value: Any, tmp_path: Path) -> None:
    assert f"config.json says {key} " in refusal_of_tokenizer(write_tokenizer(tmp_path, TOKENIZER_JSON | {key: value}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"depth: 2", "not valid JSON"),
        (b'{"depth": 2', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"depth": ' + b"9" * 100_000 + b"}", "not valid JSON"),
        (b'{"depth": ' + b"[" * 900 + b"]" * 900 + b"}", "nested deeper"),
        (b'{"depth": NaN}', "NaN is not a number"),
        (b'{"depth": 2, "depth": 3}', "repeated keys"),
        (b"[1, 2]", "got a list"),
        (b"null", "got a NoneType"),
        (b'{"depth": 2}' + b" " * MAX_BYTES, "at most 1048576 bytes"),
    ],
)
def test_files_that_are_no_configuration(content: bytes, expected: str, tmp_path: Path) -> None:
    (write_model(tmp_path) / "config.json").write_bytes(content)
    assert expected in refusal_of_model(tmp_path)


def make_folder(file: Path) -> None:
    file.mkdir()


def make_dangling_link(file: Path) -> None:
    file.symlink_to("nowhere")


@pytest.mark.parametrize("make", [make_folder, make_dangling_link, os.mkfifo])
def test_what_cannot_be_read_as_a_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(write_model(tmp_path, None) / "config.json")
    assert re.search("config.json: it (must be a regular file|cannot be read)", refusal_of_model(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_configuration_without_permission(tmp_path: Path) -> None:
    (write_model(tmp_path) / "config.json").chmod(0)
    assert "cannot be read" in refusal_of_model(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(0, 1100).map(str),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


def configs_with(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), json_values, min_size=1, max_size=4)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    for_model=configs_with([*MODEL.fields, *MODEL.fixed]),
    for_tokenizer=configs_with([*TOKENIZER.fields, *TOKENIZER.fixed]),
)
def test_any_configuration_is_read_or_refused(for_model: dict[str, Any], for_tokenizer: dict[str, Any], tmp_path: Path) -> None:
    llm, tokenizer = tmp_path / "llm", tmp_path / "tokenizer"
    if not llm.exists():
        write_model(llm)
        write_tokenizer(tokenizer)
    (llm / "config.json").write_text(json.dumps(MODEL_JSON | for_model))
    (tokenizer / "config.json").write_text(json.dumps(TOKENIZER_JSON | for_tokenizer))
    with torch.device("meta"):
        with suppress(CheckpointError):
            build_model(hart_model_config(HartConfig(), llm))
        with suppress(CheckpointError):
            build_tokenizer(hart_tokenizer_config(HartTokenizerConfig(), tokenizer))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from([*published(MODEL_CONFIG), "lvl_1L", "lvl_embed.weight", "blocks.7.new", "diffloss.net.res_blocks.9.new"]),
    shape=st.none() | st.lists(st.sampled_from([0, 1, 2, 4, 5, 41, 64, 70_000]), max_size=3),
    has_config=st.booleans(),
)
def test_any_shapes_are_read_or_refused(key: str, shape: list[int] | None, has_config: bool, tmp_path: Path) -> None:
    tensor = None if shape is None else torch.zeros(()).expand(shape)  # takes no space in the file
    tensors = {**published(MODEL_CONFIG), key: tensor}
    kept = {name: value for name, value in tensors.items() if value is not None}
    folder = write_part(tmp_path, kept, MODEL_JSON if has_config else {}, "model.bin")
    with torch.device("meta"), suppress(CheckpointError):
        build_model(hart_model_config(HartConfig(), folder))


# --- which files are read -----------------------------------------------------------------------------------------------------------


def text_features(seed: int = 0) -> TextFeatures:
    rows = torch.randn(TEXT_TOKENS, TEXT_CHANNELS, generator=torch.Generator().manual_seed(seed))
    return TextFeatures((rows,), mask=torch.arange(TEXT_TOKENS)[None] < 5)


def load(weights: Path, tokenizer: Path) -> Pipeline:
    return nextscale.load(NAME, weights=weights, tokenizer=tokenizer, device="cpu")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Both parts as they are published, with averaged weights beside the last ones."""
    write_model(tmp_path / "llm")
    write_part(tmp_path / "llm", {**published(MODEL_CONFIG, seed=1), **BUFFERS}, name="ema_model.bin")
    write_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def test_a_loaded_pipeline_draws(release: Path) -> None:
    pipeline = load(release / "llm", release / "tokenizer")
    assert pipeline.model.config == MODEL_CONFIG
    assert pipeline.tokenizer.config == TOKENIZER_CONFIG
    assert pipeline.settings == presets.hart_settings(SIDES)
    output = pipeline(text_features(), seed=0)
    assert output.pixels.shape == (1, 3, 8, 8)
    assert output.pixels.isfinite().all()
    with pytest.raises(PromptError, match="must have 12 tokens"):
        pipeline(TextFeatures((torch.zeros(300, TEXT_CHANNELS),)))


def test_a_folder_means_the_averaged_weights(release: Path) -> None:
    llm, tokenizer = release / "llm", release / "tokenizer"
    averaged = load(llm, tokenizer)
    assert torch.equal(averaged.model.head.weight, published(MODEL_CONFIG, seed=1)["head.weight"])
    assert torch.equal(load(llm / "ema_model.bin", tokenizer).model.head.weight, averaged.model.head.weight)
    last = load(llm / "model.safetensors", tokenizer)
    assert torch.equal(last.model.head.weight, published(MODEL_CONFIG)["head.weight"])
    assert last.model.config == averaged.model.config == MODEL_CONFIG
    assert not torch.equal(last(text_features(), seed=0).pixels, averaged(text_features(), seed=0).pixels)


def test_torch_files_and_shards(release: Path) -> None:
    llm, tokenizer = release / "llm", release / "tokenizer"
    expected = load(llm / "model.safetensors", tokenizer)(text_features(), seed=0).pixels
    tensors = {**published(MODEL_CONFIG), **BUFFERS}
    one = write_part(release / "torch", tensors, MODEL_JSON, "pytorch_model.bin")
    assert torch.equal(load(one, tokenizer)(text_features(), seed=0).pixels, expected)
    sharded = release / "sharded"
    weight_map: dict[str, str] = {}
    for number in range(2):
        shard = {key: tensors[key] for key in list(tensors)[number::2]}
        weight_map |= dict.fromkeys(shard, f"pytorch_model-{number}.bin")
        write_part(sharded, shard, MODEL_JSON, f"pytorch_model-{number}.bin")
    index = sharded / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for path in (sharded, index):
        assert torch.equal(load(path, tokenizer)(text_features(), seed=0).pixels, expected)


def test_published_folders_are_found_under_their_names(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXTSCALE_HOME", str(release))
    source = Source(HART_REPOSITORY, "llm")
    spec = replace(presets.MODELS[NAME], weights=source, tokenizer_weights=Source(HART_REPOSITORY, "tokenizer"))
    monkeypatch.setitem(presets.MODELS, NAME, spec)
    assert nextscale.load(NAME, device="cpu").model.config == MODEL_CONFIG


def test_the_text_encoder_is_asked_for_as_many_tokens_as_the_checkpoint_reads(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Encoder:
        def __init__(self, source: str, *, device: torch.device, tokens: int) -> None:
            asked.append((source, tokens))

        def __call__(self, prompts: list[str]) -> TextFeatures:
            return text_features(seed=len(prompts[0]))

    spec = replace(presets.MODELS[NAME], text_encoder=TextSource("nobody/encoder", Encoder))  # type: ignore[arg-type]
    monkeypatch.setitem(presets.MODELS, NAME, spec)
    assert load(release / "llm", release / "tokenizer")("a red dog", seed=0).pixels.shape == (1, 3, 8, 8)
    assert asked == [("nobody/encoder", TEXT_TOKENS)]


def test_parts_of_different_releases(release: Path) -> None:
    other = write_part(release / "other", published(replace(TOKENIZER_CONFIG, codes=630)), TOKENIZER_JSON | {"vocab_size": 630})
    expected = "The transformer reads 640 codes of 8 channels, the tokenizer has 630 codes of 8 channels"
    with pytest.raises(CheckpointError, match=expected):
        load(release / "llm", other)


# --- files of other models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_models(monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """HART and a tiny VAR are all that is known."""
    spec = tiny.var_spec()
    for name in presets.MODELS.keys() - {NAME}:
        monkeypatch.delitem(presets.MODELS, name)
    monkeypatch.setitem(presets.MODELS, spec.name, spec)
    return spec


def test_a_file_of_another_model_is_recognized(release: Path, few_models: ModelSpec) -> None:
    var = write_part(release / "var", published(few_models.model), {"depth": "many"})
    var_tokenizer = write_part(release / "var-tokenizer", published(few_models.tokenizer), TOKENIZER_JSON)
    with pytest.raises(WeightsMismatch, match="does not match Hart:[^$]*It looks like the model tiny-var."):
        load(var, release / "tokenizer")
    with pytest.raises(WeightsMismatch, match="does not match HartTokenizer:[^$]*It looks like the tokenizer of tiny-var."):
        load(release / "llm", var_tokenizer)
    with pytest.raises(WeightsMismatch, match="does not match Hart:"):
        load(release / "tokenizer", release / "tokenizer")


def test_an_incomplete_checkpoint_is_refused_by_the_strict_loader(release: Path, few_models: ModelSpec) -> None:
    missing = write_model(release / "missing", changed={"decoder_norm.weight": None, "blocks.1.attn.proj.bias": torch.zeros(3)})
    with pytest.raises(WeightsMismatch, match=r"missing \(1\): decoder_norm.weight\n  mis-shaped \(1\): blocks.1.attn.proj.bias"):
        load(missing, release / "tokenizer")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not an existing file or folder"):
        load(tmp_path / "absent", tmp_path)


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    spec = presets.MODELS["var-d16"]
    assert checkpoint_spec(spec, tmp_path / "absent", tmp_path / "absent") is spec


# --- conversion ---------------------------------------------------------------------------------------------------------------------


def test_converted_files_draw_the_same_image(release: Path) -> None:
    model, tokenizer = release / "hart.safetensors", release / "hart-tokenizer.safetensors"
    assert run_cli("convert", "-m", NAME, release / "llm", model).exit_code == 0
    assert run_cli("convert", "-m", NAME, release / "tokenizer", tokenizer, "--part", "tokenizer").exit_code == 0
    assert json.loads(own_config_file(model).read_text()) == MODEL_JSON | {"num_sampling_steps": 6}
    converted, published = load(model, tokenizer), load(release / "llm", release / "tokenizer")
    assert converted.model.config == MODEL_CONFIG
    assert torch.equal(converted(text_features(), seed=0).pixels, published(text_features(), seed=0).pixels)
    alone = release / "alone"
    alone.mkdir()
    for file in (model, own_config_file(model)):
        file.rename(alone / file.name)
    assert hart_model_config(HartConfig(), alone) == MODEL_CONFIG


@pytest.mark.parametrize("config", [MODEL_CONFIG, *(replace(MODEL_CONFIG, **fields) for fields, _ in VARIANTS.values())])
def test_written_configurations_are_read_back(config: HartConfig, tmp_path: Path) -> None:
    write_part(tmp_path, published(config), json.loads(dump_config(config)))
    assert hart_model_config(HartConfig(), tmp_path) == config


def test_conversion_overwrites_nothing_and_refuses_contradictions(release: Path) -> None:
    target = release / "hart.safetensors"
    own_config_file(target).write_text("mine")
    refused = run_cli("convert", "-m", NAME, release / "llm", target)
    assert "hart.config.json" in refused.stderr
    assert "--force" in refused.stderr
    assert not target.exists()
    write_model(release / "llm", MODEL_JSON | {"depth": 24})
    refused = run_cli("convert", "-m", NAME, release / "llm", target, "--force")
    assert "does not match Hart" in refused.stderr
    assert own_config_file(target).read_text() == "mine"


# --- as released --------------------------------------------------------------------------------------------------------------------


def test_star_as_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny.star_spec()
    monkeypatch.setitem(presets.MODELS, spec.name, spec)
    model = write_part(tmp_path / "model", published(spec.model)) / "model.safetensors"
    tokenizer = write_part(tmp_path / "tokenizer", published(spec.tokenizer)) / "model.safetensors"
    for as_released in (False, True):
        pipeline = nextscale.load(spec.name, weights=model, tokenizer=tokenizer, device="cpu", as_released=as_released)
        assert pipeline.model.config == replace(spec.model, as_released=as_released)  # type: ignore[arg-type]


def test_the_refiner_of_a_pair_is_loaded_with_every_option_of_its_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny.star_spec()
    monkeypatch.setitem(presets.MODELS, spec.name, spec)
    options: dict[str, Any] = {
        "tokenizer": write_part(tmp_path / "tokenizer", published(spec.tokenizer)) / "model.safetensors",
        "text_encoder": tmp_path,
        "offload_text": True,
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "quantize": "int8",
        "kv_dtype": "int8",
        "as_released": True,
        "engine": "eager",
        "graph_memory": 12345,
        "download": False,
    }
    assert set(options) == set(inspect.signature(nextscale.load).parameters) - {"name", "weights", "options"} | {"engine", "graph_memory"}
    weights = write_part(tmp_path / "model", published(spec.model)) / "model.safetensors"
    pipeline, opened = nextscale.load(spec.name, weights=weights, **options), list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr(sys.modules["nextscale.loading.load"], "load", lambda name, **given: opened.append((name, given)))
    assert pipeline.partners.open is not None
    pipeline.partners.open(spec.name)
    assert opened == [(spec.name, options)]


@pytest.mark.parametrize("name", [NAME, "var-d16", "infinity-2b"])
def test_other_models_draw_as_released_anyway(name: str) -> None:
    with pytest.raises(SettingError, match=f"as_released must be left out for {name}"):
        nextscale.load(name, as_released=True)
