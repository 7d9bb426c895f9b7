"""Choosing methods: by value, by name, several at once, for one call, for a block or for good; and which of them go together."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import EntryPoint
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from nextscale import DropGuidance, FastVAR, Method, SkipStages, SparseVAR, StageVAR
from nextscale.errors import SettingError
from nextscale.guidance import ConstantGuidance, StageGuidance
from nextscale.methods import METHODS, Combined, method_names, resolve_method
from nextscale.methods.combine import CombinedRun
from nextscale.methods.method import MethodRun, Plans, Restored, Span, StagePlan, TokenCounts
from nextscale.methods.registry import ENTRY_POINTS, method_class, parse_method, parse_value, plugins, split_settings
from nextscale.models import NextScaleModel
from nextscale.pipeline import Output, Pipeline
from nextscale.stage import Schedule, Stage, Tokens
from nextscale_research.methods import ToMe
from tests.helpers import tiny
from tests.helpers.tiny import infinity_schedule
from tests.helpers.toy_methods import counted

# Settings that act on the four stages of a tiny schedule.
SPARSE, FAST, LOW_RANK = SparseVAR(tau=0.9, first_stage=2, blocks=0), FastVAR({2: 0.5, 3: 0.5}), StageVAR(guidance_off=2, alphas={3: 0.96})
GUIDANCE_OFF, MERGE = StageVAR(guidance_off=2, alphas=()), ToMe(stages=(2, 3))


@pytest.fixture
def pipeline() -> Pipeline:
    return tiny.fresh_pipeline("infinity")


def generated(pipeline: Pipeline, **settings: Any) -> Output:
    return pipeline(tiny.prompts("infinity", 2), seed=5, **settings)


# --- for good, for a block, for a call


def test_accelerate_holds_until_dense(pipeline: Pipeline) -> None:
    dense, skipped = generated(pipeline), generated(pipeline, method=SkipStages(1))
    pipeline.accelerate(SkipStages(1))
    tiny.assert_same_bits(generated(pipeline), skipped)
    assert generated(pipeline).report.method == "SkipStages(last=1)"
    pipeline.dense()
    tiny.assert_same_bits(generated(pipeline), dense)
    assert generated(pipeline).report.method == "dense"


def test_a_with_block_ends_what_it_began(pipeline: Pipeline) -> None:
    dense = generated(pipeline)
    with pipeline.accelerate("skip:last=1") as same:
        assert same is pipeline
        skipped = generated(pipeline)
        with pipeline.dense():
            tiny.assert_same_bits(generated(pipeline), dense)
        tiny.assert_same_bits(generated(pipeline), skipped)
    assert len(skipped.codes) == len(dense.codes) - 1
    tiny.assert_same_bits(generated(pipeline), dense)


def test_an_error_inside_a_block_ends_it_too(pipeline: Pipeline) -> None:
    with pytest.raises(RuntimeError, match="stop"), pipeline.accelerate(SkipStages(1)):
        raise RuntimeError("stop")
    assert type(pipeline.method) is Method


def test_a_call_may_choose_another_method(pipeline: Pipeline) -> None:
    dense = generated(pipeline)
    pipeline.accelerate(SkipStages(1))
    tiny.assert_same_bits(generated(pipeline, method="dense"), dense)
    tiny.assert_same_bits(generated(pipeline, method=[]), dense)
    assert len(generated(pipeline, method=SkipStages(2)).codes) == 2


def test_a_stage_is_skipped_by_itself(pipeline: Pipeline) -> None:
    skipped = generated(pipeline, method="skip:stages=[2]")
    assert [stage.skipped for stage in skipped.report.stages] == [False, False, True, False]
    tiny.assert_same_bits(skipped, generated(pipeline, method=FastVAR({2: 1.0})))
    tiny.assert_same_bits(generated(pipeline, method="skip:stages=[3]"), generated(pipeline, method=SkipStages(1)))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fastvr", "did you mean fastvar"),
        ("nothing", "Known methods: dense, skip, dropguidance, sparsevar, fastvar, stagevar"),
        ("skip:first=2", "settings of skip.*last.*got 'first=2'"),
        ("skip:2", "settings of skip.*got '2'"),
        ("skip:last", "last=VALUE"),
        ("dense:last=1", "settings of dense must be one of none"),
        (3, "must be a Method, a name"),
        (SkipStages(9), "cannot skip 9 of 4 stages"),
        ("skip:stages=[0]", "stage 0 is a single token"),
        ("skip:stages=[7]", "stages.*got 7"),
        ("skip:stages=2", "stages must be a tuple of stage indices"),
        ("sparsevar:tau=-1", "tau"),
        ("sparsevar:blocks=8", r"blocks.*\(0, 3\)"),
        ([FAST, LOW_RANK], "cannot be combined"),
        ("skip:last=-1", "last is how many of the last stages are skipped"),
        ("skip:last={}", "last is how many of the last stages are skipped"),
        ("sparsevar:tau=0.5,tau=0.6", "each setting once, as tau=VALUE"),
        ("sparsevar:keep={2: 0.5, 2: 0.6}", "keys of a mapping must be different"),
        ("sparsevar:keep={[]: 0.5}", "keep"),
        ("sparsevar:keep=" + "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("fastvar:cache_stage=" + "-" * 100_000 + "1", "nested too deeply"),
        (f"sparsevar:tau={10**400}", "tau"),
        (f"tome:ratio={10**400}", "ratio"),
        ("sparsevar:beta=true", "beta"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(pipeline: Pipeline, method: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        pipeline.accelerate(method)
    assert type(pipeline.method) is Method


# --- names


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("dense", Method()),
        ("skip:last=2", SkipStages(2)),
        ("skip:last=1,stages=[2, 1]", SkipStages(1, (1, 2))),
        ("sparsevar", SparseVAR()),
        ("sparsevar:keep={2: 0.5, 3: 0.25},blocks=[0, 2]", SparseVAR(keep=((2, 0.5), (3, 0.25)), blocks=(0, 2))),
        ("sparsevar: tau=0.7 , alpha=none,metric=logits", SparseVAR(tau=0.7, alpha=None, metric="logits")),
        ("fastvar:ratios={2:0.4,3:1.0},layers=[0,2]", FastVAR({2: 0.4, 3: 1.0}, layers=(0, 2))),
        ("fastvar:as_released=true", FastVAR(as_released=True)),
        ("stagevar:alphas=[],guidance_off=2", StageVAR(alphas=(), guidance_off=2)),
        ("tome:ratio=0.25,stages=(2,3)", ToMe(0.25, stages=(2, 3))),
        ("tome:sublayers=[attention, feed_forward]", ToMe(sublayers=("attention", "feed_forward"))),
    ],
)
def test_names_stand_for_methods(text: str, method: Method) -> None:
    if isinstance(method, SkipStages | SparseVAR | FastVAR | StageVAR | ToMe):
        assert parse_method(text) == method
    assert type(parse_method(text)) is type(method)


FLAGS = [(name, one.name) for name, method in METHODS.items() if is_dataclass(method) for one in fields(method) if one.type == "bool"]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
@pytest.mark.parametrize("value", ["no", "0", "none"])
def test_a_flag_is_true_or_false(name: str, flag: str, value: str) -> None:
    with pytest.raises(SettingError, match=flag):
        parse_method(f"{name}:{flag}={value}")


@pytest.mark.parametrize(
    ("method", "field"),
    [
        *((SparseVAR, field) for field in ("metric", "anchors", "as_released")),
        *((StageVAR, field) for field in ("kept_rows", "ranks")),
        (DropGuidance, "kept_rows"),
    ],
)
@pytest.mark.parametrize("value", [np.array([0.5, 0.5]), torch.tensor([1, 2]), [], {}, None, 0.0])
def test_a_setting_that_is_a_word_takes_nothing_else(method: type[Method], field: str, value: Any) -> None:
    if field == "ranks" and value is None:
        return
    with pytest.raises(SettingError, match=field):
        method(**{field: value})


def test_values_are_read_and_never_executed() -> None:
    assert [parse_value(text) for text in ("1", "0.5", "True", "none", "[1, 2]", "word", "__import__('os')")] == [
        1, 0.5, True, None, (1, 2), "word", "__import__('os')",
    ]  # fmt: skip
    assert split_settings("a=[1,2],b={3:4,5:6}, ,c=1") == ["a=[1,2]", "b={3:4,5:6}", "c=1"]


def test_several_names_are_one_combined_method() -> None:
    both = resolve_method(["skip:last=1", GUIDANCE_OFF])
    assert both == Combined((SkipStages(1), GUIDANCE_OFF))
    assert both.label == "SkipStages(last=1) + StageVAR(guidance_off=2, alphas=())"
    assert resolve_method(["skip:last=1"]) == SkipStages(1)
    assert type(resolve_method([])) is type(resolve_method(None)) is Method


# CoDe needs a second model, auto a profile, nearmask an edit
ALONE = [name for name in method_names() if "alone" not in method_class(name).exclusive and name != "nearmask"]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_method_runs_on_every_family_by_its_name_alone(family: str, name: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    output = pipeline(tiny.prompts(family, 2), seed=1, method=name, compute_mask=True)
    assert output.pixels.isfinite().all()
    assert len(output.compute_mask) == len(tiny.schedule_of(family))
    for stage, mask in zip(tiny.schedule_of(family), output.compute_mask, strict=True):
        assert mask.shape == (2, *stage.size)
        assert 0 <= mask.min() <= mask.max() <= 1
    assert 0 < output.report.cost_share <= {"sparvar": 1.01, "skipvar": 1.5}.get(name, 1)  # SkipVAR reads its first stages again
    if name not in (
        "sparsevar",
        "sparsevar_variants",
        "scalekv",
        "sparvar",
        "skipvar",
    ):  # act or not on stages this small, or compute more where keys are chosen
        assert (output.report.cost_share < 1) == (name not in ("dense", "skip"))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("family", tiny.KINDS)
def test_stages_that_are_given_have_the_mask_that_they_have_when_they_are_generated(family: str, name: str) -> None:
    request: dict[str, Any] = {"seed": 1, "method": name, "compute_mask": True}
    full = tiny.shared_pipeline(family)(tiny.prompts(family, 2), **request)
    given = full.codes[: len(tiny.schedule_of(family)) - 1]
    again = tiny.shared_pipeline(family)(tiny.prompts(family, 2), prefix_codes=given, **request)
    tiny.assert_close(family, again, full)
    assert all(map(torch.equal, again.compute_mask, full.compute_mask))


# --- several at once

GO_TOGETHER = [
    (SPARSE, GUIDANCE_OFF),
    (FAST, GUIDANCE_OFF),
    (MERGE, GUIDANCE_OFF),
    (SPARSE, SkipStages(1)),
    (FastVAR({2: 0.5}), SkipStages(1)),
    (StageVAR(guidance_off=2, alphas={2: 0.96}), SkipStages(1)),
    (GUIDANCE_OFF, SkipStages(1)),
    (SPARSE, GUIDANCE_OFF, SkipStages(1)),
]


@pytest.mark.parametrize("methods", GO_TOGETHER, ids=lambda methods: resolve_method(methods).label)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_goes_together_does_so_for_a_batch_and_its_images_alone(family: str, methods: tuple[Method, ...]) -> None:
    pipeline = tiny.shared_pipeline(family)
    settings = {"method": methods, "smooth": False, "greedy": True}
    together = pipeline(tiny.prompts(family, 2), seed=[3, 8], **settings)
    for image, seed in enumerate((3, 8)):
        alone = pipeline(tiny.one_prompt(family, image), seed=seed, **settings)
        one = tiny.one_image(together, image)
        assert torch.allclose(one.latent, alone.latent, rtol=0, atol=tiny.ROUNDING[family].latents)
        tiny.assert_close_pixels(family, one.pixels, alone.pixels)


@pytest.mark.parametrize("methods", [(SPARSE, GUIDANCE_OFF), (FAST, GUIDANCE_OFF)], ids=["sparsevar", "fastvar"])
@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in ("hart", "star_refined")])
def test_both_methods_act(family: str, methods: tuple[Method, Method]) -> None:
    pipeline, prompt = tiny.shared_pipeline(family), tiny.prompts(family, 2)
    both, *each = (pipeline(prompt, seed=3, method=method) for method in (methods, *methods))
    assert [stage.rows for stage in both.report.stages] == [4, 4] + [2] * (len(both.report.stages) - 2)
    assert both.report.cost_share < each[1].report.cost_share
    assert all(not torch.equal(both.latent, output.latent) for output in each)


def test_spans_run_inside_stages_that_another_method_reduces() -> None:
    """SparseVAR taps a block before those whose tokens FastVAR reduces."""
    pipeline = tiny.shared_pipeline("infinity")
    methods = [SparseVAR(tau=0.95, first_stage=3, blocks=0), FastVAR({3: 0.5}, layers=(1, 3))]
    settings = {"size": Schedule(((1, 1), (2, 2), (4, 3), (8, 6)))}
    both = pipeline(tiny.prompts("infinity", 2), seed=3, method=methods, **settings)
    assert both.report.stages[3].tokens < 48
    sparse = pipeline(tiny.prompts("infinity", 2), seed=3, method=methods[0], **settings)
    assert both.report.cost_share < sparse.report.cost_share < 1
    for image in range(2):
        alone = pipeline(tiny.one_prompt("infinity", image), seed=3 + image, method=methods, **settings)
        assert torch.equal(both.latent[image], alone.latent[0])


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ((FAST, LOW_RANK), "both change block"),
        ((FAST, MERGE), "both change block"),
        ((SPARSE, SparseVAR(tau=0.5)), "each of SparseVAR and SparseVAR changes tokens"),
        ((SPARSE, FAST), "cannot be observed"),
        ((SparseVAR(metric="logits", first_stage=1), FastVAR({2: 0.5})), "needs every cell of the stage"),
        ((SparseVAR(metric="logits", first_stage=2), LOW_RANK), "at stage 2 .* needs every cell of the stage"),
    ],
    ids=["fastvar+stagevar", "fastvar+tome", "sparsevar twice", "a tapped block in a span", "a reduced cache stage", "a reduced memory"],
)
@pytest.mark.parametrize("order", [1, -1], ids=["as given", "the other way round"])
def test_what_does_not_go_together_is_refused_before_anything_runs(methods: tuple[Method, ...], reason: str, order: int) -> None:
    pipeline = tiny.shared_pipeline("infinity")

    def never(preview: object) -> None:
        raise AssertionError("a stage ran")

    with pytest.raises(SettingError, match=reason):
        pipeline(tiny.prompts("infinity", 1), seed=0, method=methods[::order], on_stage=never)


def test_plug_ins_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.methods.registry.plugins", dict)
    for name in ("skipvar", "scalekv", "tome", "code"):
        with pytest.raises(SettingError, match=rf"{name}.*pip install ./research"):
            resolve_method(name)


def test_a_stage_of_two_cells_counts_as_reduced_before_anything_runs() -> None:
    """Half of them and half of one anchor, rounded up, would be both; a run may leave out one."""
    pipeline, schedule = tiny.shared_pipeline("infinity"), Schedule(((1, 1), (1, 2), (2, 4), (4, 8)))
    methods = [SparseVAR(metric="logits", tau=0.0, first_stage=1), FastVAR({2: 0.5})]
    with pytest.raises(SettingError, match="at stage 1 .* needs every cell of the stage"):
        pipeline(tiny.prompts("infinity", 1), seed=0, size=schedule, method=methods, on_stage=lambda preview: pytest.fail("a stage ran"))


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        (("fastvar", "stagevar:alphas={1:0},guidance_off=0"), "at stage 2 .* needs what stage 1 computes, and another method skips"),
        (("fastvar:ratios={2:1.0}", "stagevar"), "at stage 3 .* needs what stage 2 computes, and another method skips"),
        ((StageVAR(alphas={2: 0}), StageVAR(alphas={3: 0.96})), "at stage 3 .* needs what stage 2 computes, and another method skips"),
        ((StageVAR(alphas={1: 0.96, 2: 0}), StageVAR(alphas={3: 0.96})), "at stage 3 .* stage 2 computes, and another method skips"),
        ((FastVAR({2: 1.0}), FastVAR({3: 0.5})), "at stage 3 .* needs what stage 2 computes, and another method skips"),
        ((FastVAR({2: 0.5}), FastVAR({3: 0.5}, cache_stage=0)), "at stage 3 .* stage 0 computes, and another method skips or replaces"),
    ],
    ids=["fastvar's cache", "stagevar's memory", "stagevar twice", "an older memory", "fastvar twice", "two caches"],
)
@pytest.mark.parametrize("order", [1, -1], ids=["as given", "the other way round"])
def test_outputs_that_others_skip_or_replace_are_refused_before_anything_runs(methods: tuple[Any, ...], reason: str, order: int) -> None:
    pipeline = tiny.fresh_pipeline("infinity")
    message = f"cannot be combined: {reason}"
    with pytest.raises(SettingError, match=message):
        resolve_method(methods[::order]).forecast(pipeline.model, tiny.schedule_of("infinity"))
    with pytest.raises(SettingError, match=message):
        pipeline.accelerate(methods[::order])
    with pytest.raises(SettingError, match=message):
        generated(pipeline, method=methods[::order], on_stage=lambda preview: pytest.fail("a stage ran"))


def test_methods_that_read_their_own_stages_go_together() -> None:
    pipeline = tiny.shared_pipeline("infinity")
    for methods in (
        (FastVAR({1: 0.5}), FastVAR({3: 0.5})),  # the second cache takes the place of the first when that is no longer needed
        (FastVAR({2: 0.5}, layers=(0, 1)), FastVAR({3: 0.5}, layers=(1, 3), cache_stage=0)),
        (FastVAR({2: 0.5}, cache_stage=0), StageVAR(alphas={1: 0})),
        (FastVAR({3: 0.5}), StageVAR(alphas={3: 0})),  # what is skipped needs nothing
    ):
        assert generated(pipeline, method=methods).pixels.isfinite().all()


def test_a_need_that_nothing_meets_is_refused() -> None:
    @dataclass(frozen=True)
    class Reading(Span):
        layers: range
        key: str = "reading"
        needs = frozenset({"notes"})

        def num_tokens(self, tokens: int) -> int:
            return tokens

    class Reader(Method):
        def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
            return tuple(StagePlan(spans=(Reading(range(1)),)) if stage.last else StagePlan() for stage in schedule)

    with pytest.raises(SettingError, match=r"at stage 3 the span reading \(block 0\) needs what no stage before it stores"):
        Combined((Reader(), GUIDANCE_OFF)).forecast(tiny.shared_pipeline("infinity").model, tiny.schedule_of("infinity"))


def test_combined_runs_reduce_in_order_and_restore_in_reverse() -> None:
    calls: list[tuple[str, str]] = []

    @dataclass
    class Named(MethodRun):
        name: str
        counts: torch.Tensor | None = None

        def count(self, stage: Stage, canvas: Any) -> torch.Tensor | None:
            calls.append((self.name, "count"))
            return self.counts

        def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
            assert counts == TokenCounts(2, 3, 5)
            return replace(planned, observed=(*planned.observed, len(planned.observed)))

        def state(self) -> list[torch.Tensor]:
            return [] if self.counts is None else [self.counts]

        def select_tokens(self, x: torch.Tensor, tokens: Tokens) -> Tokens:
            calls.append((self.name, "select_tokens"))
            return tokens

        def restore(self, logits: torch.Tensor, tokens: Tokens) -> Restored:
            calls.append((self.name, "restore"))
            return Restored(logits, tokens, self.counts)

    counts, stage = torch.tensor([3, 2]), tiny.schedule_of("infinity")[1]
    run = CombinedRun((Named("first", counts), Named("second")))
    assert run.plan(stage, StagePlan(skip=True), counted(run, stage)) == StagePlan(skip=True, observed=(0, 1))
    run.select_tokens(counts, Tokens(stage))
    assert run.restore(counts, Tokens(stage)).source is counts
    assert calls == [(name, hook) for hook in ("count", "select_tokens") for name in ("first", "second")] + [
        ("second", "restore"),
        ("first", "restore"),
    ]
    fork = copy.copy(run)
    assert fork.runs[0] is not run.runs[0] and fork.runs[1] is not run.runs[1]
    (state,) = fork.state()
    assert state is counts


def test_zero_strength_of_all_at_once_is_dense_bit_for_bit() -> None:
    nothing = [SparseVAR(tau=0), FastVAR({3: 0.0}), StageVAR(guidance_off=99, alphas=()), ToMe(ratio=0), SkipStages(0)]
    for family in tiny.FAMILIES:
        pipeline, prompt = tiny.shared_pipeline(family), tiny.prompts(family, 2)
        dense = pipeline(prompt, seed=6)
        for pair in combinations(nothing, 2):
            tiny.assert_same_bits(pipeline(prompt, seed=6, method=list(pair)), dense)


def test_dropping_a_cfg_branch_at_guidance_one_changes_nothing() -> None:
    """The unconditional rows are those that stay, so with the prompt itself as the negative one they generate the same."""
    for family in ("var", "infinity", "star"):
        pipeline, prompt = tiny.shared_pipeline(family), tiny.prompts(family, 2)
        guidance = StageGuidance(values=(1.0,) * len(tiny.schedule_of(family)) + (2.0,))
        settings = {"seed": 6, "negative": prompt, "guidance": guidance, "greedy": True}
        plain, off = pipeline(prompt, **settings), pipeline(prompt, method=GUIDANCE_OFF, **settings)
        tiny.assert_close(family, off, plain)


# --- past the trained size


def test_images_past_the_trained_size_with_fastvar() -> None:
    """1344 px: a stage of 84x84 tokens after the trained ones, nothing skipped, late stages reduced."""
    pipeline = tiny.shared_pipeline("infinity")
    output = pipeline(tiny.prompts("infinity", 1), seed=1, size=infinity_schedule(1.0, "1.8M"), method=FastVAR())
    assert [stage.height for stage in output.report.stages][-2:] == [64, 84]
    assert not any(stage.skipped for stage in output.report.stages)
    assert output.report.cost_share < 0.5
    assert output.pixels.shape[-1] == 84 * tiny.CELL_PIXELS


# --- what the caller forces, and what does not fit


@pytest.mark.parametrize("family", ["var", "flexvar", "infinity", "star"])
def test_forced_codes_land_in_their_cells_whatever_is_left_out(family: str) -> None:
    """Codes of a whole grid are given; those of cells that were left out are not put on the canvas."""
    pipeline, last = tiny.shared_pipeline(family), len(tiny.schedule_of(family)) - 1
    method, forced, seen = SparseVAR(tau=1.0, first_stage=last, alpha=None), {}, {}

    def revise(stage: Stage, codes: torch.Tensor) -> torch.Tensor:
        seen[stage.index] = codes
        forced[stage.index] = torch.arange(codes.numel()).view(codes.shape) % 2
        return forced[stage.index]

    output = pipeline(tiny.prompts(family, 2), seed=4, method=method, revise=revise, compute_mask=True)
    stage = tiny.schedule_of(family)[last]
    assert seen[last].shape[:2] == (2, stage.cells)
    computed = output.compute_mask[last].flatten(1) > 0
    assert 0 < computed.sum() < computed.numel()
    for image in range(2):
        expected = forced[last][image][computed[image]]
        assert torch.equal(output.codes[last][image][: len(expected)], expected)


NOT_CODES = {"nothing": None, "few": torch.zeros(2, 1, dtype=torch.long), "unknown": torch.full((2, 4), 40), "floats": torch.zeros(2, 4)}


@pytest.mark.parametrize("given", NOT_CODES.values(), ids=NOT_CODES)
def test_codes_that_are_no_codes_are_refused(given: Any) -> None:
    with pytest.raises(SettingError, match=r"revise returns for stage 1"):
        tiny.shared_pipeline("var")([1, 2], seed=0, revise=lambda stage, codes: codes if stage.index == 0 else given)


@pytest.mark.parametrize("method", [FAST, MERGE], ids=["fastvar", "tome"])
def test_guidance_inside_a_span_is_refused_in_our_own_words(method: Method) -> None:
    guidance = ConstantGuidance(logits=False, layers=(0,), strength=2.0)
    with pytest.raises(SettingError, match="does not fit this request: guidance after block 0"):
        tiny.shared_pipeline("infinity")(tiny.prompts("infinity", 1), seed=0, guidance=guidance, method=method)


# --- plug-ins


@pytest.mark.parametrize(("value", "expected"), [("json:loads", "json:loads"), ("no_such_module:X", "no_such_module")])
def test_a_broken_plugin_is_named(value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It harms no other method."""
    entry = EntryPoint("broken", value, ENTRY_POINTS)
    monkeypatch.setattr("nextscale.methods.registry.plugins", lambda: {"broken": entry})
    assert "broken" in method_names()
    with pytest.raises(SettingError, match=expected):
        resolve_method("broken")
    assert resolve_method("fastvar") == FastVAR()


def test_plugins_do_not_replace_methods_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("fastvar", "nextscale:StageVAR", ENTRY_POINTS), EntryPoint("other", "nextscale:StageVAR", ENTRY_POINTS)]
    monkeypatch.setattr("nextscale.methods.registry.entry_points", lambda group: entries)
    plugins.cache_clear()
    assert isinstance(resolve_method("fastvar"), FastVAR)
    assert type(resolve_method("other")).__name__ == "StageVAR"
    plugins.cache_clear()


def test_comparison_methods_come_with_the_research_package() -> None:
    assert {"pitome", "sparsevit", "zipvl", "litevar", "sparvar"} <= set(method_names()) - set(METHODS)
    assert type(resolve_method("zipvl:ratio=0.25")).__module__ == "nextscale_research.methods.zipvl"
