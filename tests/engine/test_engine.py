"""The parts of captures that need no GPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nextscale import DropGuidance, FastVAR, Method, SkipStages, SparseVAR, StageVAR, pipeline, report
from nextscale.device import Timer
from nextscale.engine.buffers import TEXT_BUCKETS, StaticInputs, StaticRng, text_bucket
from nextscale.engine.captures import obstacle
from nextscale.engine.executor import MAX_TABLES
from nextscale.engine.variants import BUCKETS, bucket_sizes
from nextscale.errors import SettingError
from nextscale.generate import begin, run_stage
from nextscale.guidance import Guidance, RampGuidance, ResolvedGuidance, StageGuidance
from nextscale.loading.load import random_pipeline
from nextscale.methods.combine import Combined
from nextscale.models.base import PromptInputs
from nextscale.models.context import Conditioning
from nextscale.models.text_context import TextInputs
from nextscale.pipeline import Pipeline
from nextscale.planning import Planner
from nextscale.request import Request
from nextscale.sampling import ImageRng
from nextscale.stage import Schedule
from nextscale_research.methods import StageVARVariants, ToMe
from tests.helpers.tape import Dispatched, Tape, play_graphs_on_the_cpu
from tests.helpers.tiny import (
    CLASS_FAMILIES,
    FAMILIES,
    KINDS,
    NO_GUIDANCE,
    SPECS,
    one_prompt,
    prompts,
    schedule_of,
    shared_pipeline,
    text_features,
)

CPU = torch.device("cpu")


def other_prompts(family: str) -> Any:
    """Returns other prompts than `prompts`, of other lengths."""
    return [5, 2] if family in CLASS_FAMILIES else text_features(family, (2, 4), seed=8)


def request_of(pipe: Pipeline, family: str, rng: Any = None, own: Any = None, method: Method = Method()) -> Request:  # noqa: B008
    schedule = schedule_of(family)
    guidance = ResolvedGuidance(pipe.settings.guidance, schedule, len(pipe.model.blocks))
    plans = method.forecast(pipe.model, schedule)
    read = pipe.reader.read(prompts(family, 2))
    return Request(read, None, schedule, guidance, pipe.settings.sampling, method, plans, rng, own)


def given(pipe: Pipeline, family: str, prompt: object) -> PromptInputs:
    empty = pipe.reader.empty()
    with torch.inference_mode():
        return pipe.model.prompt_inputs(pipe.reader.read(prompt), True, schedule_of(family), None if empty is None else empty.repeat(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_static_noise_and_prompts_give_the_images_of_the_request_that_is_loaded(family: str) -> None:
    """The first request fixes the buffers; the second one's numbers and prompts take their place."""
    pipe = shared_pipeline(family)
    first, second = prompts(family, 2), other_prompts(family)
    expected = pipe(second, seed=[5, 6], method=Method())
    rng, own = StaticRng(), StaticRng()
    fixed = StaticInputs(given(pipe, family, first), 2, text_bucket(1))
    request = request_of(pipe, family, rng, own)

    @torch.inference_mode()
    def latent() -> torch.Tensor:
        rng.rewind()
        own.rewind()
        canvas = pipe.tokenizer.canvas(request.schedule, 2)
        cond = pipe.model.condition_from(fixed.value, pipe.model.schedule_tables(request.schedule))
        state = begin(pipe.model, cond, canvas, request, Timer(CPU))
        for stage in request.schedule:
            run_stage(pipe.model, request, state, stage, None)
        return canvas.latent

    before = latent()
    rng.refill(ImageRng([5, 6], CPU))
    fixed.load(given(pipe, family, second))
    after = latent()
    torch.testing.assert_close(after, expected.latent, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(before, after)


def test_a_request_that_asks_for_other_noise_the_second_time_is_refused() -> None:
    rng = StaticRng()
    rng.exponential((2, 3), CPU)
    rng.rewind()
    with pytest.raises(RuntimeError, match=r"noise must be exponential \[2, 3\].*got uniform \[2, 3\]"):
        rng.uniform((2, 3), CPU)


def test_stages_share_the_memory_of_their_numbers() -> None:
    rng = StaticRng()
    for stage in range(3):
        for _ in range(stage):
            rng.exponential((2, 10**stage), CPU)
        rng.uniform((2, 2), CPU)
        rng.end_stage()
    rng.share_memory()
    rng.rewind()
    expected, bytes_held = ImageRng([5, 6], CPU), set()
    given = ImageRng([5, 6], CPU)
    for stage in range(3):
        rng.refill(given, stage)
        found = [rng.exponential((2, 10**stage), CPU) for _ in range(stage)]
        for numbers in found:
            assert torch.equal(numbers, expected.exponential((2, 10**stage), CPU))
        found.append(rng.uniform((2, 2), CPU))
        assert torch.equal(found[-1], expected.uniform((2, 2), CPU))
        bytes_held |= {numbers.untyped_storage().data_ptr() for numbers in found}
        assert {numbers.untyped_storage().nbytes() for numbers in found} == {4 * (2 * 200 + 4)}
    assert len(bytes_held) == 1


def test_texts_are_padded_to_few_widths() -> None:
    assert [text_bucket(tokens) for tokens in (0, 1, 128, 129, 512, 600, 601)] == [0, 128, 128, 512, 512, 600, 608]
    assert list(TEXT_BUCKETS) == sorted(TEXT_BUCKETS)


def test_equal_methods_have_one_capture() -> None:
    pairs = [(Method(), Method()), (FastVAR({9: 0.4}), FastVAR({9: 0.4})), (Combined((StageVAR(),)), Combined((StageVAR(),)))]
    for one, other in pairs:
        assert one == other
        assert hash(one) == hash(other)
    assert Method() != FastVAR()
    assert FastVAR() != Method()
    assert FastVAR({9: 0.4}) != FastVAR({9: 0.5})


def test_methods_tell_whether_they_are_data_dependent() -> None:
    assert not any(method.data_dependent for method in (Method(), FastVAR(), StageVAR()))
    assert SparseVAR().data_dependent
    assert not SparseVAR(keep=0.3).data_dependent
    assert not Combined((SparseVAR(keep=0.3), StageVAR(alphas=()))).data_dependent
    assert Combined((SparseVAR(), StageVAR(alphas=()))).data_dependent


def test_bucket_sizes_are_few_and_reach_all_cells() -> None:
    assert bucket_sizes(4096)[0] == 4096
    assert len(bucket_sizes(4096)) == 24
    for kept in range(1024, 4097):
        assert min(size for size in bucket_sizes(4096) if size >= kept) / kept < 1.13
    assert list(bucket_sizes(4096)) == sorted(bucket_sizes(4096), reverse=True)
    assert bucket_sizes(4) == (4, 3, 2, 1)


def test_capturing_without_a_gpu_is_refused() -> None:
    pipe = shared_pipeline("var")
    assert pipe.engine == "eager"
    with pytest.raises(SettingError, match="the engine is 'eager'"):
        pipe.warmup(1)
    with pytest.raises(SettingError, match="need a GPU, and the model is on cpu"):
        with_graphs("var").warmup(1)
    with pytest.raises(SettingError, match="engine must be .*'fast'"):
        Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, engine="fast")  # type: ignore[arg-type]


