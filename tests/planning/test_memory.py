"""Planned memory: a run allocates the reserved memory, and a run that needs more generates the same images."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale import FastVAR, Method, SparseVAR, StagePlan, StageVAR
from nextscale.cache import CacheSpec, LayerCache, StageKeys, StageMemory, Workspace
from nextscale.loading.presets import MODELS, build_model, build_tokenizer
from nextscale.methods.combine import Combined
from nextscale.methods.drop_guidance import DropGuidance
from nextscale.methods.method import DENSE, MethodRun, RunSetup
from nextscale.methods.skip import SkipStages
from nextscale.pipeline import Output, Preview
from nextscale.planning.cost import Workload, as_run
from nextscale.planning.memory import ASSUMED_KEPT, request_memory, reserved_cache, stored_bytes
from nextscale.stage import Schedule, Tokens
from nextscale_research.methods import StageVARVariants, ToMe
from tests.helpers import tiny
from tests.research.test_peers import three_routes

IMAGES = 2


class SeenWorkspace(Workspace):
    """Calls back when it is allocated, before the first layer frees memory."""

    def __init__(self, spec: CacheSpec, seen: Callable[[], None]) -> None:
        super().__init__(spec)
        self.seen = seen

    def pair(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        pair = super().pair(rows, tokens)
        self.seen()
        return pair


@dataclass(frozen=True)
class Reserving(Method):
    """Allocates caches of given sizes and records their size."""

    exclusive = frozenset({"cache"})
    spec: CacheSpec
    caches: list[LayerCache] = field(default_factory=list)
    last_stage: list[int] = field(default_factory=list)  # bytes in every layer of it

    def start(self, setup: RunSetup) -> MethodRun:
        self.caches.clear()
        self.last_stage.clear()
        return ReservingRun(self)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches) + self.caches[0].workspace.nbytes


@dataclass(frozen=True)
class ReservingRun(MethodRun):
    seen: Reserving

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        sizes, caches = self.seen.spec, self.seen.caches
        workspace = caches[0].workspace if caches else SeenWorkspace(sizes, lambda: self.seen.last_stage.append(self.seen.nbytes))
        caches.append(LayerCache(sizes.layer(len(caches)), workspace))
        return caches[-1]


@dataclass(frozen=True)
class Seen:
    output: Output
    nbytes: dict[int, int]  # allocated when a stage has run, or when the last one begins
    last_stage: list[int]  # in every layer of it
    plans: tuple[StagePlan, ...]  # with the tokens that ran


def generated(family: str, method: Method, spec: CacheSpec, **settings: Any) -> Seen:
    pipe = tiny.shared_pipeline(family)
    reserving, nbytes, plans = Reserving(spec), {}, []

    def look(preview: Preview) -> None:
        done = preview.done
        plans.append(as_run(pipe.model, done.stage, done.plan, done.num_tokens))
        if not done.skipped:
            nbytes[done.stage.index] = reserving.last_stage[0] if reserving.last_stage else reserving.nbytes

    output = pipe(tiny.prompts(family, IMAGES), seed=5, method=Combined((method, reserving)), on_stage=look, **settings)
    return Seen(output, nbytes, reserving.last_stage, tuple(plans))


def reserved(family: str, method: Method, rows: int = 2 * IMAGES) -> CacheSpec:
    """Returns the sizes that a request reserves."""
    model, schedule = tiny.shared_pipeline(family).model, tiny.schedule_of(family)
    return reserved_cache(model, schedule, method.forecast(model, schedule, rows > IMAGES), IMAGES, rows)


def dense_spec(family: str, rows: int = 2 * IMAGES) -> CacheSpec:
    return tiny.shared_pipeline(family).model.cache_spec(tiny.schedule_of(family), rows)


FIXED = {
    "dense": Method(),
    "skip": SkipStages(last=1),
    "fastvar": FastVAR(),
    "fastvar, last stage skipped": FastVAR(ratios={2: 0.5, 3: 1.0}),
    "fastvar, some layers": FastVAR(layers=(1, 2)),
    "stagevar": StageVAR(),
    "stagevar, early": StageVAR(guidance_off=1, alphas={2: 0.96, 3: 0}),
    "guidance off": StageVAR(guidance_off=2, alphas=()),
    "conditional rows alone": DropGuidance(2, fade=1),
    "tome": ToMe(),
    "tome, feed-forward": ToMe(sublayers=("feed_forward",)),
    "fastvar + guidance off": Combined((FastVAR(), StageVAR(guidance_off=2, alphas=()))),
}
every_family = pytest.mark.parametrize("family", tiny.FAMILIES)
every_method = pytest.mark.parametrize("method", FIXED.values(), ids=FIXED)


# --- reserved memory equals allocated memory


@every_family
@every_method
def test_reserved_bytes_are_the_bytes_allocated(family: str, method: Method) -> None:
    """After every stage, and so at the peak; the images are those that are generated with room for everything, bit for bit."""
    spec = reserved(family, method)
    seen = generated(family, method, spec)
    assert seen.nbytes == {stage.stage: spec.bytes_at(stage.stage) for stage in spec.stages}
    assert max(seen.nbytes.values()) == spec.bytes
    assert seen.last_stage == [spec.bytes_at(spec.final) - spec.freed_bytes(layer) for layer in range(spec.layers)]
    tiny.assert_same_bits(seen.output, generated(family, method, dense_spec(family)).output)


@every_family
def test_a_request_without_guidance_reserves_its_rows(family: str) -> None:
    """StageVAR has none to drop then."""
    for method in (Method(), FastVAR(), StageVAR()):
        spec = reserved(family, method, IMAGES)
        seen = generated(family, method, spec, guidance=tiny.NO_GUIDANCE[family])
        assert seen.nbytes == {stage.stage: spec.bytes_at(stage.stage) for stage in spec.stages}


@every_method
@pytest.mark.parametrize("guided", [True, False])
def test_a_request_reserves_by_its_forecast(method: Method, guided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation creates caches of the sizes that the tests above assume."""
    made: list[CacheSpec] = []

    def seen(*arguments: Any) -> CacheSpec:
        made.append(reserved_cache(*arguments))
        return made[-1]

    monkeypatch.setattr("nextscale.generate.reserved_cache", seen)
    guidance = None if guided else tiny.NO_GUIDANCE["var"]
    tiny.shared_pipeline("var")(tiny.prompts("var", IMAGES), seed=5, method=method, guidance=guidance)
    assert made == [reserved("var", method, IMAGES * (2 if guided else 1))]


