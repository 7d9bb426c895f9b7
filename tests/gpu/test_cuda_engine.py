"""Captures, attention with lengths, and fused GELU on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale import FastVAR, Method, Pipeline, SkipStages, SparseVAR, StageVAR, kernels
from nextscale.cache import real_entries
from nextscale.cache.attention import attend, reads_lengths
from nextscale.engine import memory
from nextscale.generate import StageOutput
from nextscale.loading.load import random_pipeline
from nextscale.methods.combine import Combined
from nextscale.models import feed_forward as feed_forward_module
from nextscale.models.feed_forward import FeedForward, linear_gelu
from nextscale_research.methods import ToMe
from tests.helpers.tiny import FAMILIES, SPECS, TEXT_FAMILIES, prompts, text_features
from tests.helpers.toy_methods import PlantedCounts

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("error:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("error:gemm_and_bias"),  # torch says so where it cannot fuse
]
HALF = [torch.float16, torch.bfloat16]


def eager(pipe: Pipeline) -> Pipeline:
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="eager")


@contextmanager
def no_more_than(bytes_allowed: int) -> Iterator[None]:
    """Fails where more is allocated inside at a time: hidden copies."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= bytes_allowed


# --- attention by lengths


def strided_text(rows: int, room: int, heads: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns interleaved keys and values, as in TextContext."""
    both = torch.randn(rows, room, 2, heads, channels, device="cuda", dtype=dtype)
    return both[:, :, 0], both[:, :, 1]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [1, 3, 1024, 4096])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_texts_are_attended_by_their_lengths_without_a_copy(rows: int, width: int, dtype: torch.dtype) -> None:
    heads, channels, room = 4, 128, 4096
    q = torch.randn(rows, width, heads, channels, device="cuda", dtype=dtype)
    keys, values = strided_text(rows, room, heads, channels, dtype)
    lengths = torch.tensor([4096, 1, 77, 16, 129][:rows], dtype=torch.int32, device="cuda")
    for store in (keys, values):
        store[real_entries(lengths, room)[:, 0, 0].logical_not()] = float("nan")  # nothing reads them
    with torch.inference_mode():
        assert reads_lengths(q)
        kernels.attend_lengths(q, keys, values, lengths, 0.1)
        with no_more_than(q.nbytes + q.nbytes // 8 + (1 << 20)):
            found = kernels.attend_lengths(q, keys, values, lengths, 0.1)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        expected = attend(q[one].float(), keys[one, :length].float(), values[one, :length].float(), None, 0.1)
        torch.testing.assert_close(found[one].float(), expected, rtol=2e-2, atol=2e-2)


def test_a_captured_attention_follows_the_lengths() -> None:
    q = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    keys, values = strided_text(2, 32, 4, 64, torch.bfloat16)
    lengths = torch.tensor([32, 32], dtype=torch.int32, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            kernels.attend_lengths(q, keys, values, lengths, 0.1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = [kernels.attend_lengths(q, keys, values, lengths, 0.1) for _ in range(3)]
        for pair in ([5, 32], [1, 17], [32, 32]):
            lengths.copy_(torch.tensor(pair, dtype=torch.int32))
            graph.replay()
            expected = attend(q.float(), keys.float(), values.float(), real_entries(lengths, 32), 0.1)
            for layer in found:
                torch.testing.assert_close(layer.float(), expected, rtol=2e-2, atol=2e-2)


# --- the product with gelu


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_gelu_inside_the_product_takes_what_comes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(2048, 8192, device="cuda", dtype=dtype).requires_grad_(False)
    wide = torch.randn(3, 40, 4096, device="cuda", dtype=dtype)
    inputs = (wide[:, :, :2048], wide[:, ::2, 2048:], wide[1, :1, :2048], wide[:, :0, :2048], wide[:1, :1, :2048].expand(2, 5, -1))
    bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    with torch.inference_mode():
        for x in inputs:
            found = linear_gelu(x, linear)
            assert found.shape == (*x.shape[:-1], 8192) and found.dtype == dtype
            expected = F.gelu(F.linear(x.double(), linear.weight.double(), linear.bias.double()), approximate="tanh")
            torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def test_gelu_inside_the_product_is_one_kernel_and_holds_one_result() -> None:
    linear = torch.nn.Linear(2048, 8192, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, 4096, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        linear_gelu(x, linear)
        with no_more_than(8192 * 8192 * 2 + (1 << 20)):
            linear_gelu(x, linear)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            linear_gelu(x, linear)
            torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert not [name for name in launched if "elementwise" in name.lower()], launched


def test_pieces_of_a_feed_forward_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_forward = FeedForward(256, 1024).to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, 700, 256, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        whole = feed_forward(x)
        monkeypatch.setattr(feed_forward_module, "CHUNK_TOKENS", 300)  # the last piece is shorter
        torch.testing.assert_close(feed_forward(x), whole, rtol=2e-2, atol=2e-2)


# --- captures


METHODS = (
    Method(),
    SkipStages(last=1),
    FastVAR(),
    StageVAR(ranks=0.177),
    ToMe(random=True),
    SparseVAR(tau=0.95, first_stage=2),
    SparseVAR(keep=0.3, first_stage=2),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_captures_in_half_precision_repeat_themselves_whatever_runs_between(family: str) -> None:
    """Texts by their lengths, bucket sizes, keys freed while the last stage is captured; all captures share a pool."""
    pipe = random_pipeline(SPECS[family], device="cuda", dtype=torch.bfloat16)
    prompt = prompts(family, 2)
    for method in METHODS:
        pipe.warmup(prompt, method=method)
    expected = [pipe(prompt, seed=[3, 4], method=method) for method in METHODS]
    for turn in (5, 0, 3, 1, 6, 5, 2, 4, 6, 0, 5):
        again = pipe(prompt, seed=[3, 4], method=METHODS[turn])
        assert again.report.engine == "graphs"
        assert torch.equal(again.pixels, expected[turn].pixels), METHODS[turn].label
        eager(pipe)(prompt, seed=[8, 9], method=METHODS[turn])
        torch.cuda.empty_cache()
    for method, output in zip(METHODS, expected, strict=True) if family == "infinity" else ():  # others draw few codes in early stages
        plain = eager(pipe)(prompt, seed=[3, 4], method=method)
        early = [(ours == theirs).flatten().double() for ours, theirs in list(zip(output.codes, plain.codes, strict=True))[:2]]
        assert torch.cat(early).mean() > 0.9, method.label  # attention rounds otherwise where it reads lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_in_half_precision(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With given counts, logits of the first reduced stage equal those of padded rows up to rounding, and replays are deterministic."""
    pipe, prompt, method = (
        random_pipeline(SPECS[family], device="cuda", dtype=torch.bfloat16),
        prompts(family, 3),
        PlantedCounts(first_stage=2),
    )

    def reduced() -> StageOutput:
        seen: list[StageOutput] = []
        eager(pipe)(prompt, seed=[3, 4, 5], method=method, on_stage=lambda preview: seen.append(preview.done))
        return seen[2]

    pipe.warmup(prompt, method=method)
    first, second = (pipe(prompt, seed=[3, 4, 5], method=method) for _ in range(2))
    assert first.report.engine == "graphs"
    assert torch.equal(first.pixels, second.pixels)
    packed = reduced()
    monkeypatch.setattr("nextscale.generate.packs", lambda request, planned: False)
    padded = reduced()
    assert packed.plan.packed is not None and padded.plan.packed is None
    assert packed.logits is not None and padded.logits is not None
    assert (packed.logits - padded.logits).abs().max() <= 0.1 * padded.logits.std()


@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("var", Method(), {"suppressed_codes": (1, 3)}),
        ("infinity", Combined((FastVAR({2: 1.0}), ToMe(random=True, stages=(2, 3)))), {}),
        ("infinity", Combined((SparseVAR(tau=0.5, metric="logits", first_stage=1), ToMe(random=True))), {}),
        ("star_refined", SparseVAR(tau=0.3, first_stage=2), {}),  # the runs before the capture leave out nothing
    ],
)
def test_requests_that_draw_in_odd_places_can_be_captured(family: str, method: Method, settings: dict[str, object]) -> None:
    pipe = random_pipeline(SPECS[family], device="cuda")
    pipe.warmup(prompts(family, 2), method=method, **settings)
    for seeds in ([3, 4], [5, 6]):
        ours = pipe(prompts(family, 2), seed=seeds, method=method, **settings)
        theirs = eager(pipe)(prompts(family, 2), seed=seeds, method=method, **settings)
        assert ours.report.engine == "graphs"
        torch.testing.assert_close(ours.pixels, theirs.pixels, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_capture_makes_the_condition_of_other_prompts(family: str) -> None:
    """Longer and shorter ones, with and without negative prompts, between requests of another capture that shares its memory."""
    pipe = random_pipeline(SPECS[family], device="cuda")
    pipe.warmup(prompts(family, 2))
    pipe.warmup(prompts(family, 2), method=StageVAR(ranks=0.177))
    for seed, (texts, negative) in enumerate([((12, 2), None), ((1, 8), (11, 4)), ((5, 5), (3,)), ((9, 5), None)]):
        request = {
            "prompt": text_features(family, texts, seed=8 + seed),
            "negative": None if negative is None else text_features(family, negative, seed=20),
            "seed": seed,
        }
        ours, theirs = pipe(**request), eager(pipe)(**request)
        assert ours.report.engine == "graphs"
        assert ours.report.condition_seconds > 0
        torch.testing.assert_close(ours.pixels, theirs.pixels, rtol=1e-2, atol=1e-2)
        assert pipe(**request, method=StageVAR(ranks=0.177)).report.engine == "graphs"


@pytest.mark.parametrize("family", ["infinity", "var", "hart"])
def test_keys_in_8_bits_are_captured(family: str) -> None:
    """Replays repeat themselves, and are near eager generation and near keys in half precision."""
    pipe = random_pipeline(SPECS[family], device="cuda", dtype=torch.bfloat16, kv_dtype="int8")
    whole = random_pipeline(SPECS[family], device="cuda", dtype=torch.bfloat16)
    prompt = prompts(family, 2)
    for method in METHODS:
        pipe.warmup(prompt, method=method)
        first, second = (pipe(prompt, seed=[3, 4], method=method) for _ in range(2))
        assert first.report.engine == "graphs"
        assert torch.equal(first.pixels, second.pixels), method.label
        if family != "infinity":  # others draw few codes in early stages
            continue
        for plain in (eager(pipe), eager(whole)):
            other = plain(prompt, seed=[3, 4], method=method)
            early = [(ours == theirs).flatten().double() for ours, theirs in list(zip(first.codes, other.codes, strict=True))[:2]]
            assert torch.cat(early).mean() > 0.9, method.label


def test_images_that_keep_more_tokens_start_anew_with_more_room() -> None:
    pipe, prompt, method = random_pipeline(SPECS["infinity"], device="cuda"), prompts("infinity", 2), SparseVAR(tau=0.0, first_stage=2)
    small = pipe.warmup(prompt, method=method)
    shown: list[int] = []
    ours = pipe(prompt, seed=3, method=method, on_stage=lambda preview: shown.append(preview.done.stage.index))
    assert ours.report.engine == "graphs" and small.graphs > 1
    assert shown == list(range(len(ours.report.stages)))
    torch.testing.assert_close(ours.pixels, eager(pipe)(prompt, seed=3, method=method).pixels, rtol=1e-2, atol=1e-2)


def test_captures_can_be_made_again_after_they_were_cleared_and_after_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    prompt = prompts("infinity", 2)
    held = []
    pipe.warmup(prompt)
    expected = pipe(prompt, seed=1, on_stage=lambda preview: held.append(preview.latent)).pixels  # in the pool
    pipe.captures.clear()
    pipe.warmup(prompt)
    assert torch.equal(pipe(prompt, seed=1).pixels, expected)
    pipe.captures.clear()
    decode = type(pipe.tokenizer).decode

    def failing(self: object, latent: Tensor) -> Tensor:
        pixels = decode(self, latent)  # type: ignore[arg-type]
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("on purpose")
        return pixels

    with monkeypatch.context() as patch:
        patch.setattr(type(pipe.tokenizer), "decode", failing)
        with pytest.raises(ValueError, match="on purpose") as kept:
            pipe.warmup(prompt)
    pipe.warmup(prompt)
    assert torch.equal(pipe(prompt, seed=1).pixels, expected)
    del kept


def test_captures_lie_in_segments_that_grow_and_nothing_else_does() -> None:
    if memory.allocator_setter() is None or memory.OPTION in memory.allocator_settings():
        pytest.skip("chosen otherwise")
    before = memory.allocator_settings()
    torch.cuda.empty_cache()
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    pipe.warmup(prompts("infinity", 2))
    assert memory.allocator_settings() == before
    pool = pipe.captures._pool.handle
    of_pool = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(pool)]
    assert of_pool and all(segment["is_expandable"] for segment in of_pool)
    fresh = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    (own,) = [s for s in torch.cuda.memory_snapshot() if s["address"] <= fresh.data_ptr() < s["address"] + s["total_size"]]
    assert not own["is_expandable"]


def test_captures_share_their_memory() -> None:
    """Captures share all memory except their results, because they never run at the same time."""
    prompt = text_features("infinity", (5,) * 32, seed=1)
    alone = random_pipeline(SPECS["infinity"], device="cuda").warmup(prompt, guidance=2.0).bytes
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    first = pipe.warmup(prompt, guidance=3.0).bytes
    second = pipe.warmup(prompt, guidance=2.0).bytes
    assert first >= alone * 0.8
    assert second <= alone / 2
    assert pipe.captures.bytes == first + second


def test_weights_that_move_take_their_captures_along() -> None:
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    prompt = prompts("infinity", 2)
    pipe.warmup(prompt)
    expected = pipe(prompt, seed=1)
    pipe.model.to("cpu").to("cuda")
    again = pipe(prompt, seed=1)
    assert (expected.report.engine, again.report.engine) == ("graphs", "eager")
    torch.testing.assert_close(again.pixels, expected.pixels, rtol=1e-2, atol=1e-2)
