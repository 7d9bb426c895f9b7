"""Names and shapes of the published files, against the modules as we build them (on the meta device, so of any size)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

from nextscale.checkpoints import check, published_tensors
from nextscale.checkpoints.layout import PublishedTensor
from nextscale.loading.presets import INFINITY_TOKENIZERS, MODELS, STRIDE_8, Embedded, TokenizerConfig, build_model, build_tokenizer
from nextscale.models import NextScaleModel
from nextscale.tokenizers import FlexVarTokenizerConfig, HartTokenizerConfig, InfinityTokenizerConfig, VarTokenizerConfig
from nextscale.tokenizers.base import Tokenizer

Shape = tuple[int, ...]

TRANSFORMERS = {  # name of the list -> presets with that layout
    "var_d16": ["var-d16"],
    "var_d20": ["var-d20"],
    "var_d24": ["var-d24"],
    "var_d30": ["var-d30"],
    "var_d36": ["var-d36"],
    "FlexVARd16-epo179": ["flexvar-d16"],
    "FlexVARd20-epo249": ["flexvar-d20"],
    "FlexVARd24-epo349": ["flexvar-d24"],
    "infinity_2b": ["infinity-2b"],
    "infinity_8b": ["infinity-8b", "infinity-8b-512"],
    "infinity_layer12": ["infinity-125m"],
    "infinity_layer16": ["infinity-layer16"],
    "infinity_layer24": ["infinity-1b"],
    "infinity_layer32": ["infinity-layer32"],
    "infinity_layer40": ["infinity-layer40"],
    "infinity_layer48": ["infinity-layer48"],
    "infinity_20b": ["infinity-20b"],
    "hart_llm": ["hart-0.7b"],
    "star_256_d16": ["star-256-d16"],
    "star_256_d30": ["star-256"],
    "star_512_d30": ["star-512"],
    "star_1024_d30": ["star-1024"],
    "star_1024_sampler_d30": ["star-1024-sampler"],
}
SAME_LAYOUT = [{"star_256_d30", "star_512_d30"}]  # ten stages of other sides: a file does not tell which
TOKENIZERS: dict[str, TokenizerConfig] = {
    "vae_ch160v4096z32": VarTokenizerConfig(),
    "FlexVAE": FlexVarTokenizerConfig(),
    "vae_d16": InfinityTokenizerConfig(bits=16),
    "vae_d24": InfinityTokenizerConfig(bits=24),
    "vae_d32": InfinityTokenizerConfig(bits=32),
    "vae_d64": InfinityTokenizerConfig(bits=64),
    "vae_d14_f8_patchify": STRIDE_8,
    "hart_tokenizer": HartTokenizerConfig(),
}
# Tensors in the files that we do not build: masks and tables that can be computed, and statistics of training.
LEFT_OUT = {
    "var": {"lvl_1L", "attn_bias_for_masking", "quantize.ema_vocab_hit_SV"},
    "flexvar": {"attn_bias_for_masking", "quantize.codebook_used"},
    "infinity": {"quantizer.lfq.mask", "quantize.lfq.mask"},
    "hart": {"lvl_1L", "attn_bias_for_masking", "vae.quantize.ema_vocab_hit_SV"},
    "star": {"class_emb.weight"},
}
DISCRIMINATOR = "disc."  # of HART's tokenizer, used in training only


def left_out(key: str, family: str) -> bool:
    return key in LEFT_OUT[family] or key.startswith(DISCRIMINATOR)


@cache
def published() -> dict[str, tuple[str, dict[str, Shape]]]:
    """Returns list name -> (family, key -> shape)."""
    families = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "published_keys.json.gz").read_bytes()))
    return {
        name: (family, {key: tuple(shape) for key, shape in keys.items()})
        for family, lists in families.items()
        for name, keys in lists.items()
    }


@cache
def on_meta(name: str) -> tuple[NextScaleModel | Tokenizer, ...]:
    """Creates the modules that a list describes; the first represents all modules of the same layout."""
    with torch.device("meta"):
        if name in TOKENIZERS:
            return (build_tokenizer(TOKENIZERS[name]),)
        return tuple(build_model(MODELS[preset].model) for preset in TRANSFORMERS[name])


@cache
def first_slots(name: str) -> dict[str, PublishedTensor]:
    module = on_meta(name)[0]
    return published_tensors(module, module.layout)


LISTS = [*TRANSFORMERS, *TOKENIZERS]


def test_every_list_has_a_layout_and_every_layout_a_list() -> None:
    assert set(published()) == set(LISTS)
    released = [spec for spec in MODELS.values() if not isinstance(spec.weights, Embedded)]
    assert {preset for presets in TRANSFORMERS.values() for preset in presets} == {spec.name for spec in released}
    assert set(INFINITY_TOKENIZERS.values()) <= set(TOKENIZERS.values())
    assert {spec.tokenizer for spec in released} <= set(TOKENIZERS.values())


@pytest.mark.parametrize("name", LISTS)
def test_published_names_and_shapes_equal_ours(name: str) -> None:
    family, keys = published()[name]
    for module in on_meta(name):
        ours = {key: slot.shape for key, slot in published_tensors(module, module.layout).items()}
        assert {key: shape for key, shape in keys.items() if not left_out(key, family)} == ours
        assert not check(published_tensors(module, module.layout), keys, module.layout)


@pytest.mark.parametrize("name", LISTS)
def test_every_element_of_ours_has_exactly_one_place_in_the_file(name: str) -> None:
    for module in on_meta(name):
        rows: dict[str, list[int]] = {parameter: [] for parameter, _ in module.named_parameters()}
        for slot in published_tensors(module, module.layout).values():
            rows[slot.parameter] += range(slot.rows.start, slot.rows.stop)
        for parameter, tensor in module.named_parameters():
            assert sorted(rows[parameter]) == list(range(tensor.shape[0])), parameter


@pytest.mark.parametrize("name", LISTS)
def test_what_a_file_may_lack_and_what_it_may_not(name: str) -> None:
    """Only the keys named above and biases that are zero by construction may be missing."""
    family, keys = published()[name]
    slots, layout = first_slots(name), on_meta(name)[0].layout
    optional = {key for key in keys if left_out(key, family) or key.endswith("zero_k_bias")}
    needed = {key: shape for key, shape in keys.items() if key not in optional}
    assert not check(slots, needed, layout)
    for key in list(needed)[:: len(needed) // 10]:
        assert check(slots, {other: shape for other, shape in keys.items() if other != key}, layout).missing == (key,)
        wrong = (*keys[key], 2)
        assert check(slots, {**keys, key: wrong}, layout).misshaped == {key: (wrong, keys[key])}
        assert check(slots, {**keys, f"{key}_too": (1,)}, layout).unexpected == (f"{key}_too",)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_fits_no_other_layout(name: str) -> None:
    _, keys = published()[name]
    same = next((names for names in SAME_LAYOUT if name in names), {name})
    assert {other for other in LISTS if not check(first_slots(other), keys, on_meta(other)[0].layout)} == same


# Parameters as the reference implementations count them: without buffers. In the files those buffers are `zero_k_bias`, which we load
# as part of a bias, and the tensors of LEFT_OUT.
PARAMETERS = {
    "var_d16": 310_283_520,
    "var_d20": 600_917_136,
    "var_d24": 1_033_399_360,
    "var_d30": 2_010_020_356,
    "var_d36": 2_353_893_904,
    "vae_ch160v4096z32": 108_948_355,
    "FlexVARd16-epo179": 315_561_936,
    "FlexVARd20-epo249": 607_513_952,
    "FlexVARd24-epo349": 1_041_314_576,
    "FlexVAE": 72_049_827,
    "infinity_2b": 2_204_564_032,
    "infinity_8b": 8_375_791_824,
    "infinity_layer12": 125_185_696,
    "star_256_d16": 274_934_272 - 1001 * 1024,  # the publication counts a class embedding that is never used
    "star_256_d30": 1_678_731_016 - 1001 * 1920,
    "star_1024_d30": 1_678_738_696 - 1001 * 1920,
    "star_1024_sampler_d30": 1_828_798_562 - 1001 * 1920,
}


def is_buffer(key: str) -> bool:
    return key.endswith("zero_k_bias")


def elements(shapes: Iterable[Shape]) -> int:
    return sum(prod(shape) for shape in shapes)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    _, keys = published()[name]
    assert elements(slot.shape for key, slot in first_slots(name).items() if not is_buffer(key)) == PARAMETERS[name]
    zero_biases = elements(shape for key, shape in keys.items() if key.endswith("zero_k_bias"))
    assert sum(parameter.numel() for parameter in on_meta(name)[0].parameters()) == PARAMETERS[name] + zero_biases


def test_the_largest_model_has_twenty_billion_parameters() -> None:
    parameters = elements(slot.shape for key, slot in first_slots("infinity_20b").items() if not is_buffer(key))
    assert round(parameters / 1e7) == 1995  # stated as 19.95e9


@pytest.mark.parametrize(
    ("preset", "hidden"),
    [
        ("infinity-2b", 8192),
        ("infinity-8b", 14336),
        ("infinity-125m", 3072),
        ("infinity-layer16", 4608),
        ("infinity-1b", 6144),
        ("infinity-layer32", 8192),  # 32.5 * 256, rounded half to even
        ("infinity-layer40", 10752),
        ("infinity-layer48", 13312),  # 52.5 * 256
        ("infinity-20b", 18432),
    ],
)
def test_infinitys_hidden_sizes(preset: str, hidden: int) -> None:
    assert MODELS[preset].model.block.hidden_dim == hidden
