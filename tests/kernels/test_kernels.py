"""Kernels compared with torch, for small and odd shapes; in Triton's interpreter without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale import FastVAR, Method, Pipeline, SparseVAR, StagePlan, StageVAR, kernels
from nextscale.cache import LayerCache, StageMemory
from nextscale.cache.attention import attend, unit_queries, unit_vectors
from nextscale.guidance import ConstantGuidance, Guidance
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import ModelSpec
from nextscale.methods import Plans
from nextscale.methods.token_ops import distance_from_mean, row_mean
from nextscale.models import NextScaleModel, VarConfig
from nextscale.models.blocks import Block, run_in_order
from nextscale.models.rope import InterleavedRope
from nextscale.sampling import ImageRng, Sampling, choose, filter_logits, sample
from nextscale.stage import Schedule, Stage, Tokens
from nextscale.text.prompts import Labels
from tests.cache.test_cache import fill_memory
from tests.helpers import tiny
from tests.helpers.kernel_cases import (
    DEVICE,
    DTYPES,
    Maker,
    compare,
    compare_rotation,
    exact,
    interpreted_as_on_a_gpu,
    poisoned,
    require_close,
    triton_interpreter,
)
from tests.methods.test_method import KeepShare

triton_interpreter()  # before the kernels are imported

from nextscale.kernels import distance  # noqa: E402
from nextscale.kernels.attention import Tile, attend_lengths_reference  # noqa: E402
from nextscale.kernels.bits import sample_bits_reference  # noqa: E402
from nextscale.kernels.distance import distance_from_mean_reference, mean_over_tokens_reference  # noqa: E402
from nextscale.kernels.norm import norm_modulate_reference, residual_norm_modulate_reference  # noqa: E402
from nextscale.kernels.reference import Int8Tokens, dequantize_tokens_reference, quantize_tokens_reference  # noqa: E402
from nextscale.kernels.restore import restore_tokens_reference, widest_window  # noqa: E402
from nextscale.kernels.rotate import rotate_into_cache_reference  # noqa: E402
from nextscale.kernels.topk import topk_indices_sorted_reference  # noqa: E402


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreted_as_on_a_gpu():
        yield


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
SHAPES = [(1, 1, 64), (2, 3, 120), (3, 7, 130), (2, 2, 2080)]  # rows, tokens, channels


# --- attention


@pytest.mark.parametrize("tile", [None, (16, 16, 4, 2), (64, 32, 4, 1)])
@pytest.mark.parametrize(
    ("queries", "room", "heads", "channels", "lengths"),
    [(1, 1, 1, 128, (1,)), (5, 70, 2, 64, (70, 3)), (130, 200, 3, 24, (1, 64, 200)), (17, 65, 2, 16, (65, 64)), (3, 150, 1, 136, (150, 9))],
)
def test_attend_lengths(
    queries: int,
    room: int,
    heads: int,
    channels: int,
    lengths: tuple[int, ...],
    tile: tuple[int, int, int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values are interleaved, as for prompts; entries beyond a row's length are not read."""
    dtype = torch.float16  # the interpreter takes the bits of bfloat16 for numbers when it multiplies matrices
    make, rows = Maker(DEVICE, dtype), len(lengths)
    q, both = make.normal(rows, queries, heads, channels), make.normal(rows, room, 2, heads, channels)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    beyond = torch.arange(room, device=DEVICE) >= on_device[:, None]
    both[beyond] = float("nan")
    if tile is not None:
        monkeypatch.setattr("nextscale.kernels.attention.tile_for", lambda *_: Tile(*tile))
    with poisoned():
        found = kernels.attend_lengths(q, both[:, :, 0], both[:, :, 1], on_device, 0.3)
    truth = attend_lengths_reference(q.double(), both[:, :, 0].double(), both[:, :, 1].double(), on_device, 0.3)
    assert found.dtype == dtype and found.shape == truth.shape
    bound = torch.finfo(dtype).eps * both[~beyond].abs().max().item()  # weights and result are rounded, one each
    assert (found.double() - truth).abs().max().item() <= bound
    one = (q[:1], both[:1, :, 0], both[:1, :, 1])
    alone = kernels.attend_lengths(*one, lengths[0], 0.3)  # as a number
    assert (alone.double() - truth[:1]).abs().max().item() <= bound
    if tile is not None:  # else chosen by the room, or by the length
        assert torch.equal(alone, found[:1])


