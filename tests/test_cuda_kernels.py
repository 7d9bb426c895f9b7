"""The kernels on a GPU, at the sizes of the models. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale import kernels

from .kernel_cases import DTYPES, Maker, compare, compare_rotation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if torch.cuda.is_available():
    pytest.importorskip("triton")
    from nextscale.kernels.distance import distance_from_mean_reference
    from nextscale.kernels.norm import norm_modulate_reference, residual_norm_modulate_reference
    from nextscale.kernels.restore import restore_tokens_reference
    from nextscale.kernels.rotate import rotate_into_cache_reference


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
    """With a gain as after self-attention, without and with a learned norm as around the text."""
    make = Maker("cuda", dtype)
    rows, _, channels = shape
    gain = make.rows(rows, channels) if gained else None
    scale, shift = (make.rows(rows, channels, 1), make.rows(rows, channels)) if gained else (make.normal(channels), make.normal(channels))
    inputs = make.wide(*shape), gain, make.wide(*shape), scale, shift
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
    for extra in ({}, {"base": make.wide(2, tokens, channels), "gain": make.rows(2, channels)}):
        compare(kernels.restore_tokens, restore_tokens_reference, memory, MEMORY, grid, fresh, index, **extra)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_distance_from_mean(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = Maker("cuda", dtype).wide(*shape)
    compare(kernels.distance_from_mean, distance_from_mean_reference, x, x.mean(dim=1, keepdim=True, dtype=torch.float32) + 0.1)


def calls(make: Maker) -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Every kernel at a late stage, as a function of rows, and what it takes per row; with all other inputs alike in all rows."""
    temperature, rotation = make.normal(16, dtype=torch.float32).exp(), make.rotation(1024, 128)
    x, update, index = make.normal(2, 1024, 2048), make.normal(2, 1024, 2048), make.selection(2, 1024, 614)
    fresh, memory, qkv = make.normal(2, 614, 2048), make.normal(2, 576, 2048), make.normal(2, 1024, 3, 16, 128)
    scale, shift, gain = (make.rows(2, 2048) for _ in range(3))

    def rotate(qkv: Tensor) -> tuple[Tensor, ...]:
        keys, values = torch.zeros(2, qkv.shape[0], 2000, 16, 128, dtype=qkv.dtype, device="cuda")
        return kernels.rotate_into_cache(qkv, temperature, rotation, None, keys, values, 697), keys, values

    def restore(memory: Tensor, fresh: Tensor, index: Tensor, base: Tensor, gain: Tensor) -> Tensor:
        return kernels.restore_tokens(memory, MEMORY, (32, 32), fresh, index, base=base, gain=gain)

    return {
        "norm": (kernels.norm_modulate, [x, scale, shift, index]),
        "residual norm": (kernels.residual_norm_modulate, [x, gain, update, scale, shift]),
        "rotate": (rotate, [qkv]),
        "restore": (restore, [memory, fresh, index, x, gain]),
        "distance": (kernels.distance_from_mean, [x, x.mean(dim=1, keepdim=True, dtype=torch.float32)]),
    }


NAMES = ("norm", "residual norm", "rotate", "restore", "distance")


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


@pytest.mark.parametrize("name", NAMES)
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
