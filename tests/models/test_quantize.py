"""8-bit weights: the layers, their selection, and whole requests. On the CPU the same modules emulate e4m3."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nextscale
from benchmarks.formats_table import speed_table
from benchmarks.roofline import Rates, request_roofline
from benchmarks.speed_tables import speed_tables
from nextscale import FastVAR, Method, Pipeline, SparseVAR, StageVAR
from nextscale import device as placement
from nextscale.errors import SettingError
from nextscale.kernels.reference import E4M3_MAX, from_e4m3, to_e4m3
from nextscale.loading.load import quantize_model, random_pipeline
from nextscale.models.blocks import Block
from nextscale.models.quantization import BLOCK_LINEARS, FORMATS, Fp8Linear, Int8Linear, Quantize, QuantizedLinear, quantize_blocks
from nextscale.planning.cost import Workload
from nextscale.planning.memory import weights_bytes
from nextscale.profiles import fingerprint
from nextscale_research.methods import ScaleKV, ToMe
from nextscale_research.quality.format_errors import generate_seen, plant_outliers, stage_errors
from nextscale_research.quality.formats import OWN, Variant, compare_formats
from nextscale_research.quality.rows import CONDITIONS, comparable
from tests.benchmarks import test_speed_tables as bench
from tests.eval.test_compare import lpips, spec
from tests.helpers import tiny
from tests.helpers.cli import run_cli
from tests.research import test_quality as quality
from tests.test_pipeline import picked
from tests.tokenizers.test_decode import LiveBytes

FAMILIES = ("var", "flexvar", "infinity", "hart", "star_refined")
ROUNDING = 2.0**-4  # of e4m3, the largest


@cache
def pipeline(family: str, format: Quantize) -> Pipeline:
    pipe = tiny.fresh_pipeline(family)
    quantize_model(pipe.model, format)
    return pipe


@cache
def nano() -> Pipeline:
    return nextscale.load("nano", device="cpu")


def drawn(family: str, format: Quantize, **settings: Any) -> nextscale.Output:
    return pipeline(family, format)(tiny.prompts(family, 3), **({"seed": [5, 60, 700]} | settings))


# --- layers


def layer(outputs: int = 48, channels: int = 80, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(channels, outputs, bias).requires_grad_(False)


def test_int8_weights_are_within_half_a_step() -> None:
    linear = layer()
    linear.weight[3] *= 100  # a scale of its own
    made = Int8Linear.of(linear.weight, linear.bias)
    step = linear.weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((made.restored_weight(torch.float32) - linear.weight).abs() <= step * 0.501).all()
    x = torch.randn(2, 3, 80)
    assert torch.equal(made(x), nn.functional.linear(x, made.restored_weight(torch.float32), linear.bias))


def test_fp8_layers_multiply_what_e4m3_says() -> None:
    linear, x = layer(), 3 * torch.randn(2, 3, 80)
    made = Fp8Linear.of(linear.weight, linear.bias, input_scale=2.0)
    weight, rounded = made.restored_weight(torch.float32), from_e4m3(to_e4m3(x, 2.0), 2.0, torch.float32)
    assert (weight - linear.weight).abs().max() <= ROUNDING * linear.weight.abs().max()
    expected = nn.functional.linear(rounded, weight, linear.bias)
    assert torch.allclose(made(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(made(to_e4m3(x, 2.0)), made(x))
    assert 0.005 < (made(x) - linear(x)).norm() / linear(x).norm() < ROUNDING


def test_rounding_to_e4m3() -> None:
    x = torch.tensor([0.0, 1.0, 1.06, 448.0, 1e6, -1e6, 2.0**-9, 2.0**-11, float("nan")])
    rounded = to_e4m3(x, 1.0).float()
    assert torch.equal(rounded[:-1], torch.tensor([0.0, 1.0, 1.0, E4M3_MAX, E4M3_MAX, -E4M3_MAX, 2.0**-9, 0.0]))
    assert rounded[-1].isnan()
    values = torch.linspace(-500, 500, 999)
    assert torch.equal(to_e4m3(values, 2.0).float(), to_e4m3(values / 2, 1.0).float())


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_layers_of_zeros_and_of_damaged_weights(kind: type[QuantizedLinear]) -> None:
    x = torch.randn(2, 80)
    assert torch.equal(kind.of(torch.zeros(16, 80), None)(x), torch.zeros(2, 16))
    for damage in (float("nan"), float("inf")):
        weight = layer(16).weight.clone()
        weight[1, 1] = damage
        assert not kind.of(weight, None)(x).isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_weights_cannot_be_trained(format: Quantize) -> None:
    made = (Fp8Linear if format == "fp8" else Int8Linear).of(layer().weight, None)
    with pytest.raises(SettingError, match="quantize"):
        made(torch.randn(2, 80, requires_grad=True))


# --- which products


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_product_of_a_block_is_in_the_table(family: str) -> None:
    named = {product.name for product in BLOCK_LINEARS}
    blocks = [module for module in tiny.shared_pipeline(family).model.modules() if isinstance(module, Block)]
    assert all({name for name, part in block.named_modules() if isinstance(part, nn.Linear)} <= named for block in blocks)
    for format in FORMATS:
        left = [name for name, part in pipeline(family, format).model.named_modules() if isinstance(part, nn.Linear) and "blocks." in name]
        assert all(name.startswith("residual_head.") for name in left)


def test_sizes_of_inputs_are_near_what_comes() -> None:
    """On nano, whose weights are trained: within a factor of 8, of the 64 that there is room for on either side."""
    whole = nano()
    pipe = Pipeline(copy.deepcopy(whole.model), whole.tokenizer, whole.reader, whole.settings)
    quantize_blocks(pipe.model, "fp8")
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        return lambda part, given: seen.setdefault(name, []).append(given[0].float().square().mean() / part.input_scale**2)

    for block in pipe.model.stack:
        for name, part in block.named_modules():
            if isinstance(part, Fp8Linear):
                part.register_forward_pre_hook(watch(name))
    pipe("a red apple", seed=1, size=128, decode=False)
    assert len(seen) == 6
    for name, squares in seen.items():
        assert 1 / 8 < torch.stack(squares).mean().sqrt() < 8, name


@pytest.mark.parametrize("format", FORMATS)
def test_weights_take_half_of_the_memory_and_plans_know_it(format: Quantize) -> None:
    whole = tiny.shared_pipeline("infinity", torch.bfloat16).model
    small = random_pipeline(tiny.SPECS["infinity"], dtype=torch.bfloat16).model
    quantize_model(small, format)
    saved = weights_bytes(whole) - weights_bytes(small)
    products = sum(part.weight.numel() for block in whole.stack for part in block.modules() if isinstance(part, nn.Linear))
    assert 0.9 * products < saved <= products
    plain, planned = (
        json.loads(run_cli("plan", "-m", "infinity-2b", "--json", *more).output)["memory"]["dense_peak"]["weights"]
        for more in ([], ["--quantize", format])
    )
    assert 0.5 < planned / plain < 0.56


@pytest.mark.parametrize("format", FORMATS)
def test_a_device_needs_room_for_the_bytes_and_the_weights_of_one_product(format: Quantize) -> None:
    """The meta device represents the GPU of test_random_weights_never_lie_on_the_gpu_unquantized."""
    model = tiny.fresh_pipeline("infinity").model.bfloat16()
    largest = max(part.weight.numel() for block in model.stack for part in block.modules() if isinstance(part, nn.Linear))
    with LiveBytes("meta") as device:
        quantize_blocks(model, format, torch.device("meta"))
    kept = sum(part.nbytes for part in (*model.parameters(), *model.buffers()) if part.is_meta)
    assert kept == device.live <= device.peak <= kept + (2 + 4 + 4) * largest  # as it was, as float32, and without signs


def test_random_weights_are_those_that_were_quantized_afterwards() -> None:
    made, later = (random_pipeline(tiny.SPECS["infinity"], dtype=torch.bfloat16, quantize=form).model for form in ("int8", None))
    quantize_model(later, "int8")
    assert made.fingerprint == later.fingerprint
    for ours, theirs in zip(made.state_dict().values(), later.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


# --- requests


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_its_images_alone_in_any_order(family: str, format: Quantize) -> None:
    together, again = (drawn(family, format) for _ in range(2))
    tiny.assert_same_bits(together, again)
    for image, seed in enumerate((5, 60, 700)):
        alone = pipeline(family, format)(tiny.one_prompt(family, image), seed=seed)
        tiny.assert_close(family, tiny.one_image(together, image), alone)
    order = [2, 0, 1]
    prompts = tiny.prompts(family, 3)
    permuted = pipeline(family, format)(picked(prompts, order), seed=[700, 5, 60])
    assert torch.equal(permuted.pixels, together.pixels[order])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_near_those_of_the_whole_weights(family: str, format: Quantize) -> None:
    prompts = tiny.prompts(family, 2)
    expected = generate_seen(tiny.shared_pipeline(family), prompts, None)
    errors = stage_errors(generate_seen(pipeline(family, format), prompts, None, expected.codes), expected)
    assert all(0 < error < (0.15 if format == "fp8" else 0.03) for error in errors["logits"])
    assert max(errors["changed"]) <= 0.25


WITHOUT_STRENGTH = (SparseVAR(tau=0), FastVAR({2: 0.0}), ToMe(ratio=0), ScaleKV(share=1.0))


@pytest.mark.parametrize("format", FORMATS)
def test_methods_without_strength_are_dense_bit_for_bit(format: Quantize) -> None:
    dense = drawn("infinity", format)
    for method in WITHOUT_STRENGTH:
        tiny.assert_same_bits(drawn("infinity", format, method=method), dense)


@pytest.mark.parametrize("format", FORMATS)
def test_methods_run_and_a_batch_equals_its_images(format: Quantize) -> None:
    """SparseVAR's rows are packed, and ScaleKV reads inputs and weights of a product."""
    methods: tuple[Method, ...] = (
        SparseVAR(tau=0.6, first_stage=2),
        FastVAR({2: 0.5}),
        StageVAR(ranks=0.177),
        ScaleKV(share=0.5, window=4),
    )
    for method in methods:
        together = drawn("infinity", format, method=method)
        alone = pipeline("infinity", format)(tiny.one_prompt("infinity", 1), seed=60, method=method)
        tiny.assert_close("infinity", tiny.one_image(together, 1), alone)
        assert together.report.quantize == format