# --- captures, played on the CPU

CAPTURED_METHODS = (
    Method(),
    SkipStages(last=1),
    FastVAR(),
    StageVAR(),
    ToMe(),
    SparseVAR(tau=0.95, first_stage=2),
    SparseVAR(0.95, first_stage=2, blocks=(0, 2), as_released=True),
    SparseVAR(keep=0.3, first_stage=2),
    SparseVAR(keep={2: 0.5}, metric="logits", alpha=None),
    SparseVAR(keep=0.3, first_stage=2, alpha=3, anchors="content"),
    SparseVAR(tau=0.95, first_stage=2, alpha=3, anchors="content"),
    Combined((SparseVAR(keep=0.3, first_stage=2), StageVAR(alphas=(), guidance_off=2))),
    Combined((SparseVAR(tau=0.95, first_stage=2), StageVAR(alphas=(), guidance_off=2))),
    Combined((SparseVAR(tau=0.95, first_stage=2), DropGuidance(2, fade=1))),
    Combined((SparseVAR(tau=0.95, first_stage=2), SkipStages(last=1))),
    Combined((SparseVAR(tau=0.95, first_stage=2, metric="image"), SkipStages(stages=(1,)))),  # anchors have nothing to compare at stage 2
    DropGuidance(3, fade=2),
    StageVAR(guidance_off=2, ranks=0.3, kept_rows="cond"),
    Combined((Combined((SparseVAR(tau=0.95, first_stage=2),)), StageVAR(alphas=(), guidance_off=99))),  # as lists inside lists make it
)
DIFFERENT = 6  # the first of them; the others are these with other settings, or together