def test_a_method_with_its_own_caches_is_told_what_is_reserved() -> None:
    told: list[CacheSpec] = []

    class OwnCache(Method):
        exclusive = frozenset({"cache"})

        def start(self, setup: RunSetup) -> MethodRun:
            return OwnCacheRun()

    class OwnCacheRun(MethodRun):
        def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
            told.append(spec)
            return LayerCache(spec, workspace)

    tiny.shared_pipeline("var")(tiny.prompts("var", IMAGES), seed=5, method=[SkipStages(last=1), OwnCache()])
    assert told == [reserved("var", SkipStages(last=1), 2 * IMAGES).layer(number) for number in range(tiny.DEPTH)]


def test_what_each_saving_saves() -> None:
    """Stages of 1, 4, 9 and 16 tokens, 3 layers, 2 images with two rows each; 2 x 64 channels x 4 bytes = 512 bytes a token."""
    keys = {name: reserved("var", method) for name, method in FIXED.items()}
    assert keys["dense"].bytes == keys["tome, feed-forward"].bytes == 512 * 4 * (3 * 14 + 30)
    assert keys["skip"].bytes == 512 * 4 * (3 * 5 + 14)
    assert keys["guidance off"].bytes == max(512 * 4 * 3 * 5, 512 * 2 * (3 * 14 + 30))
    # 9 - 3 of stage 2 and 16 - 8 of stage 3 run in all layers, and in one of the three.
    assert keys["fastvar"].bytes == 512 * 4 * (3 * (1 + 4 + 6) + 1 + 4 + 6 + 8)
    assert keys["fastvar, some layers"].bytes == 512 * 4 * (14 + 11 + 14 + 30)
    assert keys["fastvar, last stage skipped"].bytes == 512 * 4 * (3 * 5 + 5 + 9 - 4)
    assert [stage.rows for stage in keys["stagevar, early"].stages] == [4, 2, 2]
    assert reserved("hart", SkipStages(last=1)).bytes == 512 * 4 * (3 * (11 + 5) + 11 + 14)  # with its text


@every_family
def test_every_method_reserves_at_most_what_dense_generation_does(family: str) -> None:
    dense = dense_spec(family).bytes
    assert reserved(family, Method()).bytes == dense
    for name, method in FIXED.items():
        assert reserved(family, method).bytes <= dense, name