# --- loading


def test_nano_in_int8_and_its_profile() -> None:
    pipe = nextscale.load("nano", device="cpu", quantize="int8")
    whole = nano()
    assert fingerprint(pipe.model) == fingerprint(whole.model) and pipe.profiles == whole.profiles != ()
    assert pipe.model.quantize == "int8" and pipe.model.device == whole.model.device
    ours, theirs = (one("a red apple", seed=3, size=128) for one in (pipe, whole))
    assert ours.report.quantize == "int8" and theirs.report.quantize is None
    assert 0 < (ours.pixels - theirs.pixels).abs().mean() < 0.1


def test_what_cannot_be_is_refused_with_the_alternatives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="'fp8' needs an NVIDIA GPU; the device is cpu. .*int8.* bfloat16"):
        nextscale.load("nano", device="cpu", quantize="fp8")
    with pytest.raises(SettingError, match="quantize must be one of fp8, int8, .*'fp4'"):
        nextscale.load("nano", device="cpu", quantize="fp4")  # type: ignore[arg-type]
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    with pytest.raises(SettingError, match=r"some GPU has 8.6. quantize='int8' .* bfloat16"):
        placement.check_quantize("fp8", gpu, torch.bfloat16)
    assert placement.check_quantize("int8", gpu, torch.float32) == "int8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert placement.check_quantize("fp8", gpu, torch.bfloat16) == "fp8"
    with pytest.raises(SettingError, match="got torch.float32"):
        placement.check_quantize("fp8", gpu, torch.float32)
    quantized = pipeline("infinity", "int8")
    with pytest.raises(SettingError, match="quantized; got int8"):
        quantized.save_pretrained(tmp_path / "saved")
    with pytest.raises(SettingError, match="Load the model again with dtype="):
        quantized.to(torch.bfloat16)
    assert run_cli("generate", "a fox", "--device", "cpu", "--quantize", "fp8").exit_code == 2