def with_graphs(family: str) -> Pipeline:
    pipe = shared_pipeline(family)
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="graphs")


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for number, method in enumerate(CAPTURED_METHODS) for family in (FAMILIES if number < DIFFERENT else KINDS)],
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_replays_generate_what_eager_generation_does(family: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe, eager = with_graphs(family), shared_pipeline(family)
    first, second = prompts(family, 2), other_prompts(family)
    pipe.warmup(first, method=method)
    for prompt, seeds in ((second, [5, 6]), (first, [3, 4])):
        ours = pipe(prompt, seed=seeds, method=method)
        with Dispatched():
            theirs = eager(prompt, seed=seeds, method=method)
        assert (ours.report.engine, theirs.report.engine) == ("graphs", "eager")
        for mine, other in zip(ours.codes, theirs.codes, strict=True):
            if mine.shape == other.shape:  # buckets pad tokens to other numbers
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-2 if family == "hart" else 1e-3)


ZERO_STRENGTH = (
    SparseVAR(tau=0.0),
    SparseVAR(keep=1.0),
    SparseVAR(keep={2: 1.0}, metric="logits", alpha=None),
    SparseVAR(tau=0.0, blocks=(0, 2), as_released=True),
    SparseVAR(tau=0.0, alpha=3, anchors="content"),
    DropGuidance(99),
    StageVAR(guidance_off=99, alphas=(), kept_rows="cond"),
    FastVAR({3: 0.0}),
    ToMe(ratio=0),
)


@pytest.mark.parametrize("family", KINDS)
def test_replays_of_zero_strength_are_dense_bit_for_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe, prompt = with_graphs(family), prompts(family, 2)
    for method in (Method(), *ZERO_STRENGTH):
        pipe.warmup(prompt, method=method)
    dense = pipe(prompt, seed=[3, 4])
    for method in ZERO_STRENGTH:
        ours = pipe(prompt, seed=[3, 4], method=method)
        assert ours.report.engine == "graphs"
        assert torch.equal(ours.pixels, dense.pixels), method.label