# --- data-dependent methods

DATA_DEPENDENT = {
    "sparsevar": SparseVAR(tau=0.95, first_stage=2),
    "sparsevar, everything": SparseVAR(tau=0.0, first_stage=1),
    "sparsevar, hardly anything": SparseVAR(tau=1.0, first_stage=1, alpha=None),
    "measured ranks": StageVARVariants(alphas={2: 0.96, 3: 0.9}, variant="svd"),
    "sparsevar + guidance off": Combined((SparseVAR(tau=0.9, first_stage=2), StageVAR(guidance_off=2, alphas=()))),
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new memory with arbitrary values."""
    allocate = CacheSpec.allocate

    def filled(self: CacheSpec, tokens: int) -> tuple[Tensor, Tensor]:
        keys, values = allocate(self, tokens)
        return keys.fill_(torch.nan), values.fill_(torch.nan)

    monkeypatch.setattr(CacheSpec, "allocate", filled)


@every_family
@pytest.mark.parametrize("method", DATA_DEPENDENT.values(), ids=DATA_DEPENDENT)
def test_what_runs_more_than_was_assumed_grows(family: str, method: Method, poisoned: None) -> None:
    """The size is between the reserved or computed tokens and dense generation; the images are equal bit for bit."""
    spec = reserved(family, method)
    settings = {"smooth": False} if family == "hart" else {}
    seen = generated(family, method, spec, **settings)
    pipe = tiny.shared_pipeline(family)
    ran = reserved_cache(pipe.model, tiny.schedule_of(family), seen.plans, IMAGES, 2 * IMAGES)
    for stage in ran.stages:
        least = max(spec.bytes_at(stage.stage, workspace=False), ran.bytes_at(stage.stage) if stage.stage == ran.final else 0)
        assert least <= seen.nbytes[stage.stage] <= dense_spec(family).bytes_at(stage.stage)
    tiny.assert_same_bits(seen.output, generated(family, method, dense_spec(family), **settings).output)


@every_family
def test_what_runs_less_takes_what_was_reserved(family: str) -> None:
    method = DATA_DEPENDENT["sparsevar, hardly anything"]
    spec = reserved(family, method)
    assert generated(family, method, spec).nbytes == {stage.stage: spec.bytes_at(stage.stage) for stage in spec.stages}


def test_growing_to_everything_takes_what_dense_generation_takes() -> None:
    method = DATA_DEPENDENT["sparsevar, everything"]
    spec = reserved("var", method)
    assert spec.bytes == dense_spec("var").bytes
    assert generated("var", method, spec).nbytes[3] == dense_spec("var").bytes


def test_memory_is_reserved_for_all_cells() -> None:
    """Independent of the number of kept cells; budgets reserve the tokens that they compute."""
    method = SparseVAR(first_stage=1)
    assert [stage.tokens for stage in reserved("var", method).stages] == [(count,) * 3 for count in (1, 4, 9, 16)]


# --- plans that are not kept


def stage_keys(*tokens: int, rows: int = 1) -> tuple[StageKeys, ...]:
    return tuple(StageKeys(stage, rows, (count,)) for stage, count in enumerate(tokens))


def cache_of(planned: Sequence[StageKeys], sides: tuple[int, ...] = (1, 2, 3, 4), rows: int = 1) -> LayerCache:
    spec = CacheSpec(1, rows, 2, 4, Schedule(sides), torch.float32, torch.device("cpu"), planned=tuple(planned))
    return LayerCache(spec, Workspace(spec))


def append(cache: LayerCache, stage: int, count: int | None = None, rows: int = 1) -> Tensor:
    place = cache.spec.schedule[stage]
    numbers = torch.randn(rows, place.cells if count is None else count, 2, 4)
    index = None if count is None else torch.arange(count).expand(rows, -1)
    keys, values, _ = cache.append(numbers, numbers, Tokens(place, index)).filled
    assert torch.equal(keys, values)
    assert torch.equal(keys[:, -numbers.shape[1] :], numbers)
    return keys


def test_a_stage_after_the_last_planned_one_is_refused() -> None:
    """Its keys are gone: better no image than a wrong one."""
    cache = cache_of(stage_keys(1, 4, 9))
    for stage in range(3):
        append(cache, stage)
    with pytest.raises(ValueError, match="stage 3 must not run"):
        append(cache, 3)


def test_the_last_stage_frees_what_a_layer_has_kept_and_cannot_run_again() -> None:
    cache = cache_of(stage_keys(1, 4, 9))
    first = append(cache, 0)
    append(cache, 1)
    assert cache.nbytes == 2 * 5 * 8 * 4
    last = append(cache, 2)
    assert cache.nbytes == 0
    assert cache.workspace.nbytes == 2 * 14 * 8 * 4
    assert torch.equal(last[:, :1], first)
    with pytest.raises(ValueError, match="stage must not be 2"):
        append(cache, 2)


def test_stages_that_are_left_out_after_all_do_no_harm() -> None:
    cache = cache_of(stage_keys(1, 4, 9, 16))
    first = append(cache, 0)
    last = append(cache, 3)
    assert torch.equal(last[:, :1], first)


def test_a_cache_grows_once_and_with_room_for_what_is_planned() -> None:
    cache = cache_of(stage_keys(1, 2, 3, 16))
    before = append(cache, 0)
    assert cache.keys.shape[1] == 6
    append(cache, 1)
    assert cache.keys.shape[1] == 6
    third = append(cache, 2, count=9)
    assert cache.keys.shape[1] == 1 + 4 + 9
    assert torch.equal(third[:, :1], before)
    assert append(cache, 3).shape[1] == 30
    early = cache_of(stage_keys(1, 2, 3, 16))
    append(early, 0)
    append(early, 1, count=4)
    append(early, 2, count=3)
    assert early.keys.shape[1] == 8


def test_rows_that_leave_free_their_memory() -> None:
    planned = [StageKeys(0, 4, (1,)), StageKeys(1, 4, (4,)), StageKeys(2, 2, (9,)), StageKeys(3, 2, (16,))]
    cache = cache_of(planned, rows=4)
    append(cache, 0, rows=4)
    kept = append(cache, 1, rows=4)[2:]
    assert cache.keys.shape[:2] == (4, 5)
    cache.keep_rows(slice(2, None))
    assert cache.keys.shape[:2] == (2, 14)
    assert torch.equal(append(cache, 2, rows=2)[:, :5], kept)
    assert cache.workspace.nbytes == 0
    append(cache, 3, rows=2)
    assert cache.workspace.nbytes == 2 * 2 * 30 * 8 * 4


def test_rows_may_leave_before_anything_is_kept_or_later_than_planned() -> None:
    cache = cache_of([StageKeys(0, 2, (1,)), StageKeys(1, 1, (4,)), StageKeys(2, 1, (9,))], (1, 2, 3), rows=2)
    cache.keep_rows(slice(0, 1))
    append(cache, 0)
    assert cache.keys.shape[:2] == (1, 5)
    late = cache_of([StageKeys(0, 2, (1,)), StageKeys(1, 1, (4,)), StageKeys(2, 1, (9,))], (1, 2, 3), rows=2)
    append(late, 0, rows=2)
    append(late, 1, rows=2)
    late.keep_rows(slice(1, 2))
    assert append(late, 2).shape[:2] == (1, 14)


def test_nothing_is_allocated_before_it_is_needed() -> None:
    """A captured graph owns the memory allocated during its capture, and may free only that."""
    cache = cache_of(stage_keys(1, 4))
    assert cache.nbytes == cache.workspace.nbytes == 0
    append(cache, 0)
    assert cache.nbytes > 0 and cache.workspace.nbytes == 0


# --- activations


@pytest.mark.parametrize("family", ["var", "hart"])
def test_feed_forward_in_chunks_is_that_of_all_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are uneven. With gradients nothing is computed in place, and the input is never modified."""
    feed_forward = tiny.shared_pipeline(family).model.stack[0].feed_forward
    x = torch.randn(3, 5, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    given = x.clone()
    expected = feed_forward(given.requires_grad_())
    assert torch.autograd.grad(expected.sum(), given)[0].abs().sum() > 0
    with torch.inference_mode():
        assert torch.equal(feed_forward(x), expected)
        monkeypatch.setattr("nextscale.models.feed_forward.CHUNK_TOKENS", 4)
        torch.testing.assert_close(feed_forward(x), expected)
    assert torch.equal(x, given)


# --- the peak


def meta(name: str) -> tuple[Any, Any, Schedule]:
    spec = MODELS[name]
    with torch.device("meta"):
        model, tokenizer = build_model(spec.model), build_tokenizer(spec.tokenizer)
    for module in (model, tokenizer):
        for parameter_name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if parameter_name.startswith(module.float32) else torch.bfloat16)
    return model, tokenizer, spec.settings.schedules.choose(None, None)


MEASURED = {  # GB on an H200: dense, eager, in bfloat16; images and tokens of the longest text as in `benchmarks.suites`
    ("infinity-2b", 1, 50): 8.47,
    ("infinity-2b", 4, 77): 19.57,
    ("infinity-8b", 1, 50): 25.22,
    ("star-1024", 1, 50): 6.45,
    ("var-d30", 8, 0): 6.01,
}


@pytest.mark.parametrize(("name", "images", "text"), MEASURED)
def test_the_predicted_peak_is_what_was_measured(name: str, images: int, text: int) -> None:
    model, tokenizer, schedule = meta(name)
    predicted = request_memory(model, tokenizer, Workload(schedule, images, text_tokens=text)).peak
    assert predicted == pytest.approx(1e9 * MEASURED[name, images, text], rel=0.02)


def test_targets_of_infinity_2b() -> None:
    model, tokenizer, schedule = meta("infinity-2b")
    workload = Workload(schedule, 1, text_tokens=64)
    peaks = {
        name: request_memory(model, tokenizer, workload, method.forecast(model, schedule, kept=ASSUMED_KEPT)).peak / 1e9
        for name, method in {"dense": Method(), "fastvar": FastVAR(), "stagevar": StageVAR(), "sparsevar": SparseVAR()}.items()
    }
    assert peaks["dense"] < 9.5
    assert peaks["stagevar"] < peaks["fastvar"] < 7
    assert peaks["sparsevar"] < 7.5
    assert request_memory(model, tokenizer, Workload(schedule, 4, text_tokens=77)).peak < 20e9


def test_decoding_counts_where_generation_takes_less() -> None:
    """After one stage of one token there is hardly anything to remember."""
    model, tokenizer, schedule = meta("infinity-2b")
    plans = (DENSE, *(StagePlan(skip=True),) * (len(schedule) - 1))
    memory = request_memory(model, tokenizer, Workload(schedule, 1, text_tokens=64), plans)
    assert memory.generating < memory.decoding
    assert memory.peak == memory.weights + memory.decoding
    four = request_memory(model, tokenizer, Workload(schedule, 4, text_tokens=64), plans)
    assert four.decoding < 1.1 * memory.decoding  # one by one


@pytest.mark.parametrize("family", ["var", "infinity"])
@pytest.mark.parametrize("method", [FastVAR(), StageVAR(), Method()], ids=["fastvar", "stagevar", "dense"])
def test_what_is_remembered_is_what_spans_store(family: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tiny.shared_pipeline(family)
    memory, kept = StageMemory(), []
    monkeypatch.setattr("nextscale.generate.StageMemory", lambda: memory)
    pipe(
        tiny.prompts(family, IMAGES),
        seed=1,
        method=method,
        on_stage=lambda preview: kept.append(sum(y.nbytes for y, _ in memory._maps.values())),
    )
    schedule = tiny.schedule_of(family)
    plans = method.forecast(pipe.model, schedule)
    assert request_memory(pipe.model, pipe.tokenizer, Workload(schedule, IMAGES, text_tokens=16), plans).stored == max(kept)
    assert stored_bytes(pipe.model, DENSE, 5) == {}


# --- images that continue separately


@pytest.mark.parametrize("family", tiny.KINDS)
def test_images_that_are_routed_apart_take_no_memory_twice(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups run one after another, each in a call of its own: none takes more than the whole batch would."""
    pipe = tiny.shared_pipeline(family)
    method = three_routes(pipe, family, None, tmp_path)
    alive: list[weakref.ref[Tensor]] = []
    held: list[int] = []

    def allocate(spec: CacheSpec, tokens: int) -> tuple[Tensor, ...]:
        made = allocated(spec, tokens)
        alive.extend(map(weakref.ref, made))
        held.append(sum(tensor.nbytes for one in alive if (tensor := one()) is not None))
        return made

    allocated = CacheSpec.allocate
    monkeypatch.setattr(CacheSpec, "allocate", allocate)
    output = pipe(tiny.prompts(family, 3), seed=[1, 2, 3], method=method)
    assert [stage.rows for stage in output.report.stages[-3:]] == [6, 3, 2]
    spec = reserved_cache(pipe.model, tiny.schedule_of(family), method.forecast(pipe.model, tiny.schedule_of(family)), 3, 6)
    assert 0 < max(held) <= spec.kept_bytes