def test_a_plan_is_refused_where_loading_is() -> None:
    """Planning needs no device."""
    plan = ["plan", "-m", "nano", "--quantize", "fp8", "--json"]
    assert run_cli(*plan).exit_code == 0
    refused = run_cli(*plan, "--dtype", "float32")
    assert refused.exit_code == 2 and "bfloat16 or float16; got torch.float32" in refused.output


# --- comparing formats


def test_formats_are_compared_at_the_same_seeds() -> None:
    variants = [Variant.parse("int8"), Variant.parse("fp8:feed_forward.fc2,text_attention.kv")]
    with quality.few_images_suffice():
        own, *others = compare_formats(
            lambda: tiny.with_ranks(random_pipeline(spec())), variants, quality.PROMPTS, lpips(), quality.set_judge(), seed=3, batch=2
        )
    assert own["variant"] == OWN and own["quantize"] is None and "lpips" not in own
    assert [row["variant"] for row in others] == [variant.name for variant in variants]
    assert [row["quantize"] for row in others] == ["int8", "fp8"]
    assert all(row["psnr"]["value"] > 5 and row["identical"] < 1 and "lpips" in row and "style" in row for row in others)
    assert Variant.parse("bfloat16").apply(tiny.fresh_pipeline("infinity")).model.dtype == torch.bfloat16
    with pytest.raises(SettingError, match="float16 or fp8 or int8"):
        Variant.parse("fp8:head")


