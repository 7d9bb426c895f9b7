"""Selection, memory and eviction of captures, and waiting threads. Graphs are emulated on the CPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nextscale import FastVAR, Method, Pipeline, SkipStages, SparseVAR, StageVAR
from nextscale.canvas import Canvas
from nextscale.engine import captures
from nextscale.engine.memory import DeviceMemory
from nextscale.errors import OutOfMemory, SettingError
from nextscale.guidance import StageGuidance
from nextscale.methods.method import MethodRun, RunSetup
from nextscale.output import Output, Preview
from nextscale.stage import Schedule, Stage
from nextscale_research.methods import StageVARVariants, ToMe
from tests.helpers.tape import Dispatched, play_graphs_on_the_cpu
from tests.helpers.tiny import (
    CROSS_ATTENTION_FAMILIES,
    KINDS,
    assert_close,
    assert_same_bits,
    one_prompt,
    prompts,
    shared_pipeline,
    text_features,
)

SPARSE = SparseVAR(tau=0.95, first_stage=2)  # less leaves out nothing of images this small


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch, timed=True)


def with_graphs(family: str, **options: Any) -> Pipeline:
    pipe = shared_pipeline(family)
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, **{"engine": "graphs"} | options)


def engines(pipe: Pipeline, *labels: Any, **settings: Any) -> list[str]:
    return [pipe(label, seed=1, **settings).report.engine for label in labels]


# --- when a request is captured


def test_the_second_request_of_a_kind_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    pipe = with_graphs("var")
    with caplog.at_level(logging.INFO, logger=captures.__name__):
        assert engines(pipe, 1, 2, 3) == ["eager", "graphs", "graphs"]
    assert engines(pipe, 1, method=FastVAR()) == ["eager"]
    assert len(pipe.captures) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("captured requests for 1 image(s) of Schedule(1x1 2x2 3x3 4x4) with dense: ")
    assert " graphs, 0.00 GB" in message


def test_warmup_captures_at_once() -> None:
    pipe = with_graphs("var")
    assert engines(pipe, 1, warmup=True) == ["graphs"]
    assert pipe.warmup(2).graphs == 0  # is there
    assert pipe.warmup([1, 2]).graphs == 6
    assert len(pipe.captures) == 2


def test_scales_given_as_a_list_are_captured_too() -> None:
    pipe = with_graphs("var")
    assert engines(pipe, 1, 2, guidance=StageGuidance(values=[3.0, 2.0, 1.5, 1.0])) == ["eager", "graphs"]  # type: ignore[arg-type]


def test_given_mixtures_and_given_numbers_are_captured_apart() -> None:
    pipe, prompt = with_graphs("hart"), one_prompt("hart", 0)
    numbers = shared_pipeline("hart")(prompt, seed=1, smooth=False).codes[0]
    choices = pipe.model.logit_shape[-1]
    mixture = torch.full((*numbers.shape, choices), 1 / choices)
    pipe(prompt, seed=1, prefix_codes=[mixture], warmup=True)
    found = pipe(prompt, seed=1, prefix_codes=[numbers], warmup=True)
    assert found.report.engine == "graphs"
    assert_same_bits(found, shared_pipeline("hart")(prompt, seed=1, prefix_codes=[numbers]))


def test_one_generator_for_image_and_method_runs_eagerly_where_its_order_depends_on_the_image() -> None:
    pipe, prompt = with_graphs("star_refined"), prompts("star_refined", 2)
    pipe.warmup(prompt, method=SPARSE)
    found = pipe(prompt, seed=torch.Generator().manual_seed(4), method=SPARSE)
    assert found.report.engine == "eager"
    assert_same_bits(found, shared_pipeline("star_refined")(prompt, seed=torch.Generator().manual_seed(4), method=SPARSE))
    assert pipe(prompt, seed=4, method=SPARSE).report.engine == "graphs"


def test_what_was_refused_is_tried_again_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = with_graphs("var")
    with monkeypatch.context() as patch:
        patch.setattr(captures, "CapturedRequest", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
        assert engines(pipe, 1, 1, 1) == ["eager"] * 3
    assert engines(pipe, 1) == ["eager"]
    monkeypatch.setattr(captures.WeightPointers, "now", lambda _: (1, 2, 3))
    assert engines(pipe, 1, 1) == ["eager", "graphs"]


def test_an_eager_pipeline_captures_nothing() -> None:
    pipe = with_graphs("var", engine="eager")
    assert engines(pipe, 1, 1, 1, warmup=True) == ["eager"] * 3
    assert len(pipe.captures) == 0


@pytest.mark.parametrize(
    "settings",
    [{"compute_mask": True}, {"revise": lambda stage, codes: codes}, {"method": StageVARVariants(ranks="measured")}],
    ids=["compute_mask", "revise", "measured ranks"],
)
def test_what_needs_the_host_between_stages_runs_eagerly(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    pipe = with_graphs("var")
    assert engines(pipe, 1, 1, 1, warmup=True, **settings) == ["eager"] * 3
    assert not caplog.text


class ReadsTheDevice(Method):
    """Says that it can be captured, and cannot."""

    def start(self, setup: RunSetup) -> MethodRun:
        return ReadingRun()


class ReadingRun(MethodRun):
    def count(self, stage: Stage, canvas: Canvas) -> torch.Tensor | None:
        canvas.latent.sum().item()
        return None


def test_a_capture_that_fails_is_said_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    pipe, method = with_graphs("var"), ReadsTheDevice()
    assert engines(pipe, 1, 1, 1, 1, method=method) == ["eager"] * 4
    (record,) = caplog.records
    assert "could not be captured" in record.getMessage() and "ReadsTheDevice" in record.getMessage()
    assert engines(pipe, 1, 1) == ["eager", "graphs"]
    with pytest.raises(RuntimeError, match="during a capture"):
        pipe.warmup(1, method=method)


@dataclass(frozen=True)
class Refuses(Method):
    """Refuses every request when it starts."""

    error: type[Exception] = SettingError

    def start(self, setup: RunSetup) -> MethodRun:
        raise self.error("not this request")


@pytest.mark.parametrize("error", [SettingError, ValueError])
def test_a_request_that_fails_before_it_is_captured_drops_no_capture(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once; a warm-up that fails drops nothing either."""
    pipe, refused = with_graphs("var"), Refuses(error)
    pipe.warmup(1), pipe.warmup([1, 2])
    for _ in range(3):
        with pytest.raises(error, match="not this request"):
            pipe(1, seed=1, method=refused, warmup=True)
    with pytest.raises(error, match="not this request"):
        pipe.warmup(1, method=refused)
    (record,) = caplog.records
    assert "could not be captured: not this request" in record.getMessage()
    assert len(pipe.captures) == 2 and engines(pipe, 1, [1, 2]) == ["graphs"] * 2