def test_attention_of_unit_queries() -> None:
    """Made unit vectors and rounded as in a pass of their own: bit for bit what attention makes of those; packed ones too."""
    make = Maker(DEVICE, torch.float16)
    q, both = make.normal(2, 17, 2, 24), make.normal(2, 70, 2, 2, 24)
    q[0, 3] = 0
    units = unit_queries(q)
    assert units.isfinite().all() and not units[0, 3].any()
    given = both[:, :, 0], both[:, :, 1], torch.tensor([70, 9], dtype=torch.int32, device=DEVICE), 0.3
    assert torch.equal(kernels.attend_lengths(q, *given, unit=True), kernels.attend_lengths(units, *given))
    starts = torch.tensor([0, 5, 17], dtype=torch.int32, device=DEVICE)
    packed = {"cu_seqlens": starts, "longest": 12}
    assert torch.equal(kernels.attend_lengths(q[:1], *given, unit=True, **packed), kernels.attend_lengths(units[:1], *given, **packed))
    exact = attend_lengths_reference(q, *given, unit=True)
    torch.testing.assert_close(kernels.attend_lengths(q, *given, unit=True), exact, rtol=0, atol=4e-3)


@pytest.mark.parametrize("lengths", [(70, 3, 64, 64, 1, 9), 70])
@pytest.mark.parametrize("counts", [(5, 1, 130), (17, 65, 2)])
def test_attend_lengths_of_packed_rows(counts: tuple[int, ...], lengths: tuple[int, ...] | int) -> None:
    """Packs the queries of three images in two CFG branches; output after the last query is not written."""
    make, images = Maker(DEVICE, torch.float16), len(counts)
    q, both = make.normal(2, sum(counts) + 3, 2, 24), make.normal(2 * images, 70, 2, 2, 24)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)
    known = lengths if isinstance(lengths, int) else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    for longest in (max(counts), 200):
        found = kernels.attend_lengths(q, both[:, :, 0], both[:, :, 1], known, 0.3, cu_seqlens=starts, longest=longest)
        truth = attend_lengths_reference(q.double(), both[:, :, 0].double(), both[:, :, 1].double(), known, 0.3, cu_seqlens=starts)
        assert found.shape == truth.shape
        real = slice(0, sum(counts))
        assert (found[:, real].double() - truth[:, real]).abs().max().item() <= torch.finfo(q.dtype).eps * both.abs().max().item()
        for row in range(2 * images):
            branch, image = divmod(row, images)
            own = slice(int(starts[image]), int(starts[image + 1]))
            length = known if isinstance(known, int) else known[row : row + 1]
            alone = kernels.attend_lengths(q[branch, None, own], both[row, None, :, 0], both[row, None, :, 1], length, 0.3)
            assert torch.equal(alone[0], found[branch, own])


def test_attend_lengths_refuses_what_does_not_fit() -> None:
    make = Maker(DEVICE, torch.float16)
    q, keys, lengths = make.normal(2, 3, 2, 16), make.normal(2, 9, 2, 16), torch.ones(2, dtype=torch.int32, device=DEVICE)
    for given in ((q, keys[:1], keys, lengths), (q, keys, keys[:, :8], lengths), (q, keys, keys, lengths[:1])):
        with pytest.raises(ValueError, match="must have shape"):
            kernels.attend_lengths(*given, 1.0)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("centered", [True, False])