def test_planted_outliers_are_survived() -> None:
    """With channels 100 times larger, attention and norms of the model give the same output."""
    prompts, errors = tiny.prompts("infinity", 2), {}
    plain, planted = tiny.fresh_pipeline("infinity"), tiny.fresh_pipeline("infinity")
    plant_outliers(planted.model, 100)
    expected = generate_seen(planted, prompts, None)
    for format in FORMATS:
        pipe = tiny.fresh_pipeline("infinity")
        plant_outliers(pipe.model, 100)
        quantize_model(pipe.model, format)
        errors[format] = stage_errors(generate_seen(pipe, prompts, None, expected.codes), expected)["logits"]
    assert max(errors["fp8"]) < 0.1
    assert max(errors["int8"]) < 0.3
    assert not torch.equal(plain.model.stack[0].attention.qkv.weight, planted.model.stack[0].attention.qkv.weight)


def test_a_quantized_row_stands_below_its_neighbor_of_the_same_commit() -> None:
    """Not below a newer row of another commit, nor below one that was not captured or ran without kernels."""
    beside, later = bench.made(milliseconds=90), bench.made(milliseconds=60, commit="later")
    others = [bench.made(milliseconds=300, engine="eager", step="eager"), bench.made(milliseconds=200, step="graphs, plain torch")]
    others.append(bench.made(milliseconds=500, hardware="NVIDIA H100"))
    quantized = bench.made(milliseconds=45, quantize="fp8")
    assert "**2.00**" in speed_table([quantized, beside, *others, later])
    assert "**1.33**" in speed_table([quantized | {"commit": "alone"}, beside, *others, later])  # the newest of all
    assert speed_table([quantized, *others]) == ""


def test_quantized_rows_are_in_no_table_of_others() -> None:
    rows = [bench.made(), bench.made("FastVAR", 50)]
    assert speed_tables([*rows, bench.made(quantize="fp8")]) == speed_tables(rows)
    judged = {"method": "dense"} | dict.fromkeys(CONDITIONS, 1)
    assert comparable([judged, judged | {"quantize": "fp8"}], judged | {"quantize": None}) == [judged]


def test_the_roofline_reads_bytes() -> None:
    work, rates = Workload(tiny.schedule_of("infinity"), text_tokens=8), Rates(flops=1.0, bytes=1.0)
    whole, small = (
        request_roofline(pipe.model, work, [1.0] * 4, rates) for pipe in (tiny.shared_pipeline("infinity"), pipeline("infinity", "int8"))
    )
    assert 0.25 < small.reading / whole.reading < 0.3  # of float32
    faster = request_roofline(pipeline("infinity", "fp8").model, work, [1.0] * 4, replace(rates, linear_flops=2.0))
    assert 0.5 < faster.arithmetic / whole.arithmetic < 0.6
