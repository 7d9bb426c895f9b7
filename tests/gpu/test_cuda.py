"""Results on a GPU equal those on the CPU."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from nextscale import FastVAR, Method, Pipeline, Schedule, SparseVAR, StageVAR
from nextscale.errors import OutOfMemory
from nextscale.loading.load import random_pipeline
from nextscale.metrics.pixels import psnr, ssim
from nextscale_research.methods import ToMe
from nextscale_research.observe import Sample, observe, to_json, verdicts
from nextscale_research.quality.agreement import Agreement
from nextscale_research.quality.judge import SetJudge, judge
from nextscale_research.quality.lists import chosen_methods
from tests.eval import test_compare as comparing
from tests.helpers.tiny import FAMILIES, SPECS, one_prompt, prompts, schedule_of
from tests.research import test_quality as quality

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(pipe: Pipeline, dtype: torch.dtype = torch.float32) -> Pipeline:
    """Returns a copy on the GPU with the same weights; float32 parameters stay float32."""
    moved = Pipeline(copy.deepcopy(pipe.model), copy.deepcopy(pipe.tokenizer), pipe.reader, pipe.settings, pipe.name)
    for module in (moved.model, moved.tokenizer):
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to("cuda", torch.float32 if name.startswith(module.float32) else dtype)
    return moved


def logits_of_given_codes(pipe: Pipeline, prompt: Any, codes: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Logits of all stages when the same codes are drawn on every device."""
    seen = []
    device = pipe.model.device
    pipe(
        prompt,
        seed=0,
        revise=lambda stage, _: codes[stage.index].to(device),
        on_stage=lambda preview: seen.append(preview.done.logits.cpu()),
    )
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2), (torch.float16, 0.05)])
def test_gpu_logits_equal_cpu_logits(family: str, dtype: torch.dtype, bound: float) -> None:
    cpu = random_pipeline(SPECS[family])
    prompt = prompts(family, 2)
    codes = cpu(prompt, seed=0).codes
    expected = logits_of_given_codes(cpu, prompt, codes)
    actual = logits_of_given_codes(on_gpu(cpu, dtype), prompt, codes)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_reproduce_and_a_batch_equals_its_images_alone(family: str) -> None:
    pipe = random_pipeline(SPECS[family], device="cuda")
    prompt = prompts(family, 2)
    both, again = pipe(prompt, seed=[3, 7]), pipe(prompt, seed=[3, 7])
    assert torch.equal(both.pixels, again.pixels)
    for image, seed in enumerate((3, 7)):
        alone = pipe(one_prompt(family, image), seed=seed)
        for batched, single in zip(both.codes, alone.codes, strict=True):
            torch.testing.assert_close(batched[image], single[0], rtol=0, atol=1e-2)  # mixtures of codes; numbers must be equal


def test_report_counts_gpu_memory() -> None:
    pipe = random_pipeline(SPECS["var"], device="cuda")
    report = pipe(1, seed=0).report
    weights = sum(p.numel() * p.element_size() for module in (pipe.model, pipe.tokenizer) for p in module.parameters())
    assert report.peak_memory > weights + report.planned_memory
    assert all(stage.seconds > 0 for stage in report.stages)


def test_running_out_of_memory_on_the_way_is_explained() -> None:
    pipe = random_pipeline(SPECS["flexvar"], device="cuda")
    filler = torch.empty(torch.cuda.mem_get_info()[0] - (300 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfMemory, match="out of memory.*Generate fewer images"):
        pipe(1, seed=0, size=Schedule([1, 320]))
    del filler
    torch.cuda.empty_cache()
    assert pipe(1, seed=0).pixels.isfinite().all()


METHODS = {
    "sparsevar": SparseVAR(tau=0.95, first_stage=2),
    "fastvar": FastVAR(),
    "stagevar": StageVAR(ranks=0.177),
    "tome": ToMe(),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_methods_reproduce_and_a_batch_equals_its_images_alone(family: str, method: Method) -> None:
    pipe = random_pipeline(SPECS[family], device="cuda")
    settings = {"method": method, "smooth": False}
    both, again = (pipe(prompts(family, 2), seed=[3, 7], **settings) for _ in range(2))
    assert torch.equal(both.pixels, again.pixels)
    for image, seed in enumerate((3, 7)):
        alone = pipe(one_prompt(family, image), seed=seed, **settings)
        apart = (both.latent[image] - alone.latent[0]).abs() > 2e-2
        assert apart.float().mean() < 0.05  # selections may differ where scores nearly tie


def test_distances_of_smooth_images_are_those_of_the_cpu() -> None:
    """With small variances, convolutions in lower precision than float32 would change the result."""
    ramp = torch.linspace(-1, 1, 64).expand(2, 3, 64, 64).contiguous()
    near = (ramp + 0.02 * torch.randn(ramp.shape, generator=torch.Generator().manual_seed(0))).clamp(-1, 1)
    for measure in (psnr, ssim):
        assert torch.allclose(measure(ramp.cuda(), near.cuda()).cpu(), measure(ramp, near), rtol=1e-4)


def test_methods_are_compared_on_a_gpu() -> None:
    on_cpu = quality.set_judge()
    assert on_cpu.agreement is not None
    probes = {name: probe.to("cuda") for name, probe in on_cpu.agreement.probes.items()}
    sets = SetJudge(quality.MeanColors().cuda(), Agreement(probes, on_cpu.agreement.real))
    pipe = random_pipeline(comparing.spec(), device="cuda", dtype=torch.bfloat16)
    methods = {**chosen_methods(["skip:last=1", "sparsevar:tau=0.6", "fastvar", "tome"], 5, 3), "odd": comparing.Failing()}
    distance = copy.deepcopy(comparing.lpips()).cuda()
    with quality.few_images_suffice():
        found = judge(pipe, methods, quality.PROMPTS, distance, sets, schedule=comparing.SCHEDULE, batch=2, masks=True)
    dense, *others, odd = found.rows
    assert dense["speedup"]["median"] == 1 and "style" in dense
    assert [row["engine"] for row in (dense, *others)] == ["graphs"] * 5, "captured in the warm-up"
    assert all(row["speedup"]["median"] > 0 and "frechet_dense" in row for row in others)
    assert "does not work here" in odd["error"]
    assert all(len(result.masks[0]) == 5 for result in found.results.values() if result.error is None)
    json.dumps(found.rows, allow_nan=False)


def test_a_model_is_observed_on_a_gpu() -> None:
    pipe = random_pipeline(SPECS["infinity"], device="cuda", dtype=torch.bfloat16)
    sample = Sample.of(["a red apple", "a fox"], images=3, seed=0)
    found, examples = observe(pipe, sample, schedule_of("infinity"), batch=2, switches=2)
    assert len(verdicts(found)) == 8 and found.about["dtype"] == "bfloat16"
    assert examples.stages.width > 0
    to_json(found)
