"""int8 KV cache: rounding errors, size, and unchanged behavior otherwise."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from nextscale import FastVAR, Method, Pipeline, SparseVAR, StageVAR
from nextscale.cache import CacheSpec, LayerCache, QuantizedLayerCache, QuantizedSpec, StageKeys, Workspace
from nextscale.errors import SettingError
from nextscale.kernels.reference import Int8Tokens, dequantize_tokens_reference, quantize_tokens_reference
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import MODELS, build_model, build_tokenizer
from nextscale.methods.combine import Combined
from nextscale.methods.drop_guidance import DropGuidance
from nextscale.planning.cost import Workload
from nextscale.planning.memory import request_memory, reserved_cache
from nextscale.stage import Schedule, Tokens
from nextscale_research.methods.scalekv import ScaleKV
from tests.helpers import tiny
from tests.helpers.kernel_cases import Maker
from tests.helpers.tape import Dispatched, play_graphs_on_the_cpu

METHODS = (
    Method(),
    FastVAR(),
    StageVAR(guidance_off=2),
    DropGuidance(2),
    SparseVAR(tau=0.95, first_stage=2),
    Combined((SparseVAR(tau=0.95, first_stage=2), DropGuidance(2))),
)


@functools.cache
def in_8_bits(family: str) -> Pipeline:
    return tiny.with_ranks(random_pipeline(tiny.SPECS[family], kv_dtype="int8"))


# --- rounding


def empty_store(rows: int, room: int, heads: int, channels: int) -> Int8Tokens:
    numbers, scales = torch.full((2, rows, room, heads, channels), 99, dtype=torch.int8), torch.full((2, rows, room, heads), -1.0)
    return Int8Tokens(*numbers, *scales)


def stored(source: Tensor, start: int | Tensor, new: int, room: int) -> tuple[Tensor, Tensor]:
    """Numbers and scales of `source` as keys; its opposite are the values."""
    store = empty_store(source.shape[0], room, *source.shape[2:])
    quantize_tokens_reference(source, -source, start, new, store)
    assert torch.equal(store.key_scales, store.value_scales)
    return store.keys, store.key_scales


def test_numbers_come_back_within_half_a_step() -> None:
    source = Maker("cpu", torch.float32).normal(2, 5, 3, 8)
    source[0, 1, 2] = 0
    source[1, 4] *= 1e4
    numbers, scales = stored(source, 0, 5, 5)
    back, other = torch.empty_like(source), torch.empty_like(source)
    dequantize_tokens_reference(Int8Tokens(numbers, -numbers, scales, scales), back, other)
    assert torch.equal(other, -back)
    assert ((back - source).abs() <= scales[..., None] * 0.5 * (1 + 1e-4)).all()
    assert torch.allclose(scales, source.abs().amax(dim=-1) / 127)
    assert torch.equal(back[0, 1, 2], torch.zeros(8))
    assert numbers.abs().max() == 127


def test_nothing_but_the_new_tokens_is_written() -> None:
    source = Maker("cpu", torch.bfloat16).normal(2, 6, 2, 4)
    numbers, scales = stored(source, 2, 3, 7)
    assert (scales[:, 2:5] >= 0).all() and (scales[:, :2] == -1).all() and (scales[:, 5:] == -1).all()
    ragged, ragged_scales = stored(source, torch.tensor([0, 2]), 3, 7)
    assert [(row >= 0).any(dim=1).nonzero().flatten().tolist() for row in ragged_scales] == [[0, 1, 2], [2, 3, 4]]
    assert torch.equal(ragged[1], numbers[1])


# --- sizes


def planned_spec(*tokens: tuple[int, int], kind: type[CacheSpec] = QuantizedSpec) -> CacheSpec:
    """Returns sizes for 2 layers of 2 heads of 4 channels. `tokens`: rows and tokens of every stage."""
    planned = tuple(StageKeys(stage, rows, (count, count)) for stage, (rows, count) in enumerate(tokens))
    schedule = Schedule(tuple(range(1, len(tokens) + 1)))
    return kind(2, tokens[0][0], 2, 4, schedule, torch.float32, torch.device("cpu"), planned=planned)


def test_what_8_bits_take() -> None:
    """A token of a row takes 2 x 2 x (4 + 4) bytes in a layer, and 2 x 2 x 4 x 4 in the workspace, which has room for the largest stage."""
    spec = planned_spec((4, 1), (4, 4), (2, 9), (2, 16))
    workspace = 64 * max(4 * 1, 4 * 5, 2 * 14, 2 * 30)
    held = [4 * 5, 4 * 5, 2 * 14, 2 * 14]
    assert [spec.bytes_at(stage) for stage in range(4)] == [32 * 2 * tokens + workspace for tokens in held]
    assert spec.kept_bytes == 32 * 2 * max(4 * 5, 2 * 14)
    early = planned_spec((4, 9), (1, 16))
    assert early.bytes_at(0) - early.bytes_at(0, workspace=False) == 64 * max(4 * 9, 25)


def test_a_cache_takes_what_was_planned() -> None:
    spec = planned_spec((2, 1), (2, 4), (2, 9))
    workspace = Workspace(spec)
    caches = [QuantizedLayerCache(spec.layer(number), workspace) for number in range(2)]
    for stage, held in ((0, 2 * 32 * 2 * 5), (1, 2 * 32 * 2 * 5), (2, 0)):
        for cache in caches:
            fresh = torch.randn(2, spec.schedule[stage].cells, 2, 4)
            keys, values, mask = cache.append(fresh, fresh, Tokens(spec.schedule[stage])).filled
            assert mask is None and torch.equal(keys, values) and torch.equal(keys[:, -fresh.shape[1] :], fresh)  # its own are not rounded
        assert sum(cache.nbytes for cache in caches) == held
        assert sum(cache.nbytes for cache in caches) + workspace.nbytes == spec.bytes_at(stage) - spec.freed_bytes(2 if stage == 2 else 0)


def test_earlier_stages_are_those_that_were_rounded() -> None:
    spec = planned_spec((2, 1), (2, 4), (2, 9))
    plain = planned_spec((2, 1), (2, 4), (2, 9), kind=CacheSpec)
    ours, theirs = QuantizedLayerCache(spec.layer(0), Workspace(spec)), LayerCache(plain.layer(0), Workspace(plain))
    for stage in spec.schedule:
        k, v = torch.randn(2, 2, stage.cells, 2, 4)
        found, expected = (cache.append(k, v, Tokens(stage)).filled for cache in (ours, theirs))
        for mine, other in zip(found[:2], expected[:2], strict=True):
            error, largest = (mine - other).abs(), other.abs().amax(dim=-1, keepdim=True)
            assert (error <= largest / 254 * 1.001).all()
            assert error[:, : stage.start].any() or stage.index == 0


# --- requests


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
@pytest.mark.parametrize("family", ["infinity", "hart"])
def test_captured_batches_are_single_eager_requests(family: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = in_8_bits(family)
    alone = [pipe(tiny.one_prompt(family, image), seed=5 + image, method=method) for image in range(2)]
    together = pipe(tiny.prompts(family, 2), seed=5, method=method)
    for image, one in enumerate(alone):
        tiny.assert_close(family, tiny.one_image(together, image), one)
    play_graphs_on_the_cpu(monkeypatch)
    captured = Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="graphs")
    captured.warmup(tiny.prompts(family, 2), method=method)
    replayed = captured(tiny.prompts(family, 2), seed=5, method=method)
    with Dispatched():
        eager = pipe(tiny.prompts(family, 2), seed=5, method=method)
    assert replayed.report.engine == "graphs"
    torch.testing.assert_close(replayed.latent, eager.latent, rtol=1e-3, atol=5e-2 if family == "hart" else 1e-3)


def test_images_are_near_those_of_whole_keys_and_differ() -> None:
    """Logits of the second stage on, whose earlier keys are rounded."""

    def logits(pipe: Pipeline) -> list[Tensor]:
        found: list[Tensor] = []
        pipe(tiny.prompts("infinity", 2), seed=5, method=Method(), on_stage=lambda preview: found.append(preview.done.logits))
        return found

    ours, theirs = logits(in_8_bits("infinity")), logits(tiny.shared_pipeline("infinity"))
    assert torch.equal(ours[0], theirs[0])
    assert 0 < (ours[1] - theirs[1]).abs().mean() < 0.01 * theirs[1].std()


def test_a_request_is_planned_with_8_bits() -> None:
    pipe, plain = in_8_bits("infinity"), tiny.shared_pipeline("infinity")
    report, whole = (one(tiny.prompts("infinity", 1), seed=1, method=Method()).report for one in (pipe, plain))
    spec = reserved_cache(pipe.model, tiny.INFINITY_SCHEDULE, Method().forecast(pipe.model, tiny.INFINITY_SCHEDULE), 1, 2)
    assert isinstance(spec, QuantizedSpec)
    assert report.planned_memory - whole.planned_memory == spec.bytes - plain.model.cache_spec(tiny.INFINITY_SCHEDULE, 2).bytes


def test_8_bits_halve_the_keys_of_infinity_2b() -> None:
    spec = MODELS["infinity-2b"]
    with torch.device("meta"):
        model, tokenizer = build_model(spec.model).bfloat16(), build_tokenizer(spec.tokenizer).bfloat16()
    schedule, peaks = spec.settings.schedules.choose(None, None), list[int]()
    for kv_dtype in (None, "int8"):
        model.kv_dtype = kv_dtype  # type: ignore[assignment]
        peaks.append(request_memory(model, tokenizer, Workload(schedule, 1, text_tokens=64)).peak)
    assert 1.5e9 < peaks[0] - peaks[1] < 1.8e9


def test_what_8_bits_do_not_go_with() -> None:
    with pytest.raises(SettingError, match=r"ScaleKV.* has a KV cache of its own.*'int8'. Load it without kv_dtype"):
        in_8_bits("var")(1, method=ScaleKV())
    with pytest.raises(SettingError, match=r"kv_dtype must be int8, .*'fp4'"):
        random_pipeline(tiny.SPECS["var"], kv_dtype="fp4")  # type: ignore[arg-type]