def test_a_budget_is_captured_once_per_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget has one graph per stage, like dense generation; a threshold has one per bucket."""
    play_graphs_on_the_cpu(monkeypatch)
    methods = (Method(), SparseVAR(keep=0.3, first_stage=2), SparseVAR(tau=0.95, first_stage=2))
    dense, budget, threshold = (with_graphs("var").warmup(prompts("var", 2), method=method).graphs for method in methods)
    assert dense == budget < threshold


def texts(family: str, lengths: tuple[int, ...], seed: int) -> Any:
    return [(seed + length) % 10 for length in lengths] if family in CLASS_FAMILIES else text_features(family, lengths, seed)


def assert_replayed(pipe: Pipeline, eager: Pipeline, prompt: Any, seed: Any, **request: Any) -> None:
    """Requires a replay with the images of eager generation. `seed` creates a seed for each of the two."""
    ours = pipe(prompt, seed=seed(), **request)
    with Dispatched():
        theirs = eager(prompt, seed=seed(), **request)
    assert (ours.report.engine, theirs.report.engine) == ("graphs", "eager")
    assert ours.report.cost_share == theirs.report.cost_share
    for mine, other in zip(ours.codes, theirs.codes, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)
    torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-2 if "hart" in pipe.name else 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("images", [1, 3])
def test_a_capture_serves_other_prompts_and_negative_prompts(family: str, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are longer and shorter than in the capture, whose prompts are repeated at the end."""
    play_graphs_on_the_cpu(monkeypatch)
    pipe, eager = with_graphs(family), shared_pipeline(family)
    pipe.warmup(prompts(family, images))
    requests: list[dict[str, Any]] = [
        {"prompt": texts(family, (12, 2, 7)[:images], 8)},
        {"prompt": texts(family, (1, 8, 3)[:images], 6), "negative": texts(family, (11, 4, 2)[:images], 7)},
        {"prompt": texts(family, (5, 5, 5)[:images], 4), "negative": texts(family, (3,), 5)},
        {"prompt": prompts(family, images)},
    ]
    for number, request in enumerate(requests):
        assert_replayed(pipe, eager, seed=lambda number=number: 20 + number, **request)