def test_norms_that_are_not_modulated(centered: bool, dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    for scale, shift in ((None, None), (make.normal(130, mean=1), None), (None, make.rows(2, 130))):
        x, update = make.wide(2, 3, 130), make.wide(2, 3, 130)
        compare(kernels.norm_modulate, norm_modulate_reference, x, scale, shift, centered=centered)
        compare(kernels.residual_norm_modulate, residual_norm_modulate_reference, x, None, update, scale, shift, centered=centered)


def test_a_norm_in_another_dtype_rounds_only_there() -> None:
    make = Maker(DEVICE, torch.bfloat16)
    inputs = make.wide(2, 3, 120), make.rows(2, 120, 1).float(), make.rows(2, 120).float()
    compare(kernels.norm_modulate, norm_modulate_reference, *inputs, dtype=torch.float32)


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
    gate = make.rows(rows, channels) if gained else None
    scale, shift = (make.normal(channels), make.normal(channels)) if learned else (make.rows(rows, channels, 1), make.rows(rows, channels))
    inputs = make.wide(*shape), gate, make.wide(*shape), scale, shift
    compare(kernels.residual_norm_modulate, residual_norm_modulate_reference, *inputs)


@every_dtype
@pytest.mark.parametrize("learned", [True, False])
def test_norms_of_packed_rows_take_the_modulation_of_every_image(dtype: torch.dtype, learned: bool) -> None:
    make, image = Maker(DEVICE, dtype), torch.tensor([0, 0, 1, 2, 2, 2, 2], device=DEVICE)
    scale, shift = (make.normal(120), make.normal(120)) if learned else (make.rows(6, 120, 1), make.rows(6, 120))
    compare(kernels.norm_modulate, norm_modulate_reference, make.wide(2, 7, 120), scale, shift, image=image)
    for gate in (make.rows(6, 120), None):
        inputs = make.wide(2, 7, 120), gate, make.wide(2, 7, 120), scale, shift
        compare(kernels.residual_norm_modulate, residual_norm_modulate_reference, *inputs, image=image)


def test_norms_refuse_what_does_not_fit() -> None:
    make = Maker(DEVICE, torch.float32)
    x, scale = make.normal(2, 3, 64), make.rows(2, 64)
    with pytest.raises(RuntimeError, match="expanded size"):
        kernels.norm_modulate(x, make.rows(3, 64), scale)
    with pytest.raises(ValueError, match="update must have shape"):
        kernels.residual_norm_modulate(x, None, make.normal(2, 4, 64), scale, scale)
    with pytest.raises(ValueError, match="index must have shape"):
        kernels.norm_modulate(x, scale, scale, torch.zeros(1, 2, dtype=torch.long, device=DEVICE))
    with pytest.raises(ValueError, match="image must have shape"):
        kernels.norm_modulate(x, scale, scale, image=torch.zeros(2, dtype=torch.long, device=DEVICE))


# --- queries, keys and values

ROTATIONS = (kernels.rotate_into_cache, rotate_into_cache_reference)


@every_dtype
@pytest.mark.parametrize("heads, head_dim", [(1, 64), (3, 96), (2, 104), (5, 128), (4, 2)])
def test_rotate_into_cache(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    qkv, temperature = make.normal(2, 3, 3, heads, head_dim), make.normal(heads, 1, dtype=torch.float32).exp()
    compare_rotation(ROTATIONS, 9, qkv, temperature, make.rotation(3, head_dim), None, start=4)


@every_dtype
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_rotate_into_cache_of_some_tokens_of_ragged_rows(normalized: bool, turned: bool, dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    qkv = make.normal(3, 8, 3, 3, 24)[:, 2:7]  # not contiguous
    temperature = make.normal(3, dtype=torch.float32).exp() if normalized else None
    rotation = make.rotation(12, 24) if turned else None
    starts = torch.tensor([0, 7, 3], device=DEVICE)
    compare_rotation(ROTATIONS, 12, qkv, temperature, rotation, make.selection(3, 12, 5), start=starts)


@every_dtype
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_rotate_into_cache_of_packed_rows(normalized: bool, turned: bool, dtype: torch.dtype) -> None:
    """Two cfg branches of images with 1, 3 and 2 tokens; the last two entries are padding, which goes nowhere."""
    make = Maker(DEVICE, dtype)
    image, place = (torch.tensor(numbers, device=DEVICE) for numbers in ([0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 1, 2, 0, 1, 1, 1]))
    packed = image, place, torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=DEVICE)
    qkv = make.normal(2, 11, 3, 3, 24)[:, 2:10]  # not contiguous
    temperature = make.normal(3, dtype=torch.float32).exp() if normalized else None
    rotation = make.rotation(12, 24) if turned else None
    starts, index = torch.tensor([0, 7, 3, 5, 1, 2], dtype=torch.int32, device=DEVICE), make.selection(1, 12, 8)

    def run(function: Callable[..., Tensor], of: Callable[[Any], Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys, values = (torch.full((6, 12, 3, 24), -77.0, device=DEVICE, dtype=dtype) for _ in range(2))
        given = (of(qkv), of(temperature), of(rotation), index, keys, values, starts)
        return function(*given, packed=packed)[:, :6], keys, values

    found, theirs = (run(function, lambda value: value, dtype) for function in ROTATIONS)
    truth = run(rotate_into_cache_reference, exact, torch.float64)
    require_close(found, theirs, truth)
    assert torch.equal(found[1] == -77, theirs[1] == -77)
    written = (found[2] != -77).flatten(2).any(dim=2).sum(dim=1)
    assert written.tolist() == [1, 3, 2, 1, 3, 2]


@every_dtype
@pytest.mark.parametrize("heads, head_dim", [(1, 64), (3, 96), (5, 104), (2, 6)])
@pytest.mark.parametrize("ragged", [False, True])
def test_tokens_in_8_bits_and_back(heads: int, head_dim: int, ragged: bool, dtype: torch.dtype) -> None:
    """A quotient halfway between two codes may round to either; everything else is equal."""
    make = Maker(DEVICE, dtype)
    keys, values = make.normal(2, 2, 9, heads, head_dim)[:, :, 1:8]
    keys[1, 3] = 0
    start = torch.tensor([3, 0], dtype=torch.int32, device=DEVICE) if ragged else 2

    def stored(function: Callable[..., None]) -> Int8Tokens:
        numbers = torch.full((2, 3, 11, heads, head_dim), 99, dtype=torch.int8, device=DEVICE)[:, 1:]
        store = Int8Tokens(*numbers, *torch.full((2, 2, 11, heads), -7.0, device=DEVICE))
        function(keys, values, start, 4, store)
        return store

    ours, theirs = stored(kernels.quantize_tokens), stored(quantize_tokens_reference)
    for (mine, scales), (expected, expected_scales) in zip(ours.pairs, theirs.pairs, strict=True):
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        assert (mine.int() - expected.int()).abs().max() <= 1
        assert (mine != expected).double().mean() < 0.01
    with poisoned():
        found = torch.empty(2, 2, 8, heads, head_dim, dtype=dtype, device=DEVICE)
        kernels.dequantize_tokens(theirs, *found)
    expected = torch.empty_like(found)
    dequantize_tokens_reference(theirs, *expected)
    assert torch.equal(found, expected)
    kernels.dequantize_tokens(theirs, *found[:, :, :0])


def test_rotation_is_that_of_the_models() -> None:
    """Against unit_vectors and PairRope themselves; a vector of zeros stays one."""
    make = Maker(DEVICE, torch.float32)
    qkv, temperature, rotation = make.normal(2, 6, 3, 2, 16), make.normal(2, 1).exp(), make.rotation(6, 16)
    qkv[0, 0] = 0
    turned = InterleavedRope([rotation]).apply_rotary(unit_vectors(qkv[:, :, :2]), Tokens(Stage(0, 2, 3, start=0, last=False)))
    keys, values = torch.empty(2, 2, 6, 2, 16, device=DEVICE)
    q = kernels.rotate_into_cache(qkv, temperature, rotation, None, keys, values, 0)
    torch.testing.assert_close(q, turned[:, :, 0] * temperature)
    torch.testing.assert_close(keys, turned[:, :, 1])
    assert torch.equal(values, qkv[:, :, 2])


# --- blocks in a row


def with_chunk_starts(spec: ModelSpec) -> ModelSpec:
    return replace(spec, model=replace(spec.model, chunks=tiny.DEPTH, level_every_chunk=True))  # type: ignore[type-var]


def with_few_cells(spec: ModelSpec) -> ModelSpec:
    """Reduces the cells, because the interpreter takes as long per token as a model of this size per image. VAR's stages are square."""
    if isinstance(spec.model, VarConfig):
        model, schedule = replace(spec.model, sides=(1, 2, 3)), Schedule((1, 2, 3))
        return replace(spec, model=model, settings=replace(spec.settings, schedules=tiny.OneSchedule(schedule)))
    return replace(spec, settings=replace(spec.settings, schedules=tiny.OneSchedule(Schedule(((1, 1), (1, 2), (1, 3), (2, 2))))))


def counted(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls, kernel = [], getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *given, **settings: calls.append(name) or kernel(*given, **settings))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("spec", "chains", "parts"),
    [
        (tiny.SPECS["var"], 1, 2),
        (tiny.SPECS["infinity"], 1, 3),
        (with_chunk_starts(tiny.SPECS["infinity"]), tiny.DEPTH, 3),  # each adds to the output of the previous block
        (tiny.SPECS["hart"], 1, 2),  # root-mean-square norms
        (tiny.SPECS["star"], 1, 3),  # neither gains nor learned norms
    ],
    ids=["var", "infinity", "chunk starts", "hart", "star"],
)
def test_blocks_in_a_row_are_one_block_after_another(
    spec: ModelSpec, chains: int, parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum between two blocks is rounded as if it stood alone: in half precision, whose products float32 holds, bit for bit."""
    family = spec.name.removeprefix("tiny-")
    pipe, schedule = random_pipeline(spec, device=DEVICE, dtype=dtype), tiny.schedule_of(family)
    prompts = Labels(torch.tensor([1, 2])) if family == "var" else tiny.text_features(family, (3, 5)).to(DEVICE)
    conditions = [pipe.model.condition(prompts, False, schedule) for _ in ("one by one", "in order")]
    envs = [tiny.dense_env(pipe.model, condition, schedule, 2) for condition in conditions]
    norms, sums = counted("norm_modulate", monkeypatch), counted("residual_norm_modulate", monkeypatch)
    for stage in schedule.stages[:2]:
        start = Maker(DEVICE, dtype).normal(2, stage.cells, tiny.WIDTH) if stage.index else pipe.model.embed(None, stage, envs[0])
        x, tokens = pipe.model.with_text(start, Tokens(stage), envs[0])
        expected = x
        for block in pipe.model.stack:
            expected = block(expected, tokens, envs[0])
        norms.clear(), sums.clear()
        found = run_in_order(pipe.model.stack, x, tokens, envs[1])
        assert (len(norms), len(sums)) == (chains, parts and parts * tiny.DEPTH - chains)
        bound = 1e-5 if dtype == torch.float32 else 0.0
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
        assert not torch.equal(found, x)


def eager_pipeline(family: str, dtype: torch.dtype) -> Pipeline:
    """Returns a random pipeline that captures nothing on a GPU, where a second call would launch its kernels twice."""
    pipe = random_pipeline(with_few_cells(tiny.SPECS[family]), device=DEVICE, dtype=dtype)
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, engine="eager")


class Tap(Method):
    """Watches the first block."""

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return (StagePlan(observed=(0,)),) * len(schedule)


@pytest.mark.parametrize(
    ("method", "guidance", "joints"),
    [
        (Method(), None, (2, 2, 2, 2)),
        (Tap(), None, (1, 1, 1, 1)),
        (Method(), ConstantGuidance(logits=False, layers=(1,), strength=3.0), (1, 1, 1, 1)),
        (StageVAR(groups=2, ranks=0.5, guidance_off=2), None, (2, 2, 1, 1)),
    ],
    ids=["dense", "tap", "guided inside", "stagevar"],
)
def test_images_of_blocks_in_a_row(
    method: Method, guidance: Guidance | None, joints: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are joined in every stage, except where something else reads or changes hidden states."""
    pipe = eager_pipeline("infinity", torch.bfloat16)
    prompts = tiny.prompts("infinity", 1)
    sums = counted("residual_norm_modulate", monkeypatch)
    chained, fused = pipe(prompts, seed=1, method=method, guidance=guidance), len(sums)
    monkeypatch.setattr(Block, "changes_input", True)
    tiny.assert_same_bits(chained, pipe(prompts, seed=1, method=method, guidance=guidance))
    assert fused - (len(sums) - fused) == sum(joints)


def attend_lengths_row_by_row(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, unit: bool = False, **others: object
) -> Tensor:
    assert not unit  # Infinity's queries are as they are
    rows = zip(q[:, None], keys[:, None], values[:, None], lengths.tolist(), strict=True)
    return torch.cat([attend(query, key[:, :end], value[:, :end], None, scale) for query, key, value, end in rows])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has such attention of its own: see test_cuda_engine")
def test_attention_by_lengths_leaves_tails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that keep different numbers of tokens equal masked attention, and tails are not cleared."""
    fill_memory(monkeypatch, float("nan"))
    pipe, prompts = random_pipeline(with_few_cells(tiny.SPECS["infinity"])), tiny.prompts("infinity", 2)
    masked = pipe(prompts, seed=1, method=KeepShare((0.4, 0.9)), greedy=True)
    for owner in ("cache", "models"):
        monkeypatch.setattr(f"nextscale.{owner}.attention.reads_lengths", lambda x: True)
    monkeypatch.setattr(kernels, "attend_lengths", attend_lengths_row_by_row)
    monkeypatch.setattr(LayerCache, "_clear_tail", None)
    tiny.assert_close("infinity", pipe(prompts, seed=1, method=KeepShare((0.4, 0.9)), greedy=True), masked)


@pytest.mark.parametrize("family", ["var", "infinity"])
@pytest.mark.parametrize("method", [Method(), FastVAR(), StageVAR(ranks=0.177)], ids=["dense", "fastvar", "stagevar"])
def test_images_of_the_kernels_are_those_of_plain_torch(family: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers and codes are equal, so only float32 rounding differs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions with ten bits of mantissa differ by 1.5e-3
    pipe, prompts = eager_pipeline(family, torch.float32), tiny.prompts(family, 1)
    launched = counted("norm_modulate", monkeypatch)
    ours = pipe(prompts, seed=1, method=method)
    assert launched
    monkeypatch.setattr(kernels, "available", lambda tensor: False)
    plain = pipe(prompts, seed=1, method=method)
    if DEVICE == "cuda" and isinstance(method, FastVAR):  # near ties of distances: 0 to 4 of 48 bits of the last stage on an H200
        equal = torch.cat([(a == b).flatten() for a, b in zip(ours.codes, plain.codes, strict=True)])
        assert equal.double().mean() > 0.9
        return
    tiny.assert_close(family, plain, ours)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has such attention of its own: see test_cuda_engine")
@pytest.mark.parametrize("family", ["infinity", "hart"])
def test_packed_images_of_the_kernels_are_those_of_plain_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotation and attention by lengths, to the image and to the text; HART rotates and writes its keys without a kernel."""
    pipe, prompts, method = tiny.shared_pipeline(family), tiny.prompts(family, 2), SparseVAR(tau=0.97, alpha=3, beta=0.98, blocks=0)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "available", lambda tensor: False)
        plain = pipe(prompts, seed=11, method=method, smooth=False)
    attended = counted("attend_lengths", monkeypatch)
    for owner in ("cache", "models"):
        monkeypatch.setattr(f"nextscale.{owner}.attention.reads_lengths", lambda x: True)
    fill_memory(monkeypatch, float("nan"))
    ours = pipe(prompts, seed=11, method=method, smooth=False)
    assert attended and any(stage.tokens % 1 for stage in ours.report.stages)
    tiny.assert_close(family, ours, plain)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU divides with other roundings, and a number between two others may go to either")
@pytest.mark.parametrize("method", [Method(), SparseVAR(tau=0.97, alpha=3, beta=0.98, blocks=0)], ids=["dense", "sparsevar"])
def test_images_with_keys_in_8_bits_are_those_of_plain_torch(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, prompts = random_pipeline(with_few_cells(tiny.SPECS["infinity"]), kv_dtype="int8"), tiny.prompts("infinity", 1)
    launched = [counted(name, monkeypatch) for name in ("quantize_tokens", "dequantize_tokens")]
    ours = pipe(prompts, seed=1, method=method)
    assert all(launched)
    monkeypatch.setattr(kernels, "available", lambda tensor: False)
    tiny.assert_close("infinity", pipe(prompts, seed=1, method=method), ours)


# --- restoration


@every_dtype
@pytest.mark.parametrize("size, grid", [((1, 1), (3, 2)), ((3, 4), (5, 4)), ((2, 3), (4, 6)), ((3, 3), (4, 5)), ((5, 4), (2, 3))])
@pytest.mark.parametrize("added", [True, False])
def test_restore_tokens(size: tuple[int, int], grid: tuple[int, int], added: bool, dtype: torch.dtype) -> None:
    make = Maker(DEVICE, dtype)
    tokens = grid[0] * grid[1]
    index = make.selection(2, tokens, tokens // 2)
    memory, fresh = make.wide(2, size[0] * size[1], 120), make.wide(2, tokens // 2, 120)
    extra = {"base": make.wide(2, tokens, 120), "gate": make.rows(2, 120)} if added else {}
    compare(kernels.restore_tokens, restore_tokens_reference, memory, size, grid, fresh, index, **extra)


@pytest.mark.parametrize("kept", [1, 2, 7, 8, 12])
def test_restore_finds_every_token(kept: int) -> None:
    """Computed tokens are 1, restored ones 0."""
    index = Maker(DEVICE, torch.float32).selection(2, 12, kept)
    memory, fresh = torch.zeros(2, 4, 8, device=DEVICE), torch.ones(2, kept, 8, device=DEVICE)
    out = kernels.restore_tokens(memory, (2, 2), (3, 4), fresh, index)
    assert torch.equal(out[..., 0], torch.zeros(2, 12, device=DEVICE).scatter(1, index, 1.0))


def test_restore_of_a_part_of_the_grid_with_padding() -> None:
    """Tokens are at arbitrary cells, and the index repeats its last entry."""
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
@pytest.mark.parametrize("shape", [*SHAPES, (2, 131, 40)])
def test_mean_over_tokens(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = Maker(DEVICE, dtype).normal(*shape, mean=2.0)
    compare(kernels.mean_over_tokens, mean_over_tokens_reference, x)
    compare(kernels.mean_over_tokens, mean_over_tokens_reference, x[:, ::2])


def test_the_mean_of_more_tokens_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the sums of the chunks are added up in chunks."""
    monkeypatch.setattr("nextscale.kernels.distance.CHUNK", 64)
    compare(kernels.mean_over_tokens, mean_over_tokens_reference, Maker(DEVICE, torch.float32).normal(1, 4100, 8, mean=2.0))


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


# --- selection


@pytest.mark.parametrize("tokens", [1, 31, 33, 300])
def test_topk_indices_sorted(tokens: int) -> None:
    """Includes ties, both zeros, infinities and NaN."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    scores = torch.randint(-4, 5, (5, 2 * tokens), generator=generator, device=DEVICE).float()[:, ::2] / 2
    scores[1] = -0.0
    scores[1, : tokens // 2] = 0.0
    scores[2, ::3] = float("inf")
    scores[2, ::5] = float("-inf")
    scores[3, tokens // 3 :: 4] = float("nan")
    scores[4] = torch.rand(tokens, generator=generator, device=DEVICE)
    for keep in sorted({0, 1, tokens // 3, tokens - 1, tokens}):
        with poisoned():
            found = kernels.topk_indices_sorted(scores, keep)
        assert torch.equal(found, topk_indices_sorted_reference(scores, keep)), keep


def test_rows_too_long_for_a_program_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.rand(2, 40, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    expected = kernels.topk_indices_sorted(scores, 7)
    monkeypatch.setattr("nextscale.kernels.topk.MAX_TOKENS", 39)
    assert torch.equal(kernels.topk_indices_sorted(scores, 7), expected)


def test_selection_is_that_of_the_methods() -> None:
    """Also of rows that end early, whose tail nothing selects."""
    score = torch.rand(2, 6, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    tokens = Tokens(Stage(0, 2, 3, start=0, last=True), torch.arange(6, device=DEVICE).expand(2, -1), torch.tensor([6, 4], device=DEVICE))
    selection, chosen = tokens.top(score, 3)
    assert torch.equal(
        selection, topk_indices_sorted_reference(score.masked_fill(torch.arange(6, device=DEVICE) >= tokens.count[:, None], -1), 3)
    )
    assert torch.equal(chosen.index, selection)


# --- bits


def bit_logits(make: Maker, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and noise, with ties of both, and with one that is certain."""
    logits = 3 * make.normal(*shape, 2)
    noise = torch.empty(*shape, 2, device=DEVICE).exponential_(generator=make.generator)
    logits[:, 0, 0], noise[:, 0, 0] = 1.0, 0.5
    logits[:, 0, 1] = 1.0
    logits[:, 0, 2] = torch.tensor([-200.0, 0.0])
    return logits, noise


@pytest.mark.parametrize("top_p", [0.0, 0.51, 0.8, 0.97, 1.0])
def test_sample_bits(top_p: float) -> None:
    """The bits equal those sampled without the kernel and by its reference."""
    logits, noise = bit_logits(Maker(DEVICE, torch.float32), 2, 50, 41)
    with poisoned():
        found = kernels.sample_bits(logits, noise, top_p)
    assert found.dtype == torch.int64
    assert torch.equal(found, sample(filter_logits(logits, 900, top_p), noise))
    assert torch.equal(found, sample_bits_reference(logits, noise, top_p))
    assert 0.4 < found.float().mean() < 0.6
    assert found[:, 0, 0].tolist() == [0, 0] and found[:, 0, 2].tolist() == [1, 1]
    if 0 < top_p < 1:
        assert not torch.equal(found, sample(logits, noise))  # the filter matters


@pytest.mark.parametrize(
    ("sampling", "taken"),
    [
        (Sampling(top_k=900, top_p=0.97), True),  # as published for Infinity
        (Sampling(), True),
        (Sampling(top_k=1), False),
        (Sampling(top_p=0.3), False),
        (Sampling(greedy=True), False),
    ],
    ids=str,
)
def test_choosing_bits_takes_the_kernel_where_it_draws_the_same(sampling: Sampling, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, kernel = [], kernels.sample_bits
    monkeypatch.setattr(kernels, "sample_bits", lambda *given: drawn.append(given) or kernel(*given))
    logits, _ = bit_logits(Maker(DEVICE, torch.float32), 2, 12, 8)
    tokens = Tokens(Stage(1, 4, 4, 1, False), torch.arange(12, device=DEVICE).flip(0).expand(2, -1))

    def chosen() -> tuple[torch.Tensor, torch.Tensor]:
        return choose(logits, tokens, 2, sampling, ImageRng([3, 4], logits.device))

    ids, codes = chosen()
    assert bool(drawn) == taken
    assert torch.equal(ids, codes)
    monkeypatch.setattr(kernels, "available", lambda _: False)
    assert torch.equal(ids, chosen()[0])
    assert len(drawn) == taken


# --- where they can be used


def test_available(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, device=DEVICE)
    assert kernels.available(x) and kernels.available(x.bfloat16())
    assert not kernels.available(x.double()) and not kernels.available(x.long())
    with torch.enable_grad():
        assert not kernels.available(x)  # they have no gradient
    with monkeypatch.context() as unwanted:
        unwanted.setenv("NEXTSCALE_KERNELS", "0")
        kernels.wanted.cache_clear()
        assert not kernels.available(x)
    kernels.wanted.cache_clear()
    assert kernels.available(x)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not kernels.available(torch.zeros(1))


def test_a_triton_that_cannot_launch_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A missing C compiler, for example, gives one warning per device."""

    def fail(x: Tensor) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)  # no GPU is needed
    monkeypatch.setattr(distance, "mean_over_tokens", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernels.usable.cache_clear()
    for _ in range(2):
        assert not kernels.usable(torch.device("cuda"))
    kernels.usable.cache_clear()
    (record,) = caplog.records
    assert "on cuda" in record.getMessage() and "Failed to find C compiler" in record.getMessage()


def test_the_package_does_not_need_triton() -> None:
    """Runs in a new interpreter without Triton."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, nextscale\n"
        "from nextscale import kernels\n"
        "with torch.no_grad(): assert not kernels.available(torch.zeros(1))\n"
        "plain = {f'nextscale.kernels.{name}' for name in ('reference', 'shapes')}\n"
        "loaded = {name for name in sys.modules if name.startswith('nextscale.kernels.')} - plain\n"
        "assert not loaded, f'{loaded} are loaded before they are used'\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kernels.nothing


def test_every_kernel_compiles_for_a_gpu() -> None:
    """Compiles for Hopper, without a GPU, because the interpreter accepts more than the compiler."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-m", "tests.compile_kernels"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