def test_a_capture_that_fails_half_way_drops_the_pool_with_all_captures(caplog: pytest.LogCaptureFixture) -> None:
    pipe = with_graphs("var")
    pipe.warmup(1)
    assert engines(pipe, 1, method=ReadsTheDevice(), warmup=True) == ["eager"]
    assert len(pipe.captures) == 0 and engines(pipe, 1) == ["eager"]


@dataclass
class WithoutHash(Method):
    ratios: Any = ()


def test_methods_without_a_hash_run_eagerly() -> None:
    pipe = with_graphs("var")
    assert engines(pipe, 1, 1, 1, method=WithoutHash()) == ["eager"] * 3
    with pytest.raises(SettingError, match="WithoutHash must be hashable"):
        pipe.warmup(1, method=WithoutHash())


def test_kinds_of_requests_are_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MAX_HISTORY", 2)
    pipe = with_graphs("var")
    for guidance in (1.0, 2.0, 3.0, 1.0):
        assert engines(pipe, 1, guidance=guidance) == ["eager"]
    assert len(pipe.captures._history) == 2


# --- prompts of other lengths


@pytest.mark.parametrize("family", CROSS_ATTENTION_FAMILIES)
def test_a_longer_text_is_captured_at_once_and_its_capture_serves_shorter_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.engine.buffers.TEXT_BUCKETS", (4, 16))
    pipe, made = with_graphs(family), count_captures(monkeypatch)
    short, long = text_features(family, (3,)), text_features(family, (9,), seed=2)
    pipe.warmup(short, negative=short)
    for prompt, negative in ((long, short), (short, long), (short, short)):
        ours = pipe(prompt, seed=1, negative=negative)
        with Dispatched():
            theirs = shared_pipeline(family)(prompt, seed=1, negative=negative)
        assert ours.report.engine == "graphs"
        assert_close(family, ours, theirs)
    assert len(made) == 2
    assert len(pipe.captures) == 1


