"""Decoding: kernels, strips, and predicted memory."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nextscale import kernels
from nextscale.errors import OutOfMemory
from nextscale.loading.load import fill_random
from nextscale.loading.presets import MODELS, build_tokenizer
from nextscale.tokenizers import tiles
from nextscale.tokenizers.autoencoder import AutoencoderConfig, Decoder, ResidualBlock, Upsample, module_to_channels_last
from nextscale.tokenizers.layers import NormAct, convolve_upsampled, merged_upsampling, to_channels_last
from nextscale.tokenizers.tiles import Statistics, Strips, choose_strips, decode, decode_bytes, decode_tiled, images_at_a_time, merged_bytes
from tests.helpers.kernel_cases import DEVICE, DTYPES, compare, interpreted_as_on_a_gpu, poisoned, triton_interpreter

triton_interpreter()  # before the kernels are imported

from nextscale.kernels import bias_residual, norm_conv, upsample  # noqa: E402
from nextscale.kernels import group_norm as kernel  # noqa: E402

CONFIGS = {
    "attention": AutoencoderConfig(48, (1, 2, 2), 6, blocks_per_level=1),  # 24 groups, as FlexVAR and small models have
    "plain": AutoencoderConfig(32, (1, 2), 4, blocks_per_level=2, attention=False),
    "one level": AutoencoderConfig(32, (1,), 4, blocks_per_level=1, attention=False),
}


def decoder_of(config: AutoencoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(config)
    fill_random(decoder, torch.Generator().manual_seed(0), dtype, ())
    return decoder


def latent(config: AutoencoderConfig, images: int, height: int, width: int) -> Tensor:
    return torch.randn(images, config.latent_channels, height, width, generator=torch.Generator().manual_seed(1))


# --- kernels

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(1, 32, 1, 1), (2, 160, 5, 3), (1, 48, 7, 11), (3, 256, 4, 4), (2, 96, 3, 1), (1, 384, 1, 9), (1, 320, 9, 7)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreted_as_on_a_gpu():
        yield


def given_norm(channels: int, dtype: torch.dtype) -> NormAct:
    norm = NormAct(channels)
    fill_random(norm, torch.Generator().manual_seed(3), dtype, ())
    return norm.to(DEVICE)


def channels_last(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    x = mean + torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def biases(channels: int, dtype: torch.dtype, count: int) -> Tensor:
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)


@every_dtype
@pytest.mark.parametrize(("shape", "shifted"), [*zip(SHAPES, cycle((False, True)), strict=False), (SHAPES[-1], True)], ids=str)
def test_the_kernel_is_group_norm_and_silu(shape: tuple[int, ...], dtype: torch.dtype, shifted: bool, interpreted: None) -> None:
    """The error against float64 is at most twice torch's, and the layout equals the input's.

    1e-6 is added, because a first pixel far from the mean costs some rounding of the variance.
    """
    x, norm = channels_last(*shape, dtype=dtype, mean=0.5), given_norm(shape[1], dtype)
    shift = 3 * biases(shape[1], dtype, 1)[0] if shifted else None
    weights = (norm.weight, norm.bias, norm.eps, shift)
    exact_weights = (norm.weight.double(), norm.bias.double(), norm.eps, shift.double() if shift is not None else None)
    exact = kernel.group_norm_silu_reference(x.double(), norm.num_groups, *exact_weights)
    theirs = (kernel.group_norm_silu_reference(x, norm.num_groups, *weights).double() - exact).abs().max()
    with poisoned():
        ours = kernel.group_norm_silu(x, norm.num_groups, *weights)
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert (ours.double() - exact).abs().max() <= 2 * theirs + 1e-6 * exact.abs().max()


def test_many_shares_of_the_pixels_make_one_mean(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses tiles of 4 pixels in 5 uneven shares, added two at a time."""
    for name, number in (("TILE", 32 * 4), ("SUMS_TILE", 32 * 4), ("PROGRAMS", 5), ("SHARES", 2)):
        monkeypatch.setattr(kernel, name, number)
    x, norm = channels_last(1, 32, 3, 13, dtype=torch.float32), given_norm(32, torch.float32)
    ours = kernel.group_norm_silu(x, 32, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(ours, kernel.group_norm_silu_reference(x, 32, norm.weight, norm.bias, norm.eps), rtol=1e-5, atol=1e-5)


def test_large_values_that_hardly_differ(interpreted: None) -> None:
    """A mean of a thousand deviations: squares of the values themselves would leave nothing of the variance in float32."""
    x, norm = channels_last(1, 64, 9, 9, dtype=torch.float32, mean=1000.0), given_norm(64, torch.float32)
    exact = kernel.group_norm_silu_reference(x.double(), 32, norm.weight.double(), norm.bias.double(), norm.eps)
    ours = kernel.group_norm_silu(x, 32, norm.weight, norm.bias, norm.eps)
    assert (ours.double() - exact).abs().max() < 3e-4  # a mean of 1000 is rounded to 6e-5


def test_the_kernel_refuses_other_layouts(interpreted: None) -> None:
    norm = given_norm(32, torch.float32)
    with pytest.raises(ValueError, match=r"channels-last .*; got \[1, 32, 2, 2\]"):
        kernel.group_norm_silu(torch.zeros(1, 32, 2, 2, device=DEVICE), 32, norm.weight, norm.bias, norm.eps)


SMALL = [shape for shape in SHAPES if shape[1] <= 256]


@pytest.mark.parametrize(("shape", "dtype"), [*zip(SMALL, cycle(DTYPES), strict=False), *zip(SMALL[1:], DTYPES, strict=False)], ids=str)
def test_norm_and_last_convolution_in_one_pass(shape: tuple[int, ...], dtype: torch.dtype, interpreted: None) -> None:
    """Pixels beyond the edges are zero after the norm. Weights are contiguous or channels-last."""
    x, norm = channels_last(*shape, dtype=dtype, mean=0.5), given_norm(shape[1], dtype)
    weight = (torch.randn(3, shape[1], 3, 3, generator=torch.Generator().manual_seed(6)) / shape[1] ** 0.5).to(DEVICE, dtype)
    weight = weight.contiguous(memory_format=torch.channels_last) if shape[0] > 1 else weight
    given = (x, norm.num_groups, norm.weight, norm.bias, norm.eps, weight, biases(3, dtype, 1)[0])
    compare(norm_conv.group_norm_silu_conv, norm_conv.group_norm_silu_conv_reference, *given)


def test_norm_and_last_convolution_of_many_tiles(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 14 columns and 3 rows do not divide the size. Images of a batch equal single images bit for bit."""
    x, norm = channels_last(2, 48, 8, 31, dtype=torch.bfloat16), given_norm(48, torch.bfloat16)
    weight, bias = torch.ones(4, 48, 3, 3, dtype=torch.bfloat16, device=DEVICE), biases(4, torch.bfloat16, 1)[0]
    given = (norm.num_groups, norm.weight, norm.bias, norm.eps, weight, bias)
    large = norm_conv.group_norm_silu_conv(x, *given)
    for name, number in (("COLUMNS", 16), ("ROWS", 3), ("MIN_ROWS", 1), ("PROGRAMS", 1)):
        monkeypatch.setattr(norm_conv, name, number)
    small = norm_conv.group_norm_silu_conv(x, *given)
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-5)
    alone = x[1:].contiguous(memory_format=torch.channels_last)
    assert torch.equal(norm_conv.group_norm_silu_conv(alone, *given), small[1:])


def test_norm_and_last_convolution_refuse_what_does_not_fit(interpreted: None) -> None:
    x, norm, bias = channels_last(1, 32, 2, 2, dtype=torch.float32), given_norm(32, torch.float32), torch.ones(3, device=DEVICE)
    with pytest.raises(ValueError, match="weight must have shape"):
        norm_conv.group_norm_silu_conv(x, 32, norm.weight, norm.bias, 1e-6, torch.ones(3, 32, 1, 1, device=DEVICE), bias)


@every_dtype
@every_shape
def test_bias_and_residual_in_one_pass(shape: tuple[int, ...], dtype: torch.dtype, interpreted: None) -> None:
    """Into the memory of the first input; every other one stays as it is."""
    x, residual = channels_last(*shape, dtype=dtype), channels_last(*shape, dtype=dtype, mean=2.0)
    bias, residual_bias = biases(shape[1], dtype, 2)

    def added(x: Tensor, *others: Tensor) -> Tensor:
        target = x.clone()
        assert bias_residual.add_bias_residual_(target, *others) is target
        return target

    for others in ((bias,), (bias, residual), (bias, residual, residual_bias)):
        compare(added, bias_residual.add_bias_residual_reference, x, *others)


@pytest.mark.parametrize(("shape", "dtype"), [*zip(SHAPES[1:], cycle(DTYPES), strict=False)], ids=str)  # one number has no variance
def test_sums_that_are_collected_while_a_residual_is_added(shape: tuple[int, ...], dtype: torch.dtype, interpreted: None) -> None:
    """The result equals the kernel without sums bit for bit; mean and scale equal a separate pass."""
    x, residual, norm = channels_last(*shape, dtype=dtype), channels_last(*shape, dtype=dtype, mean=2.0), given_norm(shape[1], dtype)
    bias, residual_bias = biases(shape[1], dtype, 2)
    others = (bias, residual) if shape[0] == 1 else (bias, residual, residual_bias)
    found, expected = x.clone(), bias_residual.add_bias_residual_(x.clone(), *others)
    with poisoned():
        sums = bias_residual.add_bias_residual_sums_(found, *others)
    assert torch.equal(found, expected)
    ours, theirs = (kernel.mean_and_scale(found, norm.num_groups, norm.weight, norm.eps, None, known) for known in (sums, None))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sums_of_many_shares(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 pixels in 5 shares that do not come out even, of two images."""
    for name, number in (("SUMS_TILE", 32 * 4), ("PROGRAMS", 10), ("SHARES", 2)):
        monkeypatch.setattr(kernel, name, number)
    x, residual = channels_last(2, 32, 3, 13, dtype=torch.float32), channels_last(2, 32, 3, 13, dtype=torch.float32, mean=2.0)
    expected, bias, norm = x + residual + 1, torch.ones(32, device=DEVICE), given_norm(32, torch.float32)
    sums = bias_residual.add_bias_residual_sums_(x, bias, residual)
    assert sums.parts.shape == (2, 5, 2, 32)
    given = (norm.num_groups, norm.weight, norm.bias, norm.eps)
    ours = kernel.group_norm_silu(x, *given, None, sums)
    torch.testing.assert_close(ours, kernel.group_norm_silu_reference(expected, *given), rtol=1e-5, atol=1e-5)


def test_bias_and_residual_of_many_tiles(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 pixels do not divide the size. Rows of a larger map are updated, as in strips, and no other rows."""
    monkeypatch.setattr(bias_residual, "TILE", 32 * 4)
    whole, update = channels_last(1, 96, 8, 7, dtype=torch.float32), channels_last(1, 96, 3, 7, dtype=torch.float32)
    bias, expected = biases(96, torch.float32, 1)[0], whole.clone()
    expected[:, :, 2:5] += bias[:, None, None] + update
    bias_residual.add_bias_residual_(whole[:, :, 2:5], bias, update)
    torch.testing.assert_close(whole, expected)


def test_bias_and_residual_refuse_what_does_not_fit(interpreted: None) -> None:
    x, bias = channels_last(2, 32, 3, 5, dtype=torch.float32), torch.zeros(32, device=DEVICE)
    with pytest.raises(ValueError, match=r"channels-last .*; got \[2, 32, 3, 5\]"):
        bias_residual.add_bias_residual_(x.contiguous(), bias)
    with pytest.raises(ValueError, match=r"channels-last .*; got \[2, 32, 3, 5\]"):
        bias_residual.add_bias_residual_(x, bias, x.contiguous())
    with pytest.raises(ValueError, match=r"residual must have shape \[2, 32, 3, 5\]; got \[1, 32, 3, 5\]"):
        bias_residual.add_bias_residual_(x, bias, x[:1])
    with pytest.raises(ValueError, match=r"bias must have shape \[32\]; got \[16\]"):
        bias_residual.add_bias_residual_(x, bias[:16])


@every_dtype
@every_shape
def test_upsampling_copies_every_pixel(shape: tuple[int, ...], dtype: torch.dtype, interpreted: None) -> None:
    x = channels_last(*shape, dtype=dtype)
    with poisoned():
        found = upsample.upsample_nearest(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, upsample.upsample_nearest_reference(x))


def test_upsampling_of_rows_of_many_tiles(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upsample, "TILE", 32 * 4)
    x = channels_last(2, 96, 3, 13, dtype=torch.float32)
    assert torch.equal(upsample.upsample_nearest(x), upsample.upsample_nearest_reference(x))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5)])
def test_upsampling_and_its_convolution_are_one_transposed_convolution(height: int, width: int) -> None:
    resize = Upsample(6).double()
    x = torch.randn(2, 6, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = resize(x) - resize.conv.bias[:, None, None]
        found = conv_transpose2d(x, merged_upsampling(resize.conv.weight), stride=2, padding=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # sums of weights are taken in float32


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 2), (4, 5)])
def test_upsampling_and_convolution_in_one_step(height: int, width: int) -> None:
    x = torch.randn(2, 6, height, width, generator=torch.Generator().manual_seed(5))
    resize = Upsample(6)
    expected = resize(x)  # with gradients: one step after the other
    torch.testing.assert_close(convolve_upsampled(x, resize.conv.weight, resize.conv.bias), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(resize(x), convolve_upsampled(x, resize.conv.weight, resize.conv.bias))


def test_a_merged_upsampling_follows_its_weights() -> None:
    """Merged decoders give the same pixels, also after weights were replaced or overwritten."""
    config = AutoencoderConfig(32, (1, 2), 4, blocks_per_level=0, attention=False)
    decoder, z = decoder_of(config), latent(config, 1, 2, 3)
    resize = decoder.stack[0].resize
    assert isinstance(resize, Upsample)
    for number in range(3):
        with torch.no_grad():
            x = decoder.stack[0].features_and_sums(decoder.middle(decoder.conv_in(z)))[0]
            torch.testing.assert_close(resize.without_bias(x) + resize.conv.bias[:, None, None], resize(x), rtol=0, atol=1e-5)
            first = resize.merged_weight()
            assert resize.merged_weight() is first
            if number == 0:
                resize.conv.weight = torch.nn.Parameter(2 * resize.conv.weight)
            else:
                resize.load_state_dict({name: -value for name, value in resize.state_dict().items()})


def lay_out_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("autoencoder", "tiles"):
        monkeypatch.setattr(f"nextscale.tokenizers.{module}.to_channels_last", lambda x: x.contiguous(memory_format=torch.channels_last))


def test_a_decoder_takes_the_kernels_where_it_can(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run for channels-last tensors without gradients, also in strips. The pixels equal torch's."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions with ten bits of mantissa differ by 1.5e-3
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        function = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *given, **settings: calls.update([name]) or function(*given, **settings))

    for name in ("group_norm_silu", "group_norm_silu_conv", "add_bias_residual_", "add_bias_residual_sums_", "upsample_nearest"):
        count(name)
    config = AutoencoderConfig(32, (1, 2), 4, blocks_per_level=0, attention=False)  # one block in every level
    decoder = module_to_channels_last(decoder_of(config).to(DEVICE))
    z = latent(config, 1, 2, 1).to(DEVICE)
    expected = copy.deepcopy(decoder).cpu().at_once(z.cpu())
    calls.clear()
    if DEVICE == "cpu":
        assert torch.equal(decoder.at_once(z), expected)
        assert not calls  # rows of pixels, not of channels
        lay_out_as_on_a_gpu(monkeypatch)
    whole = decoder.at_once(z)
    blocks = 2 + 2  # in the middle, and one in both levels
    assert calls == {"group_norm_silu": 2 * blocks, "group_norm_silu_conv": 1, "add_bias_residual_sums_": blocks}
    torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=1e-4)
    calls.clear()
    count("centered_silu")
    torch.testing.assert_close(decode_tiled(decoder, z, Strips(2, 1)).cpu(), expected, rtol=0, atol=1e-4)
    assert min(calls[name] for name in ("centered_silu", "add_bias_residual_", "upsample_nearest")) > 1
    calls.clear()
    with torch.enable_grad():
        decoder.at_once(z)
    assert not calls


def test_kernels_round_no_more_than_torch(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors against float64 of two images, with attention in between and blocks that change the number of channels."""
    dtype = torch.bfloat16  # each kernel alone is compared in every dtype
    config = AutoencoderConfig(48, (1, 2), 6, blocks_per_level=1)
    decoder, z = decoder_of(config, dtype).to(DEVICE), latent(config, 2, 2, 3).to(DEVICE, dtype)
    exact = copy.deepcopy(decoder).double().at_once(z.double())
    if DEVICE == "cpu":
        lay_out_as_on_a_gpu(monkeypatch)
    ours = decoder.at_once(z)
    torch.testing.assert_close(decoder.at_once(z[1:]), ours[1:], rtol=0, atol=0.02)  # an image of a batch is the image alone
    monkeypatch.setattr("nextscale.kernels.available", lambda _: False)
    errors = [(image - exact).square().mean().sqrt() for image in (ours, decoder.at_once(z))]
    assert errors[0] <= 1.1 * errors[1]


def test_a_norm_keeps_its_names_and_its_gradient() -> None:
    block = ResidualBlock(32, 64)
    assert {name for name, _ in block.named_parameters() if "norm" in name} == {f"norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")}
    x = torch.randn(1, 32, 3, 3, requires_grad=True)
    y = block.norm1(x)
    assert torch.equal(y, torch.nn.functional.silu(torch.group_norm(x, 32, block.norm1.weight, block.norm1.bias, 1e-6)))
    y.sum().backward()
    assert x.grad is not None and block.norm1.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_channels_last_changes_nothing_but_rounding(config: AutoencoderConfig, dtype: torch.dtype) -> None:
    """Runs the layout of a GPU on the CPU; its error against float64 is similar to the usual layout's."""
    decoder, z = decoder_of(config, dtype), latent(config, 2, 4, 3)
    exact = copy.deepcopy(decoder).double().at_once(z.to(dtype).double())
    with torch.no_grad():
        usual = decoder.at_once(z.to(dtype))
        last = decoder.to(memory_format=torch.channels_last).at_once(z.to(dtype).contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    errors = [(image - exact).square().mean().sqrt() for image in (last, usual)]
    assert errors[0] <= 3 * errors[1]


def test_a_cpu_keeps_the_usual_layout() -> None:
    decoder, z = decoder_of(CONFIGS["plain"]), latent(CONFIGS["plain"], 1, 2, 2)
    assert to_channels_last(z) is z
    assert all(parameter.is_contiguous() for parameter in module_to_channels_last(decoder).parameters())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_gpu_gets_channels_last() -> None:
    decoder = module_to_channels_last(decoder_of(CONFIGS["plain"]).cuda())
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in decoder.parameters() if p.ndim == 4)
    with torch.no_grad():
        assert decoder(latent(CONFIGS["plain"], 2, 8, 8).cuda()).is_contiguous(memory_format=torch.channels_last)


# --- strips


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@settings(deadline=None, max_examples=25)
@given(height=st.integers(1, 5), width=st.integers(1, 4), rows=st.integers(1, 12), levels=st.integers(1, 3), images=st.integers(1, 2))
def test_strips_make_the_image_that_is_decoded_at_once(
    config: AutoencoderConfig, height: int, width: int, rows: int, levels: int, images: int
) -> None:
    """Equal up to float32 rounding. Pixels have a standard deviation near 0.6, and separately normalized strips would differ by 0.5."""
    decoder, z = decoder_of(config), latent(config, images, height, width)
    with torch.no_grad():
        torch.testing.assert_close(decode_tiled(decoder, z, Strips(rows, levels)), decoder.at_once(z), rtol=0, atol=1e-4)


def test_strips_in_half_precision_round_as_decoding_at_once_does() -> None:
    config = CONFIGS["plain"]
    decoder, z = decoder_of(config, torch.bfloat16), latent(config, 1, 6, 5).bfloat16()
    exact = copy.deepcopy(decoder).double().at_once(z.double())
    with torch.no_grad():
        at_once, in_strips = (
            (image - exact).square().mean().sqrt() for image in (decoder.at_once(z), decode_tiled(decoder, z, Strips(4, 2)))
        )
    assert in_strips <= 1.5 * at_once


@settings(deadline=None)
@given(heights=st.lists(st.integers(1, 6), min_size=1, max_size=4), mean=st.sampled_from([0.0, 300.0]))
def test_statistics_of_strips_are_those_of_the_whole(heights: list[int], mean: float) -> None:
    norm = NormAct(48)
    fill_random(norm, torch.Generator().manual_seed(0), torch.float32, ())
    x = mean + torch.randn(2, 48, sum(heights), 3, generator=torch.Generator().manual_seed(len(heights)))
    statistics = Statistics(norm)
    for strip in x.split(heights, dim=2):
        statistics.add(strip)
    exact = copy.deepcopy(norm).double()(x.double())
    torch.testing.assert_close(statistics.norm()(x).double(), exact, rtol=0, atol=1e-4 if mean == 0 else 2e-3)


# --- which way is taken


def test_a_batch_of_large_images_is_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of 64 pixels counts as large here. Small ones are decoded together, as before bit for bit."""
    config = CONFIGS["plain"]
    decoder, z = decoder_of(config), latent(config, 3, 4, 4)
    sizes: list[int] = []
    at_once = Decoder.at_once
    monkeypatch.setattr(Decoder, "at_once", lambda self, z: sizes.append(len(z)) or at_once(self, z))
    with torch.inference_mode():
        together = decoder(z)
        assert sizes == [3]
        assert torch.equal(together, at_once(decoder, z))
        monkeypatch.setattr(tiles, "MAX_ELEMENTS", 128 * 64)
        torch.testing.assert_close(decoder(z), together, rtol=0, atol=1e-4)
        assert sizes == [3, 2, 1]
        monkeypatch.setattr(tiles, "MAX_ELEMENTS", 64 * 64)
        decoder(z)
    assert sizes == [3, 2, 1, 1, 1, 1]


def test_a_gradient_is_asked_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "decode", lambda *arguments: pytest.fail("decoded without gradient"))
    decoder, z = decoder_of(CONFIGS["plain"]), latent(CONFIGS["plain"], 2, 2, 2).requires_grad_()
    decoder(z).sum().backward()
    assert z.grad is not None


def test_memory_decides_between_whole_images_and_strips() -> None:
    config = CONFIGS["plain"]
    decoder, z = decoder_of(config), latent(config, 4, 150, 3)
    one, few, least = (decode_bytes(decoder, (150, 3), torch.float32, strips) for strips in (None, Strips(75, 1), Strips(32, 1)))
    assert least < few < one
    facts = (decoder, z.shape, torch.float32)
    assert [images_at_a_time(*facts, bound) for bound in (10 * one, 4 * one, 3 * one, one, one - 1)] == [4, 4, 3, 1, 1]
    assert [choose_strips(*facts, bound) for bound in (one, one - 1, few, least)] == [None, Strips(75, 1), Strips(75, 1), Strips(32, 1)]
    with pytest.raises(OutOfMemory, match="max_memory must be .* 6x300 pixels in float32"):
        choose_strips(*facts, least // 2)
    with torch.no_grad():
        expected = decoder.at_once(z)
        for bound in (4 * one, one, few, least):
            torch.testing.assert_close(decode(decoder, z, bound), expected, rtol=0, atol=1e-4)


def test_without_a_bound_of_the_callers_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "DEFAULT_MEMORY", 1)
    decoder, z = decoder_of(CONFIGS["plain"]), latent(CONFIGS["plain"], 2, 20, 3)
    with torch.no_grad():
        torch.testing.assert_close(decoder(z), decoder.at_once(z), rtol=0, atol=1e-4)


# --- the memory that is predicted


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside took at a time, of one device or all; on the meta device nothing is computed."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self._device = device
        self.peak = self.live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            counted = isinstance(tensor, Tensor) and self._device in (None, tensor.device.type)
            if counted and id(tensor.untyped_storage()) not in self._known:
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        name, size = id(storage), storage.nbytes()
        self._known.add(name)
        self.live += size

        def gone() -> None:
            self._known.discard(name)
            self.live -= size

        weakref.finalize(storage, gone)


def meta_decoder(model: str, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        return build_tokenizer(MODELS[model].tokenizer).to(dtype).decoder


def peak_of(decoder: Decoder, side: int, dtype: torch.dtype, strips: Strips | None) -> tuple[int, int]:
    """Returns the peak memory of one image, and the prediction."""
    cells = side // tiles.stride(decoder)
    z = torch.empty(1, decoder.conv_in.in_channels, cells, cells, dtype=dtype, device="meta")
    with torch.no_grad(), LiveBytes() as found:
        (decoder.at_once(z) if strips is None else decode_tiled(decoder, z, strips)).float()
    return found.peak, decode_bytes(decoder, z.shape[2:], dtype, strips)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("side", "strips"), [(1024, None), (1024, Strips(64, 3)), (2048, Strips(128, 1))])
@pytest.mark.parametrize("model", ["infinity-2b", "infinity-8b", "hart-0.7b", "flexvar-d16"])
def test_the_predicted_memory_is_enough_and_not_much_more(model: str, side: int, strips: Strips | None, dtype: torch.dtype) -> None:
    """Published decoders at published sizes."""
    peak, predicted = peak_of(meta_decoder(model, dtype), side, dtype, strips)
    assert 0.85 * predicted < peak <= predicted


@pytest.mark.parametrize("strips", [None, Strips(64, 3)])
@pytest.mark.parametrize("model", ["infinity-2b", "hart-0.7b", "flexvar-d16"])
def test_kernels_take_no_more_memory_than_is_predicted(model: str, strips: Strips | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are replaced by functions that allocate the same tensors, because torch would allocate a third map."""
    monkeypatch.setitem(vars(kernels), "group_norm_silu", lambda x, *others: torch.empty_like(x))
    monkeypatch.setitem(vars(kernels), "centered_silu", lambda x, *others: torch.empty_like(x))
    monkeypatch.setitem(vars(kernels), "group_norm_silu_conv", lambda x, *others: x.new_empty(len(x), 3, *x.shape[2:], dtype=torch.float32))
    monkeypatch.setitem(vars(kernels), "add_bias_residual_", lambda x, *others: x)
    monkeypatch.setitem(vars(kernels), "add_bias_residual_sums_", lambda x, *others: None)
    monkeypatch.setitem(vars(kernels), "upsample_nearest", upsample.upsample_nearest_reference)
    for module in ("autoencoder", "layers", "tiles"):
        monkeypatch.setattr(f"nextscale.tokenizers.{module}.fusable", lambda x: True)
    # On the meta device a convolution does not keep the layout.
    for module in ("autoencoder", "layers"):
        monkeypatch.setattr(f"nextscale.tokenizers.{module}.without_bias", lambda conv, x, padding: conv2d(x, conv.weight, padding=padding))
    monkeypatch.setattr(Upsample, "without_bias", lambda resize, x: conv_transpose2d(x, resize.merged_weight(), stride=2, padding=1))
    decoder = meta_decoder(model, torch.bfloat16)
    merged = [level.resize.merged_weight() for level in decoder.stack if isinstance(level.resize, Upsample)]  # kept from the first image on
    assert sum(weight.nbytes for weight in merged) == merged_bytes(decoder, torch.bfloat16)
    peak, predicted = peak_of(decoder, 1024, torch.bfloat16, strips)
    assert 0.7 * predicted < peak <= predicted


@pytest.mark.parametrize("model", ["infinity-2b", "infinity-8b", "hart-0.7b", "star-1024"])
def test_four_megapixels_are_decoded_within_four_gigabytes(model: str) -> None:
    decoder = meta_decoder(model, torch.bfloat16)
    cells = 2048 // tiles.stride(decoder)
    strips = choose_strips(decoder, torch.Size((1, 32, cells, cells)), torch.bfloat16, int(4e9))
    assert strips is not None and strips.levels == 1
    assert peak_of(decoder, 2048, torch.bfloat16, None)[0] > 4e9
    assert peak_of(decoder, 2048, torch.bfloat16, strips)[0] < 4e9


class Work(TorchDispatchMode):
    """MACs of convolutions, and bytes that norms move: input twice, output once."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.norm_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.products += out.numel() * args[1][0].numel()
        if func is torch.ops.aten.native_group_norm.default:
            self.norm_bytes += 3 * args[0].nbytes
        return out


def test_what_the_comments_say_of_the_work() -> None:
    """Strips cost an eighth more products at 2048 pixels; norms move 11 GB at 1024."""
    decoder = meta_decoder("infinity-2b", torch.bfloat16)
    work = []
    for side, strips in ((1024, None), (2048, None), (2048, Strips(256, 1))):
        z = torch.empty(1, 32, side // 16, side // 16, dtype=torch.bfloat16, device="meta")
        with torch.no_grad(), Work() as done:
            decoder.at_once(z) if strips is None else decode_tiled(decoder, z, strips)
        work.append(done)
    assert work[0].norm_bytes == pytest.approx(11e9, rel=0.1)
    assert 1.08 < work[2].products / work[1].products < 1.17
