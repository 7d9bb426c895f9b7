"""bfloat16 and float16: what stays in float32, and how far logits and pixels may move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nextscale.cache import CacheSpec
from nextscale.canvas import to_map
from nextscale.generate import StageOutput
from nextscale.pipeline import Output
from tests.helpers import tiny

HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# |half - float32| / |float32|, both as Euclidean norms over a whole stage. With 3 blocks, found at most 0.016 and 0.0020 for logits,
# 0.025 and 0.0031 for pixels: a handful of roundings (2 ** -9 = 0.002 and 2 ** -12 = 0.00024 each).
LOGITS_BOUND = {torch.bfloat16: 0.02, torch.float16: 0.0025}
PIXELS_BOUND = {torch.bfloat16: 0.04, torch.float16: 0.005}
# HART's first diffusion step multiplies rounding by 2e4 before it clamps, so that elements whose sign is in doubt flip. Over 20 seeds the
# residual moved by at most 0.203 and 0.089 of its norm.
RESIDUAL_BOUND = {torch.bfloat16: 0.4, torch.float16: 0.2}
KEPT_IN_FLOAT32 = {
    "var": {"codebook", "blends"},
    "var_shared": {"codebook", "blends"},
    "flexvar": {"codebook"},
    "infinity": {"text_norm", "shared_modulation", "head_ada", "head"},
    "infinity_patchify": {"text_norm", "shared_modulation", "head_ada", "head"},
    "hart": {"codebook", "blends", "text_norm", "head_norm", "head_ada", "head"},
    "star": {"codebook", "blends"},
    "star_refined": {"codebook", "blends"},
}

families = pytest.mark.parametrize("family", tiny.FAMILIES)
halves = pytest.mark.parametrize("dtype", HALF, ids=HALF.values())


def forced_run(family: str, dtype: torch.dtype, codes: tuple[Tensor, ...]) -> tuple[Output, list[StageOutput]]:
    """Generates with given codes, so that all runs see the same canvas; also returns the output of every stage."""
    stages: list[StageOutput] = []
    output = tiny.shared_pipeline(family, dtype)(
        tiny.prompts(family, 3),
        seed=5,
        revise=lambda stage, drawn: codes[stage.index],
        on_stage=lambda preview: stages.append(preview.done),
    )
    return output, stages


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
    codes = tiny.shared_pipeline(family)(tiny.prompts(family, 3), seed=5, smooth=False).codes
    exact, exact_stages = forced_run(family, torch.float32, codes)
    half, half_stages = forced_run(family, dtype, codes)
    for ours, theirs in zip(half_stages, exact_stages, strict=True):
        assert ours.logits.dtype == torch.float32
        assert 1e-4 < relative(ours.logits, theirs.logits) < LOGITS_BOUND[dtype]  # the lower bound: it did compute in half precision
    decoded = tiny.shared_pipeline(family, dtype).tokenizer.decode(exact.latent)
    assert 1e-4 < relative(decoded, exact.pixels) < PIXELS_BOUND[dtype]
    assert half.latent.dtype == half.pixels.dtype == torch.float32
    if family == "hart":
        ours, theirs = half_stages[-1], exact_stages[-1]
        assert 1e-4 < relative(ours.residual, theirs.residual) < RESIDUAL_BOUND[dtype]
        moved = to_map(ours.residual - theirs.residual, ours.stage)
        assert torch.allclose(half.latent - exact.latent, moved, rtol=0, atol=1e-5)
    else:
        assert torch.equal(half.latent, exact.latent)  # the sum of codes is float32 whatever the model is
        assert torch.equal(half.pixels, decoded)


@families
@halves
def test_the_parameters_that_need_float32_keep_it(family: str, dtype: torch.dtype) -> None:
    pipeline = tiny.shared_pipeline(family, dtype)
    dtypes = {name: parameter.dtype for module in (pipeline.model, pipeline.tokenizer) for name, parameter in module.named_parameters()}
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

    def watched(self: CacheSpec, tokens: int) -> tuple[Tensor, Tensor]:
        pair = allocate(self, tokens)
        allocated.extend(pair)
        return pair

    monkeypatch.setattr(CacheSpec, "allocate", watched)
    output = tiny.shared_pipeline(family, dtype)(tiny.prompts(family, 2), seed=5)
    assert {tensor.dtype for tensor in allocated} == {dtype}
    text = 2 * tiny.DEPTH * 4 * 16 * tiny.WIDTH * 2 if family in tiny.CROSS_ATTENTION_FAMILIES else 0  # 4 rows of 9 tokens, padded to 16
    assert output.report.planned_memory == sum(tensor.nbytes for tensor in allocated) + text


@families
@halves
def test_a_seed_repeats_its_images_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    first, second = (tiny.shared_pipeline(family, dtype)(tiny.prompts(family, 2), seed=5) for _ in range(2))
    assert torch.equal(first.pixels, second.pixels)