@pytest.mark.parametrize("family", ["var", "hart"])
def test_models_whose_attention_has_no_keys_of_a_text_need_no_room_for_one(family: str) -> None:
    pipe = with_graphs(family)
    pipe.warmup(prompts(family, 1))
    assert [key.text for key in pipe.captures._captures] == [0]


def count_captures(patch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []
    capture = captures.CapturedRequest
    patch.setattr(captures, "CapturedRequest", lambda *given: made.append(None) or capture(*given))
    return made


# --- fewer images


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "HOST_SECONDS", 1e3)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("method", [Method(), SPARSE, StageVAR(), ToMe(random=True), SkipStages(1)], ids=lambda method: method.label)
def test_fewer_images_run_in_a_padded_batch(family: str, method: Method, slow_host: None) -> None:
    pipe = with_graphs(family)
    pipe.warmup(prompts(family, 3), method=method)
    for images in (1, 2):
        seen: list[Preview] = []
        ours = pipe(prompts(family, images), seed=[60, 5][:images], method=method, on_stage=seen.append)
        with Dispatched():
            alone = [shared_pipeline(family)(one_prompt(family, i), seed=(60, 5)[i], method=method) for i in range(images)]
            theirs = shared_pipeline(family)(prompts(family, images), seed=[60, 5][:images], method=method)
        assert (ours.report.engine, ours.report.captured_batch, ours.report.seeds) == ("graphs", 3, (60, 5)[:images])
        torch.testing.assert_close(
            ours.latent, torch.cat([one.latent for one in alone]), rtol=1e-3, atol=5e-2 if family == "hart" else 1e-3
        )
        torch.testing.assert_close(ours.pixels, torch.cat([one.pixels for one in alone]), rtol=0, atol=2e-2 if family == "hart" else 1e-3)
        assert [codes.shape[0] for codes in ours.codes] == [images] * len(theirs.codes)
        for mine, other in zip(ours.report.stages, theirs.report.stages, strict=True):
            assert (mine.rows, mine.cfg_branches, mine.skipped) == (other.rows, other.cfg_branches, other.skipped)
            assert mine.sampling_seconds is None and mine.residual_seconds is None
            if method is not SPARSE:  # buckets pad the tokens
                assert (mine.tokens, mine.cost_share) == (other.tokens, other.cost_share)
        assert all(preview.latent.shape[0] == images for preview in seen)
        assert all(preview.done.tokens is None or len(preview.images()) == images for preview in seen)


def test_a_smaller_batch_that_comes_again_is_captured_for_itself(slow_host: None) -> None:
    pipe = with_graphs("var")
    pipe.warmup([1, 2, 3])
    assert [pipe([1, 2], seed=1).report.captured_batch for _ in range(3)] == [3, 2, 2]
    assert pipe(1, seed=1).report.captured_batch == 2  # the smallest that is enough
    assert pipe(1, seed=1, warmup=True).report.captured_batch == 1


def test_a_padded_batch_has_to_be_faster_than_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "HOST_SECONDS", 0.0)
    pipe = with_graphs("var")
    pipe.warmup([1, 2, 3])
    assert pipe(1, seed=1).report.engine == "eager"
    (kept,) = pipe.captures._captures.values()
    assert kept.replay_seconds > 0
    blocks, stages = len(pipe.model.blocks), 4
    monkeypatch.setattr(captures, "HOST_SECONDS", 1.0001 * kept.replay_seconds / (blocks * stages))
    assert pipe([1, 2], seed=1).report.engine == "graphs"
    assert pipe([1, 2], seed=1, method=SkipStages(1)).report.engine == "eager"


@pytest.mark.parametrize("seed", [lambda: torch.Generator().manual_seed(3)], ids=["generator"])
def test_a_stream_of_numbers_for_the_whole_batch_is_not_padded(seed: Callable[[], Any], slow_host: None) -> None:
    pipe = with_graphs("var")
    pipe.warmup([1, 2])
    assert pipe(1, seed=seed()).report.engine == "eager"
    assert pipe([1, 2], seed=seed()).report.engine == "graphs"


# --- memory


