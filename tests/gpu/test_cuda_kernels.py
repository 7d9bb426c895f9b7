"""Kernels on a GPU, at the sizes of the models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale import kernels
from nextscale.sampling import filter_logits, sample
from nextscale.varlen import VarlenLayout
from tests.helpers.kernel_cases import DTYPES, Maker, compare, compare_rotation, poisoned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    pytest.importorskip("triton")
    from nextscale.kernels.attention import attend_lengths_reference
    from nextscale.kernels.bias_residual import add_bias_residual_reference
    from nextscale.kernels.distance import distance_from_mean_reference, mean_over_tokens_reference
    from nextscale.kernels.group_norm import group_norm_silu_reference, mean_and_scale
    from nextscale.kernels.norm import norm_modulate_reference, residual_norm_modulate_reference
    from nextscale.kernels.norm_conv import group_norm_silu_conv_reference
    from nextscale.kernels.restore import restore_tokens_reference
    from nextscale.kernels.rotate import rotate_into_cache_reference
    from nextscale.kernels.topk import topk_indices_sorted_reference
    from nextscale.kernels.upsample import upsample_nearest_reference


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = [(1, 1, 2048), (2, 4096, 2048), (16, 1024, 2048), (2, 46 * 23, 1920), (2, 3, 2080), (2, 1600, 3584)]
HEADS = [(16, 128), (30, 64), (20, 96), (20, 104), (28, 128)]
MEMORY, LATE = (24, 24), [(32, 32), (40, 40), (64, 64), (46, 23)]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_modulate(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    make = Maker("cuda", dtype)
    rows, tokens, channels = shape
    scale, shift = make.rows(rows, channels, 1), make.rows(rows, channels)
    for index in (None, make.selection(rows, tokens, (tokens + 1) // 2)):
        compare(kernels.norm_modulate, norm_modulate_reference, make.wide(*shape), scale, shift, index)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gained", [True, False])
def test_residual_norm_modulate(shape: tuple[int, int, int], gained: bool, dtype: torch.dtype) -> None:
    """With a gate as after self-attention, and with and without a learned norm as around the text."""
    make = Maker("cuda", dtype)
    rows, _, channels = shape
    gate = make.rows(rows, channels) if gained else None
    scale, shift = (make.rows(rows, channels, 1), make.rows(rows, channels)) if gained else (make.normal(channels), make.normal(channels))
    inputs = make.wide(*shape), gate, make.wide(*shape), scale, shift
    compare(kernels.residual_norm_modulate, residual_norm_modulate_reference, *inputs)


@every_dtype
@pytest.mark.parametrize("heads, head_dim", HEADS)
@pytest.mark.parametrize("tokens", [1, 3, 46 * 23, 4096])
def test_rotate_into_cache(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    make = Maker("cuda", dtype)
    qkv, temperature = make.normal(2, tokens, 3, heads, head_dim), make.normal(heads, 1, dtype=torch.float32).exp()
    functions, rotation = (kernels.rotate_into_cache, rotate_into_cache_reference), make.rotation(tokens, head_dim)
    compare_rotation(functions, tokens + 9, qkv, temperature, rotation, None, start=5)
    index = make.selection(2, tokens, (tokens + 1) // 2)
    starts = torch.tensor([7, 0], device="cuda")
    compare_rotation(functions, tokens + 9, qkv[:, : index.shape[1]], temperature, rotation, index, start=starts)


@every_dtype
@pytest.mark.parametrize("grid", LATE)
@pytest.mark.parametrize("channels", [2048, 1920, 2080])
def test_restore_tokens(grid: tuple[int, int], channels: int, dtype: torch.dtype) -> None:
    make = Maker("cuda", dtype)
    tokens = grid[0] * grid[1]
    index = make.selection(2, tokens, tokens * 3 // 5)
    memory, fresh = make.wide(2, MEMORY[0] * MEMORY[1], channels), make.wide(2, index.shape[1], channels)
    for extra in ({}, {"base": make.wide(2, tokens, channels), "gate": make.rows(2, channels)}):
        compare(kernels.restore_tokens, restore_tokens_reference, memory, MEMORY, grid, fresh, index, **extra)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_distance_from_mean(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = Maker("cuda", dtype).wide(*shape)
    compare(kernels.distance_from_mean, distance_from_mean_reference, x, x.mean(dim=1, keepdim=True, dtype=torch.float32) + 0.1)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_mean_over_tokens(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    compare(kernels.mean_over_tokens, mean_over_tokens_reference, Maker("cuda", dtype).wide(*shape) + 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "channels"), HEADS)
@pytest.mark.parametrize(
    ("queries", "room", "lengths"),
    [
        (1, 9, (9, 1)),
        (4096, 64, (24, 61)),
        (307, 2521, (1804, 2521)),
        (64, 512, (512, 65)),
        (1228, 10521, (7653, 1)),
        (300, 40000, (40000, 39999)),
    ],
)
def test_attend_lengths(queries: int, room: int, lengths: tuple[int, int], heads: int, channels: int, dtype: torch.dtype) -> None:
    """At most twice as far from the exact result as torch, which reads no further than the lengths either."""
    make = Maker("cuda", dtype)
    q, both = make.normal(2, queries, heads, channels), make.normal(2, room, 2, heads, channels)
    on_device = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    both[torch.arange(room, device="cuda") >= on_device[:, None]] = float("nan")
    with poisoned():
        found = kernels.attend_lengths(q, both[:, :, 0], both[:, :, 1], on_device, 0.1)
    for row, length in enumerate(lengths):
        one = (q[row : row + 1], both[row : row + 1, :length, 0], both[row : row + 1, :length, 1], on_device[row : row + 1], 0.1)
        torchs = attend_lengths_reference(*one)
        truth = attend_lengths_reference(
            *(x.float() if x is not on_device and isinstance(x, Tensor) and x.is_floating_point() else x for x in one)
        )
        alone = kernels.attend_lengths(q[row : row + 1], both[row : row + 1, :, 0], both[row : row + 1, :, 1], length, 0.1)  # as a number
        allowed = 2 * (torchs - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        for ours in (found[row], alone[0]):
            assert (ours - truth[0]).abs().max() <= allowed


@pytest.mark.parametrize("tokens", [1, 144, 1600, 4096, 128 * 128])
def test_topk_indices_sorted(tokens: int) -> None:
    scores = torch.randint(0, 1 + tokens // 2, (3, tokens), device="cuda").float()  # ties everywhere
    scores[1] = torch.rand(tokens, device="cuda")
    scores[2, ::7] = float("nan")
    for keep in sorted({1, tokens // 10, tokens * 6 // 10, tokens}):
        with poisoned():
            found = kernels.topk_indices_sorted(scores, keep)
        assert torch.equal(found, topk_indices_sorted_reference(scores, keep)), keep


IMAGES = [(1, 128, 1024, 1024), (2, 512, 64, 64), (3, 160, 33, 17), (1, 384, 40, 23), (2, 96, 5, 7), (1, 1024, 3, 1)]
every_image = pytest.mark.parametrize("shape", IMAGES, ids=str)


@every_dtype
@every_image
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("shifted", [False, True], ids=["plain", "shifted"])
def test_group_norm_silu(shape: tuple[int, int, int, int], mean: float, shifted: bool, dtype: torch.dtype) -> None:
    """At least as near to the exact result as torch, which rounds twice, and once more where a bias is added before."""
    make = Maker("cuda", dtype)
    x = make.image(*shape, mean=mean)
    weight, bias = make.normal(shape[1], mean=1.0), make.normal(shape[1])
    shift = 3 * make.normal(shape[1]) if shifted else None
    with poisoned():
        found = kernels.group_norm_silu(x, 32, weight, bias, 1e-6, shift)
    exact = group_norm_silu_reference(x.double(), 32, weight.double(), bias.double(), 1e-6, None if shift is None else shift.double())
    torchs = group_norm_silu_reference(x, 32, weight, bias, 1e-6, shift)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found - exact).abs().max() <= 1.5 * (torchs - exact).abs().max() + 1e-5


@every_dtype
@pytest.mark.parametrize("shape", [*(shape for shape in IMAGES if shape[1] <= 160), (5, 256, 40, 64)], ids=str)
def test_group_norm_silu_conv(shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make = Maker("cuda", dtype)
    x, weight, bias = make.image(*shape), make.normal(shape[1], mean=1.0), make.normal(shape[1])
    last = make.image(3, shape[1], 3, 3) / shape[1] ** 0.5
    with poisoned():
        found = kernels.group_norm_silu_conv(x, 32, weight, bias, 1e-6, last, bias[:3])
    doubles = (weight.double(), bias.double(), 1e-6, last.double(), bias[:3].double())
    exact = group_norm_silu_conv_reference(x.double(), 32, *doubles)
    torchs = group_norm_silu_conv_reference(x, 32, weight, bias, 1e-6, last, bias[:3])
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found - exact).abs().max() <= 2 * (torchs - exact).abs().max() + 1e-5
    alone = kernels.group_norm_silu_conv(x[-1:].contiguous(memory_format=torch.channels_last), 32, weight, bias, 1e-6, last, bias[:3])
    assert (alone - found[-1:]).abs().max() <= (torchs - exact).abs().max() + 1e-5  # means of other shares differ in their last bit


@every_dtype
@every_image
def test_add_bias_residual(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    make = Maker("cuda", dtype)
    x, residual, bias, residual_bias = make.image(*shape), make.image(*shape, mean=2.0), make.normal(shape[1]), make.normal(shape[1])

    def added(x: Tensor, *others: Tensor) -> Tensor:
        return kernels.add_bias_residual_(x.clone(), *others)

    for others in ((bias,), (bias, residual), (bias, residual, residual_bias)):
        compare(added, add_bias_residual_reference, x, *others)


@every_dtype
@every_image
def test_add_bias_residual_sums(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """The sum is equal, and mean and scale are as accurate as a separate pass."""
    make = Maker("cuda", dtype)
    x, residual, bias, weight = make.image(*shape), make.image(*shape, mean=2.0), make.normal(shape[1]), make.normal(shape[1], mean=1.0)
    expected = kernels.add_bias_residual_(x.clone(), bias, residual, bias)
    with poisoned():
        sums = kernels.add_bias_residual_sums_(x, bias, residual, bias)
    assert torch.equal(x, expected)
    found, apart = (mean_and_scale(x, 32, weight, 1e-6, None, known) for known in (sums, None))
    torch.testing.assert_close(found, apart, rtol=1e-4, atol=1e-5)


@every_dtype
@every_image
def test_upsample_nearest(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x = Maker("cuda", dtype).image(*shape)
    with poisoned():
        found = kernels.upsample_nearest(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, upsample_nearest_reference(x))


def test_images_of_more_than_two_to_the_31_elements() -> None:
    """Offsets are 64-bit: the last rows equal a small image's."""
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB")
    x = Maker("cuda", torch.bfloat16).image(1, 256, 6, 2048)
    tall = x.repeat(1, 1, 700, 1).contiguous(memory_format=torch.channels_last)
    bias = torch.linspace(-1, 1, 256, device="cuda")
    assert torch.equal(kernels.upsample_nearest(tall)[:, :, -12:], kernels.upsample_nearest(x))
    assert torch.equal(kernels.add_bias_residual_(tall.clone(), bias, tall)[:, :, -6:], kernels.add_bias_residual_(x.clone(), bias, x))
    whole, part = (kernels.group_norm_silu(image, 32, bias, bias, 1e-6, bias)[:, :, -6:] for image in (tall, x))
    torch.testing.assert_close(whole, part, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("top_p", [0.0, 0.6, 0.97])
@pytest.mark.parametrize("tokens", [1, 3, 46 * 23, 4096])
def test_sample_bits(tokens: int, top_p: float) -> None:
    """Bit for bit, over two million draws at the largest stage: torch's exponentials, quotients and comparisons to the last bit."""
    make = Maker("cuda", torch.float32)
    logits = 3 * make.normal(16, tokens, 32, 2)
    logits[:, 0, 0] = 1.0
    noise = torch.empty(16, tokens, 32, 2, device="cuda").exponential_(generator=make.generator)
    with poisoned():
        found = kernels.sample_bits(logits, noise, top_p)
    assert torch.equal(found, sample(filter_logits(logits, 900, top_p), noise))


COUNTS = (1024, 205, 614, 1)  # tokens of four images, in two cfg branches


def packing(padding: int) -> VarlenLayout:
    count = torch.tensor(COUNTS, device="cuda")
    index = torch.arange(1024, device="cuda").expand(len(COUNTS), -1)
    return VarlenLayout.of(index, count, sum(COUNTS) + padding)


@pytest.mark.parametrize("padding", [0, 100])
def test_packed_rows_are_attended_as_padded_ones(padding: int) -> None:
    """Bit for bit: a row's queries meet the same keys in the same tiles."""
    make, packed = Maker("cuda", torch.bfloat16), packing(padding)
    q, both = make.normal(8, 1024, 16, 128), make.normal(8, 2521, 2, 16, 128)
    lengths = torch.tensor([1497 + count for count in COUNTS] * 2, dtype=torch.int32, device="cuda")
    expected = kernels.attend_lengths(q, both[:, :, 0], both[:, :, 1], lengths, 0.1)
    settings = {"cu_seqlens": packed.cu_seqlens, "longest": 1024}
    found = packed.unpack(kernels.attend_lengths(packed.pack(q), both[:, :, 0], both[:, :, 1], lengths, 0.1, **settings))
    for row in range(8):
        assert torch.equal(found[row, : COUNTS[row % 4]], expected[row, : COUNTS[row % 4]])


@pytest.mark.parametrize("padding", [0, 100])
def test_packed_rows_go_into_the_cache_as_padded_ones(padding: int) -> None:
    make, packed = Maker("cuda", torch.bfloat16), packing(padding)
    temperature, rotation = make.normal(16, dtype=torch.float32).exp(), make.rotation(1024, 128)
    qkv, start = make.normal(8, 1024, 3, 16, 128), torch.tensor([7, 1, 90, 3, 0, 5, 6, 2], dtype=torch.int32, device="cuda")
    index = torch.arange(1024, device="cuda").expand(8, -1)
    (keys, values), (ours, our_values) = torch.zeros(2, 2, 8, 1200, 16, 128, dtype=torch.bfloat16, device="cuda")
    q = kernels.rotate_into_cache(qkv, temperature, rotation, index, keys, values, start)
    layout = (packed.image, packed.place, packed.cu_seqlens)
    queries = kernels.rotate_into_cache(packed.pack(qkv), temperature, rotation, packed.cell[None], ours, our_values, start, packed=layout)
    for row in range(8):
        count, begin = COUNTS[row % 4], int(start[row])
        assert torch.equal(packed.unpack(queries)[row, :count], q[row, :count])
        for store, same in ((ours, keys), (our_values, values)):
            assert torch.equal(store[row, begin : begin + count], same[row, begin : begin + count])
            assert not store[row, begin + count :].any() and not store[row, :begin].any()


def test_packed_rows_are_normed_as_padded_ones() -> None:
    make, packed = Maker("cuda", torch.bfloat16), packing(100)
    x, update = make.normal(8, 1024, 2048), make.normal(8, 1024, 2048)
    scale, shift, gate = (make.rows(8, 2048) for _ in range(3))
    expected = kernels.residual_norm_modulate(x, gate, update, scale, shift)
    found = kernels.residual_norm_modulate(packed.pack(x), gate, packed.pack(update), scale, shift, image=packed.image)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, packed.pack(theirs))


