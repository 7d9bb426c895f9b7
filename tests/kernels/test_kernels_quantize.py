"""8-bit kernels compared with torch; in Triton's interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale import FastVAR, Schedule, kernels
from nextscale.kernels.reference import E4M3, E4M3_MAX, to_e4m3
from nextscale.loading.load import quantize_model
from nextscale.models.quantization import Fp8Linear
from nextscale_research.quality.format_errors import generate_seen
from tests.helpers import tiny
from tests.helpers.kernel_cases import DEVICE, Maker, interpreted_as_on_a_gpu, poisoned, require_close, triton_interpreter

triton_interpreter()  # before the kernels are imported

from nextscale.kernels.attention import attend_lengths_reference  # noqa: E402
from nextscale.kernels.int8 import Tile, int8_linear_reference, restore_int8_reference  # noqa: E402
from nextscale.kernels.norm import norm_modulate_reference, residual_norm_modulate_reference  # noqa: E402
from nextscale.kernels.quantize import gelu_to_e4m3_reference, round_to_e4m3_reference, silu_to_e4m3_reference  # noqa: E402


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreted_as_on_a_gpu():
        yield


def require_rounded(found: Tensor, exact: Tensor, scale: float) -> None:
    """Requires neighboring e4m3 values, allowing for float32 rounding; nearly all must be the nearest."""
    assert found.dtype == E4M3 and found.shape == exact.shape
    within = exact.double().clamp(-E4M3_MAX * scale, E4M3_MAX * scale)
    bound = (within.abs() * 2.0**-4).clamp(min=2.0**-10 * scale) * (1 + 1e-3) + 1e-6 * scale
    assert ((found.double() * scale - within).abs() <= bound).all()
    assert (found.float() == to_e4m3(exact, scale).float()).double().mean() > 0.98


CASES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "round": ("round_to_e4m3", round_to_e4m3_reference),
    "gelu": ("gelu_to_e4m3", gelu_to_e4m3_reference),
    "silu": ("silu_to_e4m3", silu_to_e4m3_reference),
}


@pytest.mark.parametrize("shape", [(3, 7, 130), (2, 4100)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rounding_and_activations(case: str, shape: tuple[int, ...]) -> None:
    name, reference = CASES[case]
    x = 20 * Maker(DEVICE, torch.bfloat16).normal(*shape)
    x.view(-1)[0] = 1e4  # beyond the range of e4m3 at these scales
    for scale in (0.25, 3.0):
        with poisoned():
            found = getattr(kernels, name)(x, scale)
        gate, up = x.double().chunk(2, dim=-1)
        exact = {
            "round": x.double(),
            "gelu": torch.nn.functional.gelu(x.double(), approximate="tanh"),
            "silu": torch.nn.functional.silu(gate) * up,
        }[case]
        require_rounded(found, exact, scale)
        assert (found.float() == reference(x.float(), scale).float()).double().mean() > 0.98


def test_what_is_no_number_stays_none() -> None:
    x = torch.tensor([[1.0, float("nan"), 2.0, 3.0]], device=DEVICE)
    assert kernels.round_to_e4m3(x, 1.0).float().isnan().tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "indexed", "packed"])
def test_norms_write_e4m3(kind: str, dtype: torch.dtype) -> None:
    make, rows, scale = Maker(DEVICE, dtype), 2, 0.7
    x, image = make.wide(rows, 7, 130), None
    modulation = [make.rows(rows, 130, 1), make.rows(rows, 130), make.rows(rows, 130)]
    if kind == "packed":
        image = torch.tensor([0, 0, 1, 1, 1, 2, 2], device=DEVICE)
        modulation = [make.rows(3 * rows, 130, 1) for _ in range(3)]
    given: dict[str, Any] = {"image": image}
    index = make.selection(rows, 7, 4) if kind == "indexed" else None
    exact = norm_modulate_reference(x.double(), *(part.double() for part in modulation[:2]), index, **given)
    require_rounded(kernels.norm_modulate(x, *modulation[:2], index, **given, e4m3_scale=scale), exact, scale)
    if kind == "indexed":
        return
    update = make.wide(rows, 7, 130)
    total, y = kernels.residual_norm_modulate(x, modulation[2], update, *modulation[:2], **given, e4m3_scale=scale)
    plain, _ = kernels.residual_norm_modulate(x, modulation[2], update, *modulation[:2], **given)
    assert torch.equal(total, plain)
    require_rounded(y, norm_modulate_reference(total.double(), *(part.double() for part in modulation[:2]), **given), scale)
    theirs = residual_norm_modulate_reference(x, modulation[2], update, *modulation[:2], **given, e4m3_scale=scale)[1]
    assert theirs.dtype == E4M3


def test_attention_writes_e4m3() -> None:
    make, lengths = Maker(DEVICE, torch.float16), torch.tensor([65, 9], dtype=torch.int32, device=DEVICE)
    q, both = make.normal(2, 17, 2, 24), make.normal(2, 65, 2, 2, 24)
    keys, values = both[:, :, 0], both[:, :, 1]
    found = kernels.attend_lengths(q, keys, values, lengths, 0.3, e4m3_scale=0.01)
    plain = kernels.attend_lengths(q, keys, values, lengths, 0.3)
    assert found.dtype == E4M3 and found.shape == plain.shape
    exact = attend_lengths_reference(q.double(), keys.double(), values.double(), lengths, 0.3)
    assert ((found.double() * 0.01 - exact).abs() <= exact.abs() * 2.0**-4 + 2e-3).all()


@pytest.mark.parametrize("tile", [None, (64, 32, 64, 4, 2)])
@pytest.mark.parametrize(("shape", "outputs"), [((2, 9, 130), 70), ((1, 1, 33), 300), ((70, 48), 16)])
def test_int8_linear(shape: tuple[int, ...], outputs: int, tile: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if tile is not None:
        monkeypatch.setattr("nextscale.kernels.int8.tile_for", lambda *_: Tile(*tile))
    make = Maker(DEVICE, torch.float16)  # the interpreter takes the bits of bfloat16 for numbers when it multiplies matrices
    x, bias = make.normal(*shape), make.normal(outputs)
    codes = torch.randint(-127, 128, (outputs, shape[-1]), generator=make.generator, device=DEVICE).to(torch.int8)
    scale = make.normal(outputs, dtype=torch.float32).abs() / 127
    for given in (bias, None):
        with poisoned():
            found = kernels.int8_linear(x, codes, scale, given)
        theirs = int8_linear_reference(x, codes, scale, given)
        exact = int8_linear_reference(x.double(), codes, scale.double(), None if given is None else given.double())
        require_close([found], [theirs], [exact])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_weights_are_restored(dtype: torch.dtype) -> None:
    codes = torch.randint(-127, 128, (6, 130), dtype=torch.int8, device=DEVICE)
    scale = torch.rand(6, device=DEVICE) + 0.1
    with poisoned():
        found = kernels.restore_int8(codes, scale, dtype)
    assert found.dtype == dtype and torch.equal(found, restore_int8_reference(codes, scale, dtype))


def test_int8_linear_refuses_what_does_not_fit() -> None:
    make = Maker(DEVICE, torch.float16)
    x, codes, scale = make.normal(2, 32), torch.zeros(16, 32, dtype=torch.int8, device=DEVICE), torch.ones(16, device=DEVICE)
    for given in ((x, codes, scale[:8]), (x, codes, scale, scale[:8])):
        with pytest.raises(ValueError, match="must have shape"):
            kernels.int8_linear(*given)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU: test_cuda_quantize")
def test_kernels_hand_e4m3_to_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with kernels and without give the same to rounding; with them, products are given what kernels have rounded. The first stage
    is dense, the second runs some of its tokens."""
    pipe, prompts, given = tiny.fresh_pipeline("infinity"), tiny.prompts("infinity", 2), set()
    quantize_model(pipe.model, "fp8")
    for name, part in pipe.model.stack[1].named_modules():
        if isinstance(part, Fp8Linear):
            part.register_forward_pre_hook(lambda _, inputs, name=name: given.add(name) if inputs[0].dtype == E4M3 else None)
    with pipe.accelerate(FastVAR({1: 0.5}, cache_stage=0)):
        with monkeypatch.context() as patch:
            for owner in ("cache", "models"):
                patch.setattr(f"nextscale.{owner}.attention.reads_lengths", lambda x: True)  # texts have different lengths
            found = generate_seen(pipe, prompts, Schedule((1, 2)))
        assert given == {"attention.qkv", "text_attention.q", "text_attention.proj", "feed_forward.fc1", "feed_forward.fc2"}
        monkeypatch.delenv("TRITON_INTERPRET")
        given.clear()
        plain = generate_seen(pipe, prompts, Schedule((1, 2)), found.codes)
        assert not given
    assert all((ours - theirs).norm() < 0.02 * theirs.norm() for ours, theirs in zip(found.logits, plain.logits, strict=True))
