"""The kernels against plain torch, under Triton's interpreter where there is no GPU: small and odd shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from nextscale import kernels
from nextscale.accel.select import distance_from_mean, row_mean
from nextscale.cache import StageMemory
from nextscale.models.blocks import unit_vectors
from nextscale.models.rope import PairRope
from nextscale.stage import Stage, Tokens

from .kernel_cases import DTYPES, Maker, compare, compare_rotation, round_to_bfloat16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        # Read when Triton is imported, which torch may have done already; put back, since other tests shall not meet it.
        patch.setenv("TRITON_INTERPRET", "1")
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
            del sys.modules[name]
    pytest.importorskip("triton")
    from nextscale.kernels.distance import distance_from_mean_reference
    from nextscale.kernels.norm import norm_modulate_reference, residual_norm_modulate_reference
    from nextscale.kernels.restore import restore_tokens_reference, widest_window
    from nextscale.kernels.rotate import rotate_into_cache_reference


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setenv("TRITON_INTERPRET", "1")
        round_to_bfloat16(interpreter, monkeypatch)
    with torch.no_grad():
        yield


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = [(1, 1, 64), (2, 3, 120), (3, 7, 130), (2, 2, 2080)]  # rows, tokens, channels


# --- norms


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_modulate(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    rows, _, channels = shape
    compare(kernels.norm_modulate, norm_modulate_reference, make.wide(*shape), make.rows(rows, channels, 1), make.rows(rows, channels))


@every_dtype
def test_norm_modulate_gathers_the_kept_tokens(dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    index = make.selection(3, 11, 5)
    index[1, 3:] = index[1, 2]  # padding repeats the last
    for places in (index, index.int()):
        compare(kernels.norm_modulate, norm_modulate_reference, make.wide(3, 11, 120), make.rows(3, 120, 1), make.rows(3, 120), places)


def test_norm_modulate_of_any_layout() -> None:
    """Channels that are not side by side, one modulation for all rows, a learned norm's weight and bias, and a constant token."""
    make = Maker(DEVICE, torch.float32)
    x = make.normal(2, 120, 5).mT
    x[0, 1] = 3.0
    for scale, shift in (
        (make.rows(2, 120, 1), make.rows(2, 120)),
        (make.rows(1, 120, 1), make.rows(1, 120).expand(2, 1, 120)),
        (make.normal(120), make.normal(120)),
        (make.normal(2, 120, 1).mT, make.normal(2, 120, 1).mT),
    ):
        compare(kernels.norm_modulate, norm_modulate_reference, x, scale, shift)


def test_norm_is_that_of_a_large_offset() -> None:
    """Statistics are taken about the mean: the square of the mean would swallow the variance."""
    make = Maker(DEVICE, torch.float32)
    compare(kernels.norm_modulate, norm_modulate_reference, make.normal(1, 3, 120) + 1000, make.rows(1, 120, 1), make.rows(1, 120))


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gained", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_residual_norm_modulate(shape: tuple[int, int, int], dtype: torch.dtype, gained: bool, learned: bool) -> None:
    make = Maker(DEVICE, dtype)
    rows, _, channels = shape
    gain = make.rows(rows, channels) if gained else None
    scale, shift = (make.normal(channels), make.normal(channels)) if learned else (make.rows(rows, channels, 1), make.rows(rows, channels))
    inputs = make.wide(*shape), gain, make.wide(*shape), scale, shift
    compare(kernels.residual_norm_modulate, residual_norm_modulate_reference, *inputs)


def test_norms_refuse_what_does_not_fit() -> None:
    make = Maker(DEVICE, torch.float32)
    x, scale = make.normal(2, 3, 64), make.rows(2, 64)
    with pytest.raises(ValueError, match="R = 2 and C = 64; got \\[3, 1, 64\\]"):
        kernels.norm_modulate(x, make.rows(3, 64), scale)
    with pytest.raises(ValueError, match="update is \\[2, 4, 64\\]"):
        kernels.residual_norm_modulate(x, None, make.normal(2, 4, 64), scale, scale)
    with pytest.raises(ValueError, match="index is \\[R, K\\]"):
        kernels.norm_modulate(x, scale, scale, torch.zeros(1, 2, dtype=torch.long, device=DEVICE))


# --- queries, keys and values

ROTATIONS = (kernels.rotate_into_cache, rotate_into_cache_reference)