@pytest.mark.parametrize("method", [Method(), StageVAR(ranks=0.177)], ids=lambda method: method.label)
@pytest.mark.parametrize(
    ("family", "changes"), [("star_refined", {"as_released": True}), ("infinity", {"chunks": 3, "level_every_chunk": True})]
)
@pytest.mark.parametrize("guided", [True, False])
def test_captures_of_odd_models(
    family: str, changes: dict[str, Any], guided: bool, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    spec = replace(SPECS[family], model=replace(SPECS[family].model, **changes))  # type: ignore[type-var]
    eager = random_pipeline(spec)
    pipe = Pipeline(eager.model, eager.tokenizer, eager.reader, eager.settings, eager.name, engine="graphs")
    request: dict[str, Any] = {"method": method, "guidance": None if guided else NO_GUIDANCE[family]}
    pipe.warmup(texts(family, (4,), 1), **request)
    for length in (9, 2):
        assert_replayed(pipe, eager, texts(family, (length,), 3), lambda length=length: length, **request)


@pytest.mark.parametrize("method", [StageVAR(ranks=0.177), ToMe(random=True), FastVAR()], ids=lambda method: method.label)
def test_one_stream_of_numbers_for_images_and_method_is_used_in_eager_order(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe = with_graphs("infinity")
    pipe.warmup(prompts("infinity", 2), method=method)
    assert_replayed(pipe, shared_pipeline("infinity"), prompts("infinity", 2), lambda: torch.Generator().manual_seed(4), method=method)


class OutsideGraphs(TorchDispatchMode):
    """Counts operators outside replays."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count, self.replaying = 0, False
        replay = Tape.replay

        def uncounted(tape: Tape) -> None:
            self.replaying = True
            replay(tape)
            self.replaying = False

        patch.setattr(Tape, "replay", uncounted)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += not self.replaying
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_launches_nothing_for_single_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    spec, launched = SPECS[family], []
    for depth in (2, 6):
        pipe = random_pipeline(replace(spec, model=replace(spec.model, depth=depth)))  # type: ignore[type-var]
        pipe = Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="graphs")
        pipe.warmup(prompts(family, 1))
        with monkeypatch.context() as patch, OutsideGraphs(patch) as outside:
            pipe(prompts(family, 1), seed=2)
        launched.append(outside.count)
    assert launched[0] == launched[1]
    assert launched[0] < 45 + 15 * len(schedule_of(family))


@pytest.mark.parametrize("method", (*CAPTURED_METHODS[:DIFFERENT], *CAPTURED_METHODS[-2:]), ids=lambda method: method.label)
def test_a_capture_does_not_hold_the_condition(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs write and read it; the decoder and other captures use the memory as well."""
    play_graphs_on_the_cpu(monkeypatch)

    def conditions() -> int:
        gc.collect()
        return sum(type(known) is Conditioning for known in gc.get_objects())

    pipe, before = with_graphs("infinity"), conditions()
    pipe.warmup(prompts("infinity", 2), method=method)
    assert conditions() == before
    pipe(prompts("infinity", 2), seed=1, method=method)
    assert conditions() == before


def test_what_one_request_leaves_behind_shorter_texts_harms_no_other() -> None:
    text = TextInputs(torch.full((9, 4), float("nan")), (2, 7))
    fixed = StaticInputs(PromptInputs(text=text), 2, 16)
    fixed.load(PromptInputs(text=TextInputs(torch.ones(4, 4), (3, 1))))
    room = fixed.value.text
    assert room is not None and room.rows.isfinite().all()
    context = room.context()
    assert torch.equal(context.pad(room.rows)[:, :, 0].bool(), context.mask[:, 0, 0])
    assert context.lengths.tolist() == [3, 1]


def test_tables_of_the_last_schedules_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, made = random_pipeline(SPECS["infinity"]), []
    tables = type(pipe.model).schedule_tables
    monkeypatch.setattr(type(pipe.model), "schedule_tables", lambda model, schedule: made.append(schedule) or tables(model, schedule))
    sizes = [Schedule((1, side)) for side in range(2, 4 + MAX_TABLES)]
    for size in (sizes[0], sizes[0], *sizes, sizes[-1]):
        pipe(prompts("infinity", 1), size=size, seed=0)
    assert made == sizes
    pipe(prompts("infinity", 1), size=sizes[0], seed=0)
    assert made == [*sizes, sizes[0]]
    assert len(pipe._tables) == MAX_TABLES


def test_nothing_is_counted_while_the_device_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits when all else is done: costs are counted and outputs copied before."""
    order: list[str] = []
    pipe = random_pipeline(SPECS["var"])
    for owner, name in ((Planner, "cost"), (report, "peak_memory"), (report, "require_finite")):
        known = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, name=name, known=known: order.append(name) or known(*given))
    pipe(1, seed=0)
    assert order == ["cost", "cost", "peak_memory", "require_finite"]


def test_the_latent_is_checked_before_the_output_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch of the check would add to the peak of a batch whose pixels, latent and codes are there twice."""
    order: list[str] = []
    pipe = random_pipeline(SPECS["var"])
    latent = pipe(1, seed=0).latent.shape

    def noted(name: str, known: Any) -> Any:
        def run(tensor: Any, *more: Any) -> Any:
            order.extend([name] if name == "codes" or tensor.shape == latent else [])
            return known(tensor, *more)

        return run

    for owner, attribute, name in ((pipeline, "all_finite", "check"), (torch.Tensor, "clone", "latent"), (pipeline, "copied", "codes")):
        monkeypatch.setattr(owner, attribute, noted(name, getattr(owner, attribute)))
    pipe(1, seed=0)
    assert order == ["check", "latent", "codes"]


@pytest.mark.parametrize(("family", "skipped_graphs"), [("infinity", 0), ("var", 0), ("flexvar", 2)])
def test_skipped_stages_have_a_graph_only_where_they_change_the_canvas(
    family: str, skipped_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexVAR's canvas grows with the stage. Besides the stages that run there are the graphs of the condition and of the decoder."""
    play_graphs_on_the_cpu(monkeypatch)
    made = with_graphs(family).warmup(prompts(family, 1), method=SkipStages(last=2))
    assert made.graphs == len(schedule_of(family)) - 2 + skipped_graphs + 2


def test_captures_do_not_disturb_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe = with_graphs("infinity")
    kinds = [(2, Method()), (1, Method()), (2, SparseVAR(tau=0.95, first_stage=2)), (1, FastVAR()), (2, StageVAR())]
    for images, method in kinds:
        pipe.warmup(prompts("infinity", images), method=method)
    first = [pipe(prompts("infinity", images), seed=9, method=method).pixels for images, method in kinds]
    for turn in range(15):
        images, method = kinds[turn * 3 % len(kinds)]
        again = pipe(prompts("infinity", images), seed=9, method=method)
        assert again.report.engine == "graphs"
        assert torch.equal(again.pixels, first[turn * 3 % len(kinds)])


@pytest.mark.parametrize("family", ["var", "infinity"])
def test_the_report_tells_the_padding_of_a_bucket(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager generation of one image runs exactly the needed tokens; a replay runs the next bucket size and reports the excess."""
    play_graphs_on_the_cpu(monkeypatch, buckets=(32, 16))
    pipe, method = with_graphs(family), SparseVAR(tau=0.97, first_stage=2)
    prompt = prompts(family, 1)
    pipe.warmup(prompt, method=method)
    with Dispatched():
        needed = shared_pipeline(family)(prompt, seed=3, method=method).report
    replayed = pipe(prompt, seed=3, method=method).report
    assert [stage.padding for stage in needed.stages] == [0] * len(needed.stages)
    assert needed.padding == 0
    for ours, theirs in zip(replayed.stages, needed.stages, strict=True):
        sizes = bucket_sizes(ours.height * ours.width)
        assert ours.tokens == min(size for size in sizes if size >= theirs.tokens)
        assert ours.padding == pytest.approx(1 - theirs.tokens / ours.tokens)
    assert 0 < replayed.padding < 1
    assert replayed.to_dict()["padding"] == replayed.padding


@pytest.mark.parametrize("tau", [0.8, 0.9])
def test_what_anchors_propagate_to_is_the_same_in_every_bucket_and_batch(tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """STAR samples for tokens that were left out; some stages of these images leave out none."""
    play_graphs_on_the_cpu(monkeypatch)
    pipe, eager, method = with_graphs("star_refined"), shared_pipeline("star_refined"), SparseVAR(tau=tau, first_stage=1)
    prompt = prompts("star_refined", 2)
    pipe.warmup(prompt, method=method)
    for seed in range(6):
        ours = pipe(prompt, seed=[seed, seed + 10], method=method)
        with Dispatched():
            theirs = eager(prompt, seed=[seed, seed + 10], method=method)
            alone = [eager(one_prompt("star_refined", image), seed=seed + 10 * image, method=method) for image in range(2)]
        assert ours.report.engine == "graphs"
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(theirs.latent, torch.cat([one.latent for one in alone]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scales", [RampGuidance(False, (1,), 3.0), StageGuidance(False, (1,), (1.0, 2.0, 3.0, 4.0, 5.0))])
def test_guidance_of_another_kind_needs_another_capture(scales: Guidance, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other kind guides hidden states, with the same scales, starting with 1."""
    play_graphs_on_the_cpu(monkeypatch)
    pipe, prompt = with_graphs("infinity"), prompts("infinity", 2)
    pipe.warmup(prompt, guidance=replace(scales, logits=True))
    assert pipe(prompt, seed=1, guidance=replace(scales, logits=True)).report.engine == "graphs"
    assert pipe(prompt, seed=1, guidance=scales).report.engine == "eager"


def test_captures_are_forgotten_when_weights_move(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    plain = random_pipeline(SPECS["var"])
    pipe = Pipeline(plain.model, plain.tokenizer, plain.reader, plain.settings, plain.name, engine="graphs")
    pipe.warmup(1)
    assert pipe(1, seed=1).report.engine == "graphs"
    pipe.model.head.weight.data = pipe.model.head.weight.data.clone()
    assert pipe(1, seed=1).report.engine == "eager"
    assert "weights moved" in caplog.text
    pipe.warmup(1)
    assert pipe(1, seed=1).report.engine == "graphs"


def test_a_request_inside_another_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures share their memory."""
    play_graphs_on_the_cpu(monkeypatch)
    pipe = with_graphs("var")
    pipe.warmup(1)
    alone, inner = pipe(1, seed=1), []
    outer = pipe(1, seed=1, on_stage=lambda preview: inner.append(pipe(2, seed=2).report.engine))
    assert outer.report.engine == "graphs" and set(inner) == {"eager"}
    assert torch.equal(outer.pixels, alone.pixels)
    assert pipe(1, seed=1).report.engine == "graphs"
    with pytest.raises(ZeroDivisionError):
        pipe(1, seed=1, on_stage=lambda preview: 1 / 0)
    assert pipe(1, seed=1).report.engine == "graphs"


@pytest.mark.parametrize("settings", [{"ranks": "measured"}, {"variant": "least_squares"}, {"variant": "svd"}])
def test_what_reads_from_the_device_is_not_captured(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method = StageVARVariants(**settings)
    play_graphs_on_the_cpu(monkeypatch)
    pipe, prompt = with_graphs("infinity"), prompts("infinity", 1)
    pipe.warmup(prompt)
    for asked in (method, Combined((SkipStages(), method))):
        assert not asked.capturable
        assert pipe(prompt, seed=1, method=method).report.engine == "eager"
    assert not caplog.text
    monkeypatch.undo()
    reason = obstacle(torch.device("cuda"), request_of(pipe, "infinity", method=method))
    assert "reads from the device between stages and cannot be captured" in str(reason)


@pytest.mark.parametrize("family", ["hart", "star"])
def test_bucket_sizes_share_the_memory_of_their_codes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures of codes are large, and there are two dozen bucket sizes."""
    play_graphs_on_the_cpu(monkeypatch, BUCKETS)
    pipe = with_graphs(family)
    pipe.warmup(prompts(family, 2), method=SparseVAR(tau=0.95, first_stage=2))
    (kept,) = pipe.captures._captures.values()
    by_size = [stage.graphs.values() for stage in kept.request.stages if stage.counter is not None]
    assert by_size
    for variants in by_size:
        assert len(variants) > 3
        assert len({variant.done.codes.data_ptr() for variant in variants if variant.done.codes is not None}) == 1


def test_previews_show_every_stage_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe, prompt = with_graphs("infinity"), prompts("infinity", 2)
    pipe.warmup(prompt)
    shown: list[torch.Tensor] = []
    known: list[torch.Tensor] = []
    pipe(prompt, seed=1, on_stage=lambda preview: shown.append(preview.latent))
    pipe(prompt, seed=2)  # writes where the first one did
    with Dispatched():
        shared_pipeline("infinity")(prompt, seed=1, on_stage=lambda preview: known.append(preview.latent))
    assert len(shown) == len(known) > 1
    for ours, theirs in zip(shown, known, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("var", Method(), {"suppressed_codes": (1, 3)}),
        ("infinity", ToMe(random=True), {}),
        ("infinity", Combined((FastVAR({2: 1.0}), ToMe(random=True, stages=(2, 3)))), {}),
        ("infinity", Combined((SparseVAR(tau=0.5, metric="logits", first_stage=1), ToMe(random=True))), {}),
        ("star_refined", SparseVAR(tau=0.3, first_stage=2), {}),
    ],
)
def test_captures_read_all_that_a_method_asks_for(
    family: str, method: Method, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All variants of a stage read the same constants, and only a refill writes them."""
    play_graphs_on_the_cpu(monkeypatch)
    pipe = with_graphs(family)
    pipe.warmup(prompts(family, 2), method=method, **settings)
    (kept,) = pipe.captures._captures.values()
    tapes = [[variant.graph for variant in stage.graphs.values() if isinstance(variant.graph, Tape)] for stage in kept.request.stages]
    for buffer in kept.request.method_rng._buffers:
        place = buffer.numbers.untyped_storage().data_ptr()

        def there(values: object, place: int = place) -> bool:
            tensors = values if isinstance(values, tuple) else (values,)
            return any(isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == place for value in tensors)

        readers = [[any(there(args) for _, args, _, _ in tape.ops) for tape in stage] for stage in tapes]
        assert any(stage and all(stage) for stage in readers)
        assert not [op for stage in tapes for tape in stage for op, args, _, out in tape.ops if there(out) and not there(args)]
