"""Captured requests on a GPU repeatedly give the images of eager generation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nextscale import FastVAR, Method, Pipeline, SkipStages, SparseVAR, StageVAR
from nextscale.loading.load import random_pipeline
from nextscale.models.feed_forward import linear_gelu
from nextscale.output import Output
from nextscale.stage import Schedule
from nextscale_research.methods import ToMe
from tests.engine.test_captures import ReadsTheDevice
from tests.engine.test_engine import other_prompts
from tests.helpers.tiny import FAMILIES, KINDS, SPECS, one_prompt, prompts
from tests.research.test_peers import PEERS, ROUTED, acting_size, picked, spec_for, three_routes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("error:The CUDA Graph is empty"),
]

SPARSE = SparseVAR(tau=0.95, first_stage=2)  # less leaves out nothing of images this small
LOW_RANK = StageVAR(ranks=0.177)
METHODS = (Method(), SkipStages(last=1), FastVAR(), LOW_RANK, ToMe(), SPARSE)


def equal(ours: Output, theirs: Output) -> None:
    for mine, other in zip(ours.codes, theirs.codes, strict=True):
        if mine.shape != other.shape:  # buckets pad tokens to other numbers
            continue
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-2)  # mixtures of codes; numbers must be equal
    torch.testing.assert_close(ours.pixels, theirs.pixels, rtol=1e-2, atol=1e-2)


def eager(pipe: Pipeline) -> Pipeline:
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="eager")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_replays_generate_what_eager_generation_does(family: str, method: Method) -> None:
    assert_replays(random_pipeline(SPECS[family], device="cuda"), family, method=method)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("peer", PEERS)
def test_replays_of_the_methods_that_papers_compare_with(family: str, peer: str) -> None:
    """At stages that are large enough for each to change codes."""
    pipe, settings = random_pipeline(spec_for(peer, family), device="cuda"), acting_size(peer, family)
    replayed = assert_replays(pipe, family, method=PEERS[peer][0], **settings)
    assert not torch.equal(replayed.pixels, pipe(prompts(family, 2), seed=[3, 4], **settings).pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_route_images_as_eager_generation_does(family: str, tmp_path: Path) -> None:
    pipe = random_pipeline(SPECS[family], device="cuda")
    method = three_routes(eager(pipe), family, None, tmp_path)
    pipe.warmup(picked(family, range(3)), method=method)
    rows = set()
    for images in ROUTED:
        asked = {"prompt": picked(family, images), "seed": [1 + image for image in images], "method": method}
        replayed = pipe(**asked)
        assert replayed.report.engine == "graphs"
        equal(replayed, eager(pipe)(**asked))
        rows.add(tuple(stage.rows for stage in replayed.report.stages))
    assert len(rows) > 4


def assert_replays(pipe: Pipeline, family: str, **settings: Any) -> Output:
    """Captures a request, and compares replays with eager generation; returns the last."""
    first, second = prompts(family, 2), other_prompts(family)
    made = pipe.warmup(first, **settings)
    assert made.graphs > 1
    for texts, seeds in ((first, [3, 4]), (second, [5, 6]), (first, [3, 4])):
        replayed = pipe(texts, seed=seeds, **settings)
        assert replayed.report.engine == "graphs"
        equal(replayed, eager(pipe)(texts, seed=seeds, **settings))
    return replayed


def test_the_second_request_of_a_kind_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    with caplog.at_level(logging.INFO, logger="nextscale.engine.captures"):
        found = [pipe(one_prompt("infinity", 0), seed=0) for _ in range(3)]
    assert [output.report.engine for output in found] == ["eager", "graphs", "graphs"]
    assert len(caplog.records) == 1
    equal(found[1], found[0])
    assert torch.equal(found[2].pixels, found[1].pixels)
    assert pipe(one_prompt("infinity", 0), seed=0, method=FastVAR(), warmup=True).report.engine == "graphs"


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_images_run_in_a_padded_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = random_pipeline(SPECS[family], device="cuda")
    for method in (Method(), SPARSE, ToMe(random=True)):
        pipe.warmup(prompts(family, 3), method=method)
        for image in range(2):
            ours = pipe(one_prompt(family, image), seed=image, method=method)
            assert (ours.report.engine, ours.report.captured_batch) == ("graphs", 3 if image == 0 else 1)
            equal(ours, eager(pipe)(one_prompt(family, image), seed=image, method=method))


def test_a_capture_that_fails_leaves_the_device_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    pipe, method = random_pipeline(SPECS["infinity"], device="cuda"), ReadsTheDevice()
    prompt = prompts("infinity", 2)
    pipe.warmup(prompt)
    expected = pipe(prompt, seed=1)
    found = [pipe(prompt, seed=1, method=method) for _ in range(3)]
    assert [output.report.engine for output in found] == ["eager"] * 3
    assert len(caplog.records) == 1
    equal(found[-1], expected)
    assert torch.equal(pipe(prompt, seed=1).pixels, expected.pixels)
    assert pipe(prompt, seed=1, method=FastVAR(), warmup=True).report.engine == "graphs"


def test_captures_that_leave_make_room_for_others() -> None:
    """With more kinds of requests than the budget allows, memory stays near it, and replays stay correct."""
    prompt = prompts("infinity", 3)
    probe = random_pipeline(SPECS["infinity"], device="cuda")
    first = probe.warmup(prompt, guidance=2.0).bytes
    pipe = Pipeline(probe.model, probe.tokenizer, probe.reader, probe.settings, probe.name, graph_memory=2 * first)
    del probe
    torch.cuda.empty_cache()
    scales = [1.5 + number / 8 for number in range(24)]
    cleared = []
    for _ in range(2):
        before = torch.cuda.memory_reserved()
        for scale in scales:
            ours = pipe(prompt, seed=1, guidance=scale, warmup=True)
            assert ours.report.engine == "graphs"
            equal(ours, eager(pipe)(prompt, seed=1, guidance=scale))
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - before <= 3 * first
        pipe.captures.clear()
        torch.cuda.empty_cache()
        cleared.append(torch.cuda.memory_reserved())
    assert cleared[1] <= cleared[0] + first // 2  # the first round may leave the workspaces of libraries behind


def test_threads_generate_what_one_thread_does() -> None:
    """4 threads with requests of several sizes, batches and methods, whose graphs were captured before; then with none."""
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    wide = Schedule(((1, 1), (2, 2), (3, 5), (4, 7)))
    kinds = [(1, None, Method()), (2, None, FastVAR()), (3, wide, Method()), (1, wide, LOW_RANK), (2, None, SPARSE), (1, None, ToMe())]

    def call(number: int) -> Output:
        images, size, method = kinds[number % len(kinds)]
        return pipe(prompts("infinity", images), seed=number % 12, size=size, method=method)

    for images, size, method in kinds:
        pipe.warmup(prompts("infinity", images), size=size, method=method)
    expected = [call(number) for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(call, range(96)))
    for number, output in enumerate(found):
        assert output.report.engine == "graphs"
        assert torch.equal(output.pixels, expected[number % 12].pixels)
    pipe.captures.clear()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(call, range(48)))
    for number, output in enumerate(found):
        equal(output, expected[number % 12])
    assert found[-1].report.engine == "graphs"


def test_mixed_requests_neither_grow_memory_nor_change_results() -> None:
    """Runs 200 requests of several batches, sizes and methods."""
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    own, wide = None, Schedule(((1, 1), (2, 2), (3, 5), (4, 7)))
    kinds: Sequence[tuple[int, Schedule | None, Method]] = [
        *((images, own, method) for images, method in ((1, Method()), (2, FastVAR()), (1, LOW_RANK), (2, SkipStages(last=1)), (2, SPARSE))),
        *((images, wide, method) for images, method in ((2, Method()), (1, FastVAR()), (2, LOW_RANK), (1, SPARSE))),
    ]
    requests = [(prompts("infinity", images), {"size": size, "method": method}) for images, size, method in kinds]
    for prompt, settings in requests:
        pipe.warmup(prompt, **settings)
    expected = [pipe(prompt, seed=9, **settings) for prompt, settings in requests]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for turn in range(200):
        chosen = turn * 7 % len(requests)
        prompt, settings = requests[chosen]
        output = pipe(prompt, seed=9, **settings)
        assert output.report.engine == "graphs"
        assert torch.equal(output.pixels, expected[chosen].pixels)
        del output
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_previews_show_every_stage_of_a_replay() -> None:
    pipe = random_pipeline(SPECS["infinity"], device="cuda")
    prompt = prompts("infinity", 2)
    pipe.warmup(prompt)
    shown: list[torch.Tensor] = []
    known: list[torch.Tensor] = []
    pipe(prompt, seed=1, on_stage=lambda preview: shown.append(preview.latent.clone()))
    eager(pipe)(prompt, seed=1, on_stage=lambda preview: known.append(preview.latent.clone()))
    assert len(shown) == len(known) > 1
    for ours, theirs in zip(shown, known, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 700])
def test_gelu_inside_the_product(dtype: torch.dtype, tokens: int) -> None:
    """The tanh approximation has at most the error of two separate steps."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 512, device="cuda", dtype=dtype)
    x = 3 * torch.randn(2, tokens, 128, device="cuda", dtype=dtype)
    exact = F.gelu(F.linear(x.double(), linear.weight.double(), linear.bias.double()), approximate="tanh")
    with torch.inference_mode():
        fused, plain = linear_gelu(x, linear), F.gelu(linear(x), approximate="tanh")
    assert (fused - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5
    if dtype == torch.float32:
        assert (exact - F.gelu(F.linear(x.double(), linear.weight.double(), linear.bias.double()))).abs().max() > 1e-4  # they differ