class FakeDevice:
    """Every capture holds 100 bytes, and the pool has scratch for the largest of them."""

    def __init__(self, pipe: Pipeline, patch: pytest.MonkeyPatch, fragmented: bool = False) -> None:
        self.captures, self.fragmented = pipe.captures, fragmented
        self.scratch, self.reserved, self.made = 1000, 0, False
        patch.setattr(DeviceMemory, "now", self.now)

    def now(self, device: torch.device) -> DeviceMemory:
        """Called before and after every capture."""
        live = len(self.captures) + self.made
        if not live:
            self.reserved = 0
        elif self.made and self.fragmented:
            self.reserved += self.scratch + 100
        elif self.made:
            self.reserved = max(self.reserved, self.scratch + 100 * live)
        self.made = not self.made
        return DeviceMemory(self.reserved, 100 * live)


ONE = {"guidance": 1.0}
TWO = {"guidance": 2.0}
THREE = {"guidance": 3.0}


@pytest.fixture
def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values alone never exceed these budgets."""
    monkeypatch.setattr(captures, "reserved_bytes", lambda *_: 0)


def test_the_least_recently_used_capture_leaves_first(monkeypatch: pytest.MonkeyPatch, counted_bytes: None) -> None:
    pipe = with_graphs("var", graph_memory=1250)
    FakeDevice(pipe, monkeypatch)
    assert (pipe.warmup(1, **ONE).bytes, pipe.warmup(1, **TWO).bytes) == (1100, 100)
    assert pipe.captures.bytes == 1200
    assert engines(pipe, 1, **ONE) == ["graphs"]
    assert pipe.warmup(1, **THREE).bytes == 100
    assert len(pipe.captures) == 2
    assert engines(pipe, 1, **ONE) == engines(pipe, 1, **THREE) == ["graphs"]
    assert engines(pipe, 1, 1, 1, 1, **TWO) == ["eager"] * 3 + ["graphs"]  # displaced once: twice as many requests
    assert pipe.captures.bytes == 1300  # what left is used again, and the pool grows no further
    pipe.captures.clear()
    assert pipe.captures.bytes == len(pipe.captures) == 0


def test_a_request_whose_capture_exceeds_the_budget_runs_eagerly_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, counted_bytes: None
) -> None:
    pipe = with_graphs("var", graph_memory=1050)
    FakeDevice(pipe, monkeypatch)
    assert engines(pipe, 1, 1, 1, 1) == ["eager"] * 4
    (record,) = caplog.records
    assert "will run eagerly" in record.getMessage() and "graph_memory" in record.getMessage()
    assert pipe.captures.bytes == len(pipe.captures) == 0
    with pytest.raises(OutOfMemory, match=r"graph_memory must be .* requests for 1 image\(s\)"):
        pipe.warmup(1)


def test_what_does_not_fit_beside_others_gets_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch, counted_bytes: None) -> None:
    pipe = with_graphs("var", graph_memory=1250)
    FakeDevice(pipe, monkeypatch, fragmented=True)
    pipe.warmup(1, **ONE)
    made = count_captures(monkeypatch)
    pipe.warmup(1, **TWO)
    assert (len(made), len(pipe.captures), pipe.captures.bytes) == (2, 1, 1100)
    assert engines(pipe, 1, **TWO) == ["graphs"]
    assert engines(pipe, 1, **ONE) == ["eager"]


def test_what_is_known_to_exceed_the_budget_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, made = with_graphs("var", graph_memory=1), count_captures(monkeypatch)
    assert engines(pipe, 1, 1, 1) == ["eager"] * 3
    assert not made


@pytest.mark.parametrize("given", [0, -1, 0.5, True, "1G"])
def test_graph_memory_is_a_number_of_bytes(given: Any) -> None:
    with pytest.raises(SettingError, match="graph_memory must be"):
        with_graphs("var", graph_memory=given)


def test_captures_may_keep_a_share_of_the_device() -> None:
    assert with_graphs("var").captures.budget == int(0.4 * 2**40)
    assert with_graphs("var", graph_memory=7).captures.budget == 7


# --- calls at the same time

WIDE = Schedule(((1, 1), (2, 2), (3, 5), (4, 7)))
MIXED: list[dict[str, Any]] = [
    {"images": images, "size": size, "method": method}
    for images, size, method in (
        (1, None, Method()),
        (2, None, FastVAR()),
        (3, WIDE, Method()),
        (1, WIDE, StageVAR()),
        (2, None, SPARSE),
        (1, None, ToMe(random=True)),
    )
]


def call(pipe: Pipeline, number: int) -> Output:
    settings = dict(MIXED[number % len(MIXED)])
    return pipe(prompts("infinity", settings.pop("images")), seed=number, **settings)


@pytest.mark.parametrize("engine", ["eager", "graphs"])
def test_threads_generate_what_one_thread_does(engine: str) -> None:
    pipe = with_graphs("infinity", engine=engine)
    if engine == "graphs":
        for settings in MIXED:
            settings = dict(settings)
            pipe.warmup(prompts("infinity", settings.pop("images")), **settings)
    expected = [call(pipe, number) for number in range(2 * len(MIXED))]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: call(pipe, number % len(expected)), range(2 * len(expected))))
    for number, output in enumerate(found):
        assert output.report.engine == engine
        assert_same_bits(output, expected[number % len(expected)])


def test_threads_on_the_cpu_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pipe, both = shared_pipeline("var"), threading.Barrier(2, timeout=30)
    expected = pipe([1, 2], seed=3)

    def wait(preview: Preview) -> None:
        if preview.done.stage.index == 1:
            both.wait()

    with ThreadPoolExecutor(2) as threads:
        for output in threads.map(lambda _: pipe([1, 2], seed=3, on_stage=wait), range(2)):
            assert_same_bits(output, expected)


def test_another_thread_waits_for_its_turn_and_is_replayed_then() -> None:
    pipe = with_graphs("var")
    pipe.warmup(1)
    order: list[str] = []
    inside, other_done = threading.Event(), threading.Event()

    def hold(preview: Preview) -> None:
        inside.set()
        if preview.done.stage.last:
            assert not other_done.wait(0.2)
            order.append("first")

    def other() -> str:
        assert inside.wait(30)
        report = pipe(2, seed=2).report
        order.append("second")
        other_done.set()
        return report.engine

    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(other)
        assert pipe(1, seed=1, on_stage=hold).report.engine == "graphs"
        assert second.result(30) == "graphs"
    assert order == ["first", "second"]


def test_a_call_from_inside_another_runs_eagerly_and_captures_nothing() -> None:
    pipe, inner = with_graphs("var"), list[str]()
    pipe(1, seed=1, on_stage=lambda preview: inner.extend(engines(pipe, 2, 3, warmup=True)))
    assert set(inner) == {"eager"}
    assert len(pipe.captures) == 0
    with pytest.raises(SettingError, match="on_stage"):
        pipe(1, seed=1, on_stage=lambda preview: pipe.warmup(2))
    assert engines(pipe, 1) == ["graphs"]


def test_tables_are_made_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, made = with_graphs("infinity", engine="eager"), []
    tables = type(pipe.model).schedule_tables
    monkeypatch.setattr(type(pipe.model), "schedule_tables", lambda model, schedule: made.append(schedule) or tables(model, schedule))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pipe._tables.of, [WIDE] * 16))
    assert made == [WIDE]


# --- images that keep all tokens


def test_graphs_have_room_for_images_that_keep_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, prompt = with_graphs("infinity"), prompts("infinity", 2)
    everything = SparseVAR(tau=0.0, first_stage=2)
    pipe.warmup(prompt, method=everything)
    for seed in (lambda: 3, lambda: torch.Generator().manual_seed(3)):
        ours = pipe(prompt, seed=seed(), method=everything)
        with Dispatched():
            theirs = shared_pipeline("infinity")(prompt, seed=seed(), method=everything)
        assert ours.report.engine == "graphs"
        assert_close("infinity", ours, theirs)
    assert len(pipe.captures) == 1


def test_a_threshold_reserves_all_cells_and_a_budget_what_it_keeps() -> None:
    pipe, prompt = with_graphs("infinity"), prompts("infinity", 1)
    dense, budget, threshold = (
        pipe(prompt, seed=1, method=method, warmup=True).report.planned_memory
        for method in (Method(), SparseVAR(keep=0.1, first_stage=2, alpha=None), SparseVAR(tau=1.0, first_stage=2, alpha=None))
    )
    assert budget < threshold == dense