def calls(make: Maker) -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Returns every kernel at a late stage, as a function of rows, and its inputs per row; other inputs are equal in all rows."""
    temperature, rotation = make.normal(16, dtype=torch.float32).exp(), make.rotation(1024, 128)
    x, update, index = make.normal(2, 1024, 2048), make.normal(2, 1024, 2048), make.selection(2, 1024, 614)
    fresh, memory, qkv = make.normal(2, 614, 2048), make.normal(2, 576, 2048), make.normal(2, 1024, 3, 16, 128)
    scale, shift, gate = (make.rows(2, 2048) for _ in range(3))
    logits, noise = make.normal(2, 1024, 32, 2, dtype=torch.float32), make.normal(2, 1024, 32, 2, dtype=torch.float32).exp()

    lengths = torch.tensor([1024, 700], dtype=torch.int32, device="cuda")
    image, residual = make.image(2, 256, 40, 24, mean=3.0), make.image(2, 256, 40, 24)
    weight, bias = torch.linspace(0.5, 1.5, 256, device="cuda"), torch.linspace(-1, 1, 256, device="cuda")

    def rotate(qkv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.zeros(2, qkv.shape[0], 2000, 16, 128, dtype=qkv.dtype, device="cuda")
        return kernels.rotate_into_cache(qkv, temperature, rotation, None, keys, values, 697), keys, values

    def restore(memory: Tensor, fresh: Tensor, index: Tensor, base: Tensor, gate: Tensor) -> Tensor:
        return kernels.restore_tokens(memory, MEMORY, (32, 32), fresh, index, base=base, gate=gate)

    return {
        "norm": (kernels.norm_modulate, [x, scale, shift, index]),
        "residual norm": (kernels.residual_norm_modulate, [x, gate, update, scale, shift]),
        "rotate": (rotate, [qkv]),
        "restore": (restore, [memory, fresh, index, x, gate]),
        "attention": (
            lambda q, kv, lengths: kernels.attend_lengths(q, kv, kv, lengths, 0.1),
            [fresh.view(2, 614, 16, 128), x.view(2, 1024, 16, 128), lengths],
        ),
        "attention, all rows alike": (
            lambda q, kv: kernels.attend_lengths(q, kv, kv, 700, 0.1),
            [fresh.view(2, 614, 16, 128), x.view(2, 1024, 16, 128)],
        ),
        "attention of unit queries": (
            lambda q, kv, lengths: kernels.attend_lengths(q, kv, kv, lengths, 0.1, unit=True),
            [fresh.view(2, 614, 16, 128), x.view(2, 1024, 16, 128), lengths],
        ),
        "mean": (kernels.mean_over_tokens, [x]),
        "distance": (kernels.distance_from_mean, [x, x.mean(dim=1, keepdim=True, dtype=torch.float32)]),
        "bits": (lambda logits, noise: kernels.sample_bits(logits, noise, 0.97), [logits, noise]),
        "largest": (lambda score: kernels.topk_indices_sorted(score, 614), [make.normal(2, 1024, dtype=torch.float32)]),
        "group norm": (lambda x: kernels.group_norm_silu(x, 32, weight, bias, 1e-6, bias), [image]),
        "bias and residual": (lambda x, residual: kernels.add_bias_residual_(x.clone(), bias, residual, weight), [image, residual]),
        "upsample": (kernels.upsample_nearest, [image]),
    }


NAMES = (
    "norm",
    "residual norm",
    "rotate",
    "restore",
    "attention",
    "attention, all rows alike",
    "attention of unit queries",
    "mean",
    "distance",
    "bits",
    "largest",
    "bias and residual",
    "upsample",
)


def several(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_depend_on_one_another_and_runs_repeat(name: str) -> None:
    call, inputs = calls(Maker("cuda", torch.bfloat16))[name]
    both, again = several(call(*inputs)), several(call(*inputs))
    for row in range(2):
        alone = several(call(*(value[row : row + 1] for value in inputs)))
        for first, second, single in zip(both, again, alone, strict=True):
            assert torch.equal(first, second) and torch.equal(first[row], single[0])


@pytest.mark.parametrize("name", [*NAMES, "group norm"])  # whose sums are split otherwise for another number of images
def test_kernels_can_be_captured(name: str) -> None:
    """After one run; the graph computes from what its inputs hold when it is replayed."""
    call, inputs = calls(Maker("cuda", torch.bfloat16))[name]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = several(call(*inputs))
    _, others = calls(Maker("cuda", torch.bfloat16, seed=1))[name]
    for value, other in zip(inputs, others, strict=True):
        value.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    for found, expected in zip(captured, several(call(*inputs)), strict=True):
        assert torch.equal(found, expected)