@every_dtype
@pytest.mark.parametrize("heads, head_dim", [(1, 64), (3, 96), (2, 104), (5, 128), (4, 2)])
def test_rotate_into_cache(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    qkv, temperature = make.normal(2, 3, 3, heads, head_dim), make.normal(heads, 1, dtype=torch.float32).exp()
    compare_rotation(ROTATIONS, 9, qkv, temperature, make.rotation(3, head_dim), None, start=4)


@every_dtype
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_rotate_into_cache_of_some_tokens_of_ragged_rows(normalised: bool, turned: bool, dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    qkv = make.normal(3, 8, 3, 3, 24)[:, 2:7]  # not contiguous
    temperature = make.normal(3, dtype=torch.float32).exp() if normalised else None
    rotation = make.rotation(12, 24) if turned else None
    starts = torch.tensor([0, 7, 3], device=DEVICE)
    compare_rotation(ROTATIONS, 12, qkv, temperature, rotation, make.selection(3, 12, 5), start=starts)


def test_rotation_is_that_of_the_models() -> None:
    """Against unit_vectors and PairRope themselves; a vector of zeros stays one."""
    make = Maker(DEVICE, torch.float32)
    qkv, temperature, rotation = make.normal(2, 6, 3, 2, 16), make.normal(2, 1).exp(), make.rotation(6, 16)
    qkv[0, 0] = 0
    turned = PairRope([rotation]).turn(unit_vectors(qkv[:, :, :2]), Tokens(Stage(0, 2, 3, start=0, last=False)))
    keys, values = torch.empty(2, 2, 6, 2, 16, device=DEVICE)
    q = kernels.rotate_into_cache(qkv, temperature, rotation, None, keys, values, 0)
    torch.testing.assert_close(q, turned[:, :, 0] * temperature)
    torch.testing.assert_close(keys, turned[:, :, 1])
    assert torch.equal(values, qkv[:, :, 2])


def test_rotate_refuses_what_does_not_fit() -> None:
    make = Maker(DEVICE, torch.float32)
    qkv, keys = make.normal(2, 3, 3, 2, 16), make.normal(2, 5, 2, 16)
    with pytest.raises(ValueError, match="3 tokens from 3 on do not fit into 5"):
        kernels.rotate_into_cache(qkv, None, None, None, keys, keys.clone(), 3)
    with pytest.raises(ValueError, match="rotation is complex64 \\[cells, 8\\]"):
        kernels.rotate_into_cache(qkv, None, make.rotation(3, 12), None, keys, keys.clone(), 0)
    with pytest.raises(ValueError, match="written in place"):
        kernels.rotate_into_cache(qkv, None, None, None, make.normal(2, 5, 16, 2).mT, keys, 0)


# --- restoration


@every_dtype
@pytest.mark.parametrize("size, grid", [((1, 1), (3, 2)), ((3, 4), (5, 4)), ((2, 3), (4, 6)), ((3, 3), (4, 5)), ((5, 4), (2, 3))])
@pytest.mark.parametrize("added", [True, False])
def test_restore_tokens(size: tuple[int, int], grid: tuple[int, int], added: bool, dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    tokens = grid[0] * grid[1]
    index = make.selection(2, tokens, tokens // 2)
    memory, fresh = make.wide(2, size[0] * size[1], 120), make.wide(2, tokens // 2, 120)
    extra = {"base": make.wide(2, tokens, 120), "gain": make.rows(2, 120)} if added else {}
    compare(kernels.restore_tokens, restore_tokens_reference, memory, size, grid, fresh, index, **extra)


@pytest.mark.parametrize("kept", [1, 2, 7, 8, 12])
def test_restore_finds_every_token(kept: int) -> None:
    """Of any number: what is fresh is 1, what is remembered 0."""
    index = Maker(DEVICE, torch.float32).selection(2, 12, kept)
    memory, fresh = torch.zeros(2, 4, 8, device=DEVICE), torch.ones(2, kept, 8, device=DEVICE)
    out = kernels.restore_tokens(memory, (2, 2), (3, 4), fresh, index)
    assert torch.equal(out[..., 0], torch.zeros(2, 12, device=DEVICE).scatter(1, index, 1.0))


def test_restore_of_a_part_of_the_grid_with_padding() -> None:
    """Tokens that lie anywhere on the grid; an index whose tail repeats its last entry."""
    make = Maker(DEVICE, torch.float32)
    cells, index, fresh = make.selection(2, 20, 9), make.selection(2, 9, 4), make.normal(2, 4, 24)
    index[0, 2:], fresh[0, 2:] = index[0, 1], fresh[0, 1]
    settings = {"base": make.normal(2, 9, 24), "cells": cells}
    compare(kernels.restore_tokens, restore_tokens_reference, make.normal(2, 6, 24), (2, 3), (4, 5), fresh, index, **settings)


def test_restoration_is_that_of_the_stage_memory() -> None:
    make = Maker(DEVICE, torch.float32)
    memory, first, second = StageMemory(), Stage(0, 3, 4, start=0, last=False), Stage(1, 5, 6, start=12, last=True)
    y, fresh, index = make.normal(2, 12, 16), make.normal(2, 11, 16), make.selection(2, 30, 11)
    memory.store("key", y, Tokens(first))
    expected = memory.fill("key", Tokens(second)).scatter(1, index[..., None].expand(-1, -1, 16), fresh)
    torch.testing.assert_close(kernels.restore_tokens(y, first.size, second.size, fresh, index), expected)


def test_windows_of_area_resizing() -> None:
    assert [widest_window(24, side) for side in (24, 32, 40, 48, 12, 7)] == [1, 2, 2, 1, 2, 5]


# --- scores


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_distance_from_mean(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    x = make.wide(*shape)
    compare(kernels.distance_from_mean, distance_from_mean_reference, x, x.mean(dim=1, keepdim=True, dtype=torch.float32) + 0.1)


def test_distance_is_that_of_the_methods() -> None:
    x = Maker(DEVICE, torch.bfloat16).normal(2, 6, 120, mean=0.5)
    for count in (None, torch.tensor([6, 4], device=DEVICE)):
        index = None if count is None else torch.arange(6, device=DEVICE).expand(2, -1)
        tokens = Tokens(Stage(0, 2, 3, start=0, last=True), index, count)
        torch.testing.assert_close(kernels.distance_from_mean(x, row_mean(x, tokens)), distance_from_mean(x, tokens))


# --- where they can be used


def test_available(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, device=DEVICE)
    assert kernels.available(x) and kernels.available(x.bfloat16())
    assert not kernels.available(x.double()) and not kernels.available(x.long())
    with torch.enable_grad():
        assert not kernels.available(x)  # they have no gradient
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.available(torch.zeros(1))


def test_the_package_does_not_need_triton() -> None:
    """In a fresh interpreter that has none, everything but the kernels works, and they say that they cannot."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, nextscale\n"
        "from nextscale import kernels\n"
        "with torch.no_grad(): assert not kernels.available(torch.zeros(1))\n"
        "assert not any(name.startswith('nextscale.kernels.') for name in sys.modules), 'kernels are loaded before they are used'\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kernels.nothing
