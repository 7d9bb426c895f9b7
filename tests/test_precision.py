"""bfloat16 and float16: what stays in float32, and how far logits and pixels may move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nextscale.cache import CacheSpec
from nextscale.pipeline import Output

from . import tiny

HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# |half - float32| / |float32|, both as Euclidean norms over a whole stage. With 3 blocks, found at most 0.013 and 0.0015 for logits,
# 0.025 and 0.0031 for pixels: a handful of roundings (2 ** -9 = 0.002 and 2 ** -12 = 0.00024 each).
LOGITS_BOUND = {torch.bfloat16: 0.02, torch.float16: 0.0025}
PIXELS_BOUND = {torch.bfloat16: 0.04, torch.float16: 0.005}
KEPT_IN_FLOAT32 = {
    "var": {"codebook", "blends"},
    "var_shared": {"codebook", "blends"},
    "flexvar": {"codebook"},
    "infinity": {"text_norm", "shared_modulation", "head_ada", "head"},
    "infinity_patchify": {"text_norm", "shared_modulation", "head_ada", "head"},
}

families = pytest.mark.parametrize("family", tiny.FAMILIES)
halves = pytest.mark.parametrize("dtype", HALF, ids=HALF.values())


def forced_run(family: str, dtype: torch.dtype, codes: tuple[Tensor, ...]) -> tuple[Output, list[Tensor]]:
    """Every stage draws the given codes, so that all runs see the same canvas; also returns each stage's logits."""
    logits: list[Tensor] = []
    output = tiny.shared_pipeline(family, dtype)(
        tiny.prompts(family, 3),
        seed=5,
        revise=lambda stage, drawn: codes[stage.index],
        on_stage=lambda preview: logits.append(preview.done.logits),
    )
    return output, logits


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@families
@halves
def test_free_runs_stay_finite(family: str, dtype: torch.dtype) -> None:
    output = tiny.shared_pipeline(family, dtype)(tiny.prompts(family, 3), seed=5)
    assert output.pixels.isfinite().all()
    assert output.report.dtype == HALF[dtype]
    assert [codes.shape for codes in output.codes] == [
        codes.shape for codes in tiny.shared_pipeline(family)(tiny.prompts(family, 3), seed=5).codes
    ]


@families
@halves
def test_logits_and_pixels_stay_near_those_of_float32(family: str, dtype: torch.dtype) -> None:
    codes = tiny.shared_pipeline(family)(tiny.prompts(family, 3), seed=5).codes
    exact, exact_logits = forced_run(family, torch.float32, codes)
    half, half_logits = forced_run(family, dtype, codes)
    for ours, theirs in zip(half_logits, exact_logits, strict=True):
        assert ours.dtype == torch.float32
        assert 1e-4 < relative(ours, theirs) < LOGITS_BOUND[dtype]  # the lower bound: it did compute in half precision
    assert torch.equal(half.latent, exact.latent)  # the sum of codes is float32 whatever the model is
    assert half.latent.dtype == half.pixels.dtype == torch.float32
    assert 1e-4 < relative(half.pixels, exact.pixels) < PIXELS_BOUND[dtype]


@families
@halves
def test_the_parameters_that_need_float32_keep_it(family: str, dtype: torch.dtype) -> None:
    pipeline = tiny.shared_pipeline(family, dtype)
    dtypes = {
        name: parameter.dtype for module in (pipeline.model, pipeline.tokenizer) for name, parameter in module.named_parameters()
    }
    kept = {name for name, kind in dtypes.items() if kind == torch.float32}
    assert {name.split(".")[0] for name in kept} == KEPT_IN_FLOAT32[family]
    for name, kind in dtypes.items():
        owned_by_block = name.startswith("blocks.")
        assert kind == (torch.float32 if name.split(".")[0] in KEPT_IN_FLOAT32[family] and not owned_by_block else dtype), name
    assert pipeline.model.dtype == dtype


@families
@halves
def test_keys_and_values_take_the_models_type(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = []
    allocate = CacheSpec.allocate

    def recording(self: CacheSpec, tokens: int) -> tuple[Tensor, Tensor]:
        pair = allocate(self, tokens)
        allocated.extend(pair)
        return pair

    monkeypatch.setattr(CacheSpec, "allocate", recording)
    output = tiny.shared_pipeline(family, dtype)(tiny.prompts(family, 2), seed=5)
    assert {tensor.dtype for tensor in allocated} == {dtype}
    text = 0 if family in tiny.CLASS_FAMILIES else 2 * tiny.DEPTH * 4 * 16 * tiny.WIDTH * 2  # 4 rows of 9 tokens, padded to 16
    assert output.report.planned_memory == sum(tensor.nbytes for tensor in allocated) + text


@families
@halves
def test_a_seed_repeats_its_images_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    first, second = (tiny.shared_pipeline(family, dtype)(tiny.prompts(family, 2), seed=5) for _ in range(2))
    assert torch.equal(first.pixels, second.pixels)
