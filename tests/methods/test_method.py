"""The interface between generation and acceleration methods: whatever does nothing must change nothing, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import isfunction
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from nextscale.cache import CacheSpec, ComputedCells, LayerCache, Workspace
from nextscale.canvas import Canvas
from nextscale.errors import SettingError
from nextscale.guidance import CfgBranches, ConstantGuidance, StageGuidance
from nextscale.methods import DENSE, Combined, Method, MethodRun, Plans, RunSetup, SkipStages, Span, StagePlan, TokenCounts
from nextscale.methods.method import Restored
from nextscale.models import NextScaleModel
from nextscale.models.blocks import Block
from nextscale.models.context import ForwardContext
from nextscale.pipeline import Output, Preview
from nextscale.stage import Schedule, Stage, Tokens
from tests.cache.test_cache import MEMORY, fill_memory
from tests.helpers import tiny
from tests.helpers.toy_methods import STAGES, RunBlocks


@dataclass(frozen=True)
class Planned(Method):
    """Forecasts what a function of the stage says, and does it."""

    of_stage: Callable[[Stage], StagePlan]

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return tuple(self.of_stage(stage) for stage in schedule)


@dataclass(frozen=True)
class Unforeseen(Method):
    """Forecasts dense generation, and plans otherwise when the stage comes."""

    of_stage: Callable[[Stage], StagePlan]

    def start(self, setup: RunSetup) -> MethodRun:
        return UnforeseenRun(self.of_stage)


@dataclass
class UnforeseenRun(MethodRun):
    of_stage: Callable[[Stage], StagePlan]

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        assert planned == DENSE
        return self.of_stage(stage)


PlannedBy = type[Planned] | type[Unforeseen]
KNOWN = pytest.mark.parametrize("planned", [Planned, Unforeseen], ids=["forecast", "unforeseen"])


@dataclass(frozen=True)
class Running(Method):
    """Starts the runs that a function returns."""

    new_run: Callable[[RunSetup], MethodRun]
    exclusive = frozenset({"tokens"})

    def start(self, setup: RunSetup) -> MethodRun:
        return self.new_run(setup)


def generated(family: str, images: int = 2, **settings: object) -> Output:
    return tiny.shared_pipeline(family)(tiny.prompts(family, images), seed=11, **settings)


# --- plans


def test_merging_with_dense_changes_nothing() -> None:
    plan = StagePlan(skip=True, cfg_branches="cond", num_tokens=5, spans=(RunBlocks(range(2)),), observed=(2,))
    assert plan.merge(DENSE) == plan
    assert DENSE.merge(plan) == plan
    assert DENSE.merge(DENSE) == DENSE
    assert hash(plan) == hash(plan.merge(DENSE))


def test_plans_merge_field_by_field() -> None:
    first = StagePlan(cfg_branches="uncond", spans=(RunBlocks(range(2)),), observed=(6, 4))
    second = StagePlan(skip=True, num_tokens=7, spans=(RunBlocks(range(2, 4)),), observed=(5, 4))
    merged = first.merge(second)
    assert merged == StagePlan(True, "uncond", 7, (RunBlocks(range(2)), RunBlocks(range(2, 4))), (4, 5, 6))
    assert StagePlan(num_tokens=7).merge(StagePlan(num_tokens=7)).num_tokens == 7
    assert StagePlan(cfg_branches="cond").merge(StagePlan(cfg_branches="cond")).cfg_branches == "cond"


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        (StagePlan(num_tokens=5), StagePlan(num_tokens=6), "num_tokens, to 5 and to 6"),
        (StagePlan(cfg_branches="cond"), StagePlan(cfg_branches="uncond"), "cfg_branches"),
        (StagePlan(spans=(RunBlocks(range(3)),)), StagePlan(spans=(RunBlocks(range(2, 4)),)), "both change block 2"),
        (StagePlan(spans=(RunBlocks(range(1, 2), "b"),)), StagePlan(spans=(RunBlocks(range(4), "a"),)), "both change block 1"),
        (StagePlan(spans=(RunBlocks(range(3)),)), StagePlan(observed=(2,)), "block 2 cannot be observed"),
        (StagePlan(observed=(0,)), StagePlan(spans=(RunBlocks(range(3)),)), "block 0 cannot be observed"),
    ],
)
def test_conflicts_are_named(first: StagePlan, second: StagePlan, conflict: str) -> None:
    with pytest.raises(ValueError, match=conflict):
        first.merge(second)


def test_neighboring_spans_and_taps_beside_spans_are_no_conflict() -> None:
    plan = StagePlan(spans=(RunBlocks(range(2, 4)), RunBlocks(range(2))), observed=(4,))
    assert len(plan.spans) == 2


# --- spans and taps


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layers", [[range(3)], [range(1)], [range(1, 3)], [range(2, 3), range(2)]], ids=str)
@KNOWN
def test_a_span_that_runs_its_blocks_is_dense_bit_for_bit(planned: PlannedBy, family: str, layers: list[range]) -> None:
    method = planned(lambda stage: StagePlan(spans=tuple(RunBlocks(part) for part in layers)))
    tiny.assert_same_bits(generated(family, method=method), generated(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
@KNOWN
def test_a_span_replaces_its_blocks(planned: PlannedBy, family: str, layers: range) -> None:
    """A span that does nothing at the last stage changes the last stage and no other."""

    class Nothing(RunBlocks):
        def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
            assert [block.layer for block in blocks] == list(layers)
            return x

    dense = generated(family)
    without = generated(family, method=planned(lambda stage: StagePlan(spans=(Nothing(layers),)) if stage.last else DENSE))
    assert tiny.same_codes(without.codes[:-1], dense.codes[:-1])
    assert not tiny.close_codes(family, without.codes[-1:], dense.codes[-1:])


@dataclass(frozen=True)
class RunSublayers(RunBlocks):
    """A span that adds the sublayers one by one, as methods that reduce the tokens of a single sublayer do."""

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        for block in blocks:
            for sublayer in block.sublayers(ctx):
                x = x + sublayer(x, tokens, ctx)
        return x


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_block_is_the_sum_of_its_sublayers(family: str) -> None:
    """To rounding: the block fuses gains with additions. Two sublayers, three where there is attention to a text."""
    blocks = tiny.shared_pipeline(family).model.blocks
    assert {block.num_sublayers for block in blocks} == {3 if family in tiny.CROSS_ATTENTION_FAMILIES else 2}
    logits: dict[bool, list[Tensor]] = {True: [], False: []}
    for one_by_one in (True, False):
        method = Planned(lambda stage, one_by_one=one_by_one: StagePlan(spans=(RunSublayers(range(3)),)) if one_by_one else DENSE)
        generated(family, method=method, greedy=True, on_stage=lambda preview, seen=logits[one_by_one]: seen.append(preview.done.logits))
    for ours, theirs in zip(logits[True], logits[False], strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-4)


Seen = list[tuple[int, int, Tensor, Tensor, int]]


@dataclass(frozen=True)
class Watching(Method):
    """Shows a test the inputs and outputs of some blocks."""

    observed: tuple[int, ...]
    seen: Seen = field(default_factory=list, compare=False)

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return (StagePlan(observed=self.observed),) * len(schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        return WatchingRun(self.seen)


@dataclass
class WatchingRun(MethodRun):
    seen: Seen

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        self.seen.append((tokens.stage.index, layer, before.clone(), after.clone(), tokens.num_tokens))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_taps_see_inputs_and_outputs_and_change_nothing(family: str) -> None:
    watching = Watching((0, 1, 2))
    tiny.assert_same_bits(generated(family, method=watching), generated(family))
    assert [(stage, layer) for stage, layer, *_ in watching.seen] == list(product(range(STAGES[family]), range(3)))
    for (stage, _, before, after, num_tokens), (next_stage, _, next_before, _, _) in pairwise(watching.seen):
        assert before.shape[:2] == after.shape[:2] == (4, num_tokens)
        assert not torch.equal(before, after)
        if stage == next_stage:
            assert torch.equal(after, next_before)
    some = Watching((1,))
    generated(family, method=some)
    assert [(stage, layer) for stage, layer, *_ in some.seen] == [(stage, 1) for stage in range(STAGES[family])]


@pytest.mark.parametrize("family", ["var", "infinity"])
def test_layer_guidance_acts_at_the_end_of_a_span(family: str) -> None:
    guidance = ConstantGuidance(logits=False, layers=(1,), strength=3.0)
    tiny.assert_same_bits(
        generated(family, guidance=guidance, method=Planned(lambda stage: StagePlan(spans=(RunBlocks(range(2)),)))),
        generated(family, guidance=guidance),
    )


def test_layer_guidance_inside_a_span_is_not_lost() -> None:
    guidance = ConstantGuidance(logits=False, layers=(0,), strength=3.0)
    method = Planned(lambda stage: StagePlan(spans=(RunBlocks(range(2)),)))
    try:
        inside = generated("infinity", guidance=guidance, method=method)
    except ValueError:
        return
    tiny.assert_same_bits(inside, generated("infinity", guidance=guidance))


@pytest.mark.parametrize("layers", [range(1, 1), range(0, 3, 2)])
def test_spans_are_non_empty_and_without_gaps(layers: range) -> None:
    with pytest.raises(ValueError):
        StagePlan(spans=(RunBlocks(layers),))


NO_SUCH_BLOCKS = pytest.mark.parametrize(
    "plan",
    [
        StagePlan(spans=(RunBlocks(range(3, 5)),)),
        StagePlan(spans=(RunBlocks(range(2, 5)),)),
        StagePlan(observed=(3,)),
        StagePlan(observed=(-1,)),
    ],
)


@NO_SUCH_BLOCKS
def test_forecasts_for_blocks_that_do_not_exist_are_refused_before_anything_runs(plan: StagePlan) -> None:
    stages: list[Preview] = []
    with pytest.raises(SettingError, match="blocks 0 to 2"):
        generated("var", method=Planned(lambda stage: plan if stage.last else DENSE), on_stage=stages.append)
    assert stages == []


@NO_SUCH_BLOCKS
def test_plans_for_blocks_that_do_not_exist_are_refused(plan: StagePlan) -> None:
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        generated("var", method=Unforeseen(lambda stage: plan))


# --- skipped stages


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_skipping_no_stage_is_dense(family: str) -> None:
    tiny.assert_same_bits(generated(family, method=SkipStages(0)), generated(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("last", [1, 2])
def test_skipping_decodes_what_the_earlier_stages_generated(family: str, last: int) -> None:
    dense, skipped = generated(family), generated(family, method=SkipStages(last))
    ran = STAGES[family] - last
    assert tiny.same_codes(skipped.codes, dense.codes[:ran])
    assert [stage.tokens for stage in skipped.report.stages[ran:]] == [0] * last
    assert skipped.pixels.shape == dense.pixels.shape
    pipeline = tiny.shared_pipeline(family)
    schedule = tiny.schedule_of(family)
    canvas = pipeline.tokenizer.canvas(schedule, 2)
    for stage in schedule:
        if stage.index < ran:
            canvas.add(dense.codes[stage.index], Tokens(stage))
        else:
            canvas.skip(stage)
    assert torch.equal(skipped.latent, canvas.latent)
    assert not torch.equal(skipped.latent, dense.latent)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@KNOWN
def test_a_stage_in_the_middle_can_be_skipped(planned: PlannedBy, family: str) -> None:
    dense = generated(family)
    skipped = generated(family, method=planned(lambda stage: StagePlan(skip=stage.index == 1)))
    assert len(skipped.codes) == STAGES[family] - 1
    assert torch.equal(skipped.codes[0], dense.codes[0])
    assert [stage.tokens == 0 for stage in skipped.report.stages] == [stage == 1 for stage in range(STAGES[family])]


@pytest.mark.parametrize("last", [4, 5])
def test_impossible_numbers_of_stages_are_refused_before_anything_runs(last: int) -> None:
    with pytest.raises(ValueError, match=f"cannot skip {last} of 4 stages: choose 0 to 3"):
        generated("var", method=SkipStages(last))


@KNOWN
def test_a_method_may_skip_every_stage(planned: PlannedBy) -> None:
    assert generated("var", method=planned(lambda stage: StagePlan(skip=True))).codes == ()


def test_a_stage_that_was_forecast_to_be_skipped_cannot_run() -> None:
    """The caches have no memory for it."""

    class RunAnyway(MethodRun):
        def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
            return DENSE

    class Misled(Planned):
        def start(self, setup: RunSetup) -> MethodRun:
            return RunAnyway()

    with pytest.raises(ValueError, match="stage 3 must not run"):
        generated("var", method=Misled(lambda stage: StagePlan(skip=stage.last)))


# --- cfg branches


def one_from(family: str, first: int) -> list[float]:
    """Guidance up to stage `first`, none from there on."""
    return [2.5 if stage < first else 1.0 for stage in range(STAGES[family])]


def keeping(branches: CfgBranches, first: int) -> Planned:
    return Planned(lambda stage: StagePlan(cfg_branches=branches if stage.index >= first else "both"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("first", [1, 2])
@KNOWN
def test_dropping_the_unconditional_rows_where_guidance_is_one_changes_nothing(planned: PlannedBy, family: str, first: int) -> None:
    """To rounding, because matrix products of another number of rows round differently."""
    both = generated(family, guidance=one_from(family, first))
    method = planned(lambda stage: StagePlan(cfg_branches="cond" if stage.index >= first else "both"))
    dropped = generated(family, guidance=one_from(family, first), method=method)
    assert [stage.rows for stage in both.report.stages] == [4] * STAGES[family]
    assert [stage.rows for stage in dropped.report.stages] == [4] * first + [2] * (STAGES[family] - first)
    tiny.assert_close(family, both, dropped)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dropping_the_unconditional_rows_where_guidance_acts_changes_the_image(family: str) -> None:
    assert not tiny.close_codes(family, generated(family, method=keeping("cond", 1)).codes[-1:], generated(family).codes[-1:])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_unconditional_rows_run_under_the_unconditional_condition(family: str) -> None:
    """Scale 0 is the unconditional cfg branch alone, so leaving only its rows from some stage on is the same thing.

    Except in HART's diffusion, whose variance is never guided: see test_hart.
    """
    mixed = generated(family, guidance=StageGuidance(values=(2.0,) + (0.0,) * (STAGES[family] - 1)))
    alone = generated(family, guidance=StageGuidance(values=(2.0,) * STAGES[family]), method=keeping("uncond", 1))
    assert [stage.rows for stage in alone.report.stages] == [4] + [2] * (STAGES[family] - 1)
    assert tiny.close_codes(family, mixed.codes, alone.codes)
    if family != "hart":
        tiny.assert_close(family, mixed, alone)


@pytest.mark.parametrize("family", tiny.CLASS_FAMILIES)
def test_unconditional_rows_alone_are_the_class_minus_one(family: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    alone = generated(family, method=keeping("uncond", 0))
    unconditional = pipeline([-1, -1], seed=11, guidance=0)
    assert tiny.same_codes(alone.codes, unconditional.codes)


@KNOWN
def test_rows_that_left_do_not_return(planned: PlannedBy) -> None:
    method = planned(lambda stage: StagePlan(cfg_branches=("both", "cond", "uncond", "both")[stage.index]))
    with pytest.raises(ValueError, match="cfg_branches"):
        generated("var", method=method)
    with pytest.raises(ValueError, match="cfg_branches"):
        generated("var", guidance=0, method=keeping("uncond", 0))


# --- chosen tokens


@dataclass
class NamedTokens(MethodRun):
    """Keeps all tokens, but names each of them. `order` may permute them."""

    order: Callable[[int], Tensor]

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        return Tokens(tokens.stage, self.order(tokens.stage.cells).expand(x.shape[0], -1).contiguous())


def every_token(order: Callable[[int], Tensor] = torch.arange) -> Method:
    return Running(lambda setup: NamedTokens(order))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_naming_every_token_is_dense_bit_for_bit(family: str) -> None:
    """So positions, rotations, caches and canvases follow the index."""
    tiny.assert_same_bits(generated(family, method=every_token()), generated(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("settings", [{"greedy": True}, {}], ids=["greedy", "sampled"])
def test_the_order_of_tokens_does_not_matter(family: str, settings: dict[str, bool]) -> None:
    """Random numbers belong to cells. Reversed, every token must find its own position and its own numbers again."""
    reversed_order = generated(family, method=every_token(lambda cells: torch.arange(cells).flip(0)), **settings)
    dense = generated(family, **settings)
    assert tiny.close_codes(family, [codes.flip(1) for codes in reversed_order.codes], dense.codes)
    tiny.assert_close_pixels(family, reversed_order.pixels, dense.pixels)


@dataclass(frozen=True)
class KeepShare(Method):
    """Keeps a share of each image's tokens from some stage on, chosen by a score that is the same for all images."""

    shares: tuple[float, ...]
    from_stage: int = 1
    counts: list[tuple[int, ...]] = field(default_factory=list, compare=False)  # of every stage that a run has reduced

    exclusive = frozenset({"tokens"})

    def start(self, setup: RunSetup) -> MethodRun:
        return KeepShareRun(self)


@dataclass
class KeepShareRun(MethodRun):
    settings: KeepShare

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        cells = tokens.stage.cells
        if tokens.stage.index < self.settings.from_stage:
            return tokens
        score = torch.rand(cells, generator=torch.Generator().manual_seed(cells))
        keep = torch.tensor([max(1, round(share * cells)) for share in self.settings.shares])
        self.settings.counts.append(tuple(keep.tolist()))
        branches = x.shape[0] // len(keep)
        equal = len(set(keep.tolist())) == 1
        score = score.expand(x.shape[0], -1)
        return (tokens.top(score, int(keep[0])) if equal else tokens.top(score, keep.repeat(branches), int(keep.max())))[1]


@pytest.mark.parametrize("family", ["var", "hart"])  # what the method keeps of the grid counts, not the text before it
@KNOWN
def test_a_planned_number_of_tokens_must_be_kept(planned: PlannedBy, family: str) -> None:
    class KeepTwo(MethodRun):
        def __init__(self, plans: MethodRun) -> None:
            self.plans = plans

        def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
            return self.plans.plan(stage, planned, counts)

        def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
            return tokens.take(torch.arange(min(2, x.shape[1])).expand(x.shape[0], -1))

    class Keeping(planned):
        exclusive = frozenset({"tokens"})

        def start(self, setup: RunSetup) -> MethodRun:
            return KeepTwo(super().start(setup))

    generated(family, method=Keeping(lambda stage: StagePlan(num_tokens=min(2, stage.cells))))
    with pytest.raises(ValueError, match="stage 2 was planned with 3 tokens, and 2 entered"):
        generated(family, method=Keeping(lambda stage: StagePlan(num_tokens=min(1 + stage.index, stage.cells))))


SHARES = (0.3, 0.9, 0.6)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_share_of_one_is_dense_bit_for_bit(family: str) -> None:
    tiny.assert_same_bits(generated(family, method=KeepShare((1.0, 1.0))), generated(family))


@MEMORY
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_images_that_keep_different_numbers_of_tokens_equal_those_images_alone(
    family: str, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy codes are equal; pixels to rounding."""
    fill_memory(monkeypatch, memory)
    pipeline = tiny.shared_pipeline(family)
    method = KeepShare(SHARES)
    together = generated(family, images=3, method=method, greedy=True)
    assert all(len(set(counts)) > 1 for counts in method.counts)
    last, counts = together.report.stages[-1], method.counts[-1]
    assert last.tokens == max(counts)
    assert 0 < last.padding == pytest.approx(1 - sum(counts) / len(counts) / max(counts))
    assert together.report.stages[0].padding == 0
    for image, share in enumerate(SHARES):
        alone = pipeline(tiny.one_prompt(family, image), seed=11 + image, method=KeepShare((share,)), greedy=True)
        for ours, theirs in zip(together.codes, alone.codes, strict=True):
            kept = theirs.shape[1]
            assert torch.equal(ours[image, :kept], theirs[0])
            assert (ours[image, kept:] == theirs[0, -1]).all()  # padding repeats the last kept
        tiny.assert_close_pixels(family, together.pixels[image], alone.pixels[0])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_seeded_images_that_keep_different_numbers_of_tokens_equal_those_images_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_memory(monkeypatch, 0.0)
    pipeline = tiny.shared_pipeline(family)
    together = generated(family, images=3, method=KeepShare(SHARES))
    for image, share in enumerate(SHARES):
        alone = pipeline(tiny.one_prompt(family, image), seed=11 + image, method=KeepShare((share,)))
        tiny.assert_close_pixels(family, together.pixels[image], alone.pixels[0])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dense_rows_do_not_depend_on_what_memory_held_before(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = generated(family)
    fill_memory(monkeypatch, float("nan"))
    tiny.assert_same_bits(generated(family), clean)


# --- restoring what was left out


@dataclass
class FirstToken(MethodRun):
    """Computes the first token only, from some stage on."""

    from_stage: int

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        return tokens if tokens.stage.index < self.from_stage else Tokens(tokens.stage, torch.zeros(x.shape[0], 1, dtype=torch.long))


class FirstTokenForAll(FirstToken):
    """Propagates its logits to the others."""

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        if tokens.index is None:
            return Restored(logits, tokens)
        assert tokens.index.shape == (logits.shape[0], 1)
        return Restored(logits.expand(-1, tokens.stage.cells, *logits.shape[2:]), Tokens(tokens.stage))


def first_token(propagate: bool, from_stage: int = 0) -> Method:
    return Running(lambda setup: (FirstTokenForAll if propagate else FirstToken)(from_stage))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_method_may_restore_tokens_that_were_left_out(family: str) -> None:
    """Where STAR refines, the tokens that were computed are settled by the refiner, and the others keep what the method restored."""
    output = generated(family, method=first_token(propagate=True), greedy=True)
    for codes, stage in zip(output.codes, output.report.stages, strict=True):
        refined = family == "star_refined" and stage.index >= tiny.REFINEMENT.first_stage
        restored = codes[:, 1:] if refined else codes
        assert codes.shape[:2] == (2, stage.height * stage.width)
        assert (restored == restored[:, :1]).all()
    if family == "star_refined":
        assert not torch.equal(output.codes[-1][:, 0], output.codes[-1][:, 1])


class NamedThenWhole(NamedTokens):
    """Restores the whole grid after all of it was computed."""

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        whole = Tokens(tokens.stage)
        return Restored(tokens.move(logits, whole), whole)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_restoring_tokens_that_were_all_computed_is_dense_bit_for_bit(family: str) -> None:
    tiny.assert_same_bits(generated(family, method=Running(lambda setup: NamedThenWhole(torch.arange))), generated(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_computed_tokens_get_the_same_codes_whether_or_not_others_are_restored(family: str) -> None:
    last = STAGES[family] - 1
    alone, restored = (generated(family, method=first_token(propagate, last), greedy=True) for propagate in (False, True))
    assert (alone.codes[last].shape[1], restored.codes[last].shape[1]) == (1, tiny.schedule_of(family)[last].cells)
    assert torch.equal(restored.codes[last][:, :1], alone.codes[last])


@pytest.mark.parametrize(("family", "text"), [("var", 0), ("hart", tiny.HART_TEXT - 1)])
def test_the_report_counts_the_computed_tokens(family: str, text: int) -> None:
    """HART's text before its first token as well."""
    assert [stage.tokens for stage in generated(family, method=first_token(propagate=True)).report.stages] == [text + 1, 1, 1, 1]


# --- compute masks


def compute_masks(family: str, method: Method, images: int = 2, **settings: object) -> tuple[Tensor, ...]:
    """Of every stage, [B, cells]; asking for them changes no image."""
    output = generated(family, images, method=method, compute_mask=True, **settings)
    tiny.assert_same_bits(output, generated(family, images, method=method, **settings))
    return tuple(mask.flatten(1) for mask in output.compute_mask)


@dataclass(frozen=True)
class RunLeft(RunBlocks):
    """A span that computes the first `tokens` tokens only, in every sublayer or in the last one of each block, and reports it."""

    tokens: int = 1
    last_sublayer: bool = False
    reports: bool = True

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        some = tokens.take(torch.arange(self.tokens).expand(x.shape[0], -1))
        for block in blocks:
            for number, sublayer in enumerate(block.sublayers(ctx), start=1):
                whole = self.last_sublayer and number < block.num_sublayers
                now, there = (x, tokens) if whole else (x[:, : self.tokens], some)
                x = torch.cat([now + sublayer(now, there, ctx), x[:, now.shape[1] :]], dim=1)
                if ctx.computed is not None and self.reports:
                    ctx.computed.add(there, now, sublayers=1)
        return x


def at_last(*spans: Span) -> Method:
    return Planned(lambda stage: StagePlan(spans=spans) if stage.last else DENSE)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dense_generation_computes_every_cell(family: str) -> None:
    masks = compute_masks(family, Method())
    assert [mask.shape for mask in masks] == [(2, stage.cells) for stage in tiny.schedule_of(family)]
    assert all((mask == 1).all() for mask in masks)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_mask_shows_which_cells_of_which_image_a_reduced_stage_computed(family: str) -> None:
    method = KeepShare((0.3, 0.9))
    first, *reduced = compute_masks(family, method)
    assert (first == 1).all()
    for mask, counts in zip(reduced, method.counts, strict=False):  # requests with and without masks are counted
        assert mask.unique().tolist() in ([0.0, 1.0], [1.0])
        assert tuple(mask.sum(dim=1).tolist()) == counts
        assert (mask[1] >= mask[0]).all()  # one score for all images
    assert (reduced[-1] == 0).any()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_mask_is_the_share_of_sublayers_that_were_computed_for_a_cell(family: str) -> None:
    """One block of three computes 5 cells in all of its sublayers; then in the last one of them only."""
    sublayers = tiny.shared_pipeline(family).model.blocks[0].num_sublayers
    for last_sublayer, missing in ((False, sublayers), (True, 1)):
        mask = compute_masks(family, at_last(RunLeft(range(1, 2), tokens=5, last_sublayer=last_sublayer)))[-1]
        assert (mask[:, :5] == 1).all()
        assert torch.allclose(mask[:, 5:], torch.tensor(1 - missing / (3 * sublayers)))


def test_what_spans_report_adds_up_and_blocks_beside_them_count_in_full() -> None:
    """Two sublayers in each of three blocks: of block 0 one cell, of block 1 all, of block 2 five cells."""
    mask = compute_masks("var", at_last(RunLeft(range(1)), RunLeft(range(2, 3), tokens=5)))[-1]
    assert torch.allclose(mask, torch.tensor([1.0] + [2 / 3] * 4 + [1 / 3] * 11).expand(2, -1))


def test_a_span_that_reports_nothing_has_computed_all_tokens_that_entered() -> None:
    assert (compute_masks("var", at_last(RunLeft(range(1), reports=False)))[-1] == 1).all()
    reduced = Combined((Running(lambda setup: FirstToken(3)), at_last(RunBlocks(range(2)))))
    assert compute_masks("var", reduced)[-1].tolist() == [[1.0] + [0.0] * 15] * 2


def test_the_mask_of_a_guided_pair_is_the_mean_of_its_rows() -> None:
    @dataclass(frozen=True)
    class HalfOfUnconditional(RunBlocks):
        """Reports half of the work for the unconditional rows, of which there are none once they left."""

        def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
            if ctx.computed is not None:
                share = torch.ones(x.shape[0])
                share[ctx.batch :] = 0.5
                ctx.computed.add(tokens, x, 2 * len(blocks), share)
            return super().__call__(blocks, x, tokens, ctx)

    method = at_last(HalfOfUnconditional(range(3)))
    assert (compute_masks("var", method)[-1] == 0.75).all()
    assert (compute_masks("var", Combined((method, keeping("cond", 2))))[-1] == 1).all()
    assert (compute_masks("var", method, guidance=0)[-1] == 1).all()


def test_a_skipped_stage_computes_no_cell() -> None:
    *ran, skipped = compute_masks("var", SkipStages(1))
    assert all((mask == 1).all() for mask in ran)
    assert (skipped == 0).all()


def test_counted_cells_by_hand() -> None:
    """Two images of two rows each on a 1x3 grid, of which row r computes the cells up to r // 2, padded to two."""
    stage = Schedule([(1, 1), (1, 3)])[1]
    index, count = torch.tensor([[0, 0], [0, 0], [0, 1], [0, 1]]), torch.tensor([1, 1, 2, 2])
    cells = ComputedCells(batch=2)
    assert cells.take(4) is None
    cells.add(Tokens(stage, index, count), torch.zeros(4, 2, 8), sublayers=2)
    cells.add(Tokens(stage, prefix=5), torch.zeros(4, 8, 8), sublayers=1, share=torch.tensor([1.0, 0.5, 1.0, 0.0]))
    assert cells.take(4).tolist() == [[0.75, 0.5, 0.25], [0.5625, 0.3125, 0.0625]]
    assert cells.take(4) is None  # the next stage starts at zero


# --- runs


def test_state_belongs_to_the_run() -> None:
    """`start` is called once per request with its forecast, and the run that it returns does the work."""
    setups: list[RunSetup] = []
    asked: list[tuple[StagePlan, int]] = []

    class SkipAsForecast(MethodRun):
        def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
            asked.append((planned, stage.index))
            return planned

    class Starting(Method):
        def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
            return SkipStages(1).forecast(model, schedule, guided, kept)

        def start(self, setup: RunSetup) -> MethodRun:
            setups.append(setup)
            return SkipAsForecast()

    pipeline, plans = tiny.shared_pipeline("var"), (DENSE,) * 3 + (StagePlan(skip=True),)
    output = pipeline([1, 2, 3], seed=0, method=Starting())
    assert len(output.codes) == 3
    (setup,) = setups
    assert (setup.model, setup.schedule, setup.batch) == (pipeline.model, Schedule(tiny.VAR_SIDES), 3)
    assert (setup.plans, setup.guided) == (plans, True)
    assert asked == list(zip(plans, range(4), strict=True))
    pipeline([1, 2], seed=0, guidance=0, method=[Starting(), keeping("cond", 2)])
    assert [(setup.batch, setup.guided) for setup in setups] == [(3, True), (2, False)]
    together = StagePlan(cfg_branches="cond")
    assert setups[1].plans == (DENSE, DENSE, together, replace(together, skip=True))  # of all methods that run together


def test_counting_sees_the_canvas_of_the_stages_before() -> None:
    sums = []

    class Looking(MethodRun):
        def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
            sums.append(canvas.latent.abs().sum().item())
            return None

    generated("infinity", method=Running(lambda setup: Looking()))
    assert sums[0] == 0
    assert all(later != earlier for earlier, later in pairwise(sums))


def test_hooks_are_called_in_the_documented_order() -> None:
    calls: list[tuple[str, int]] = []

    class Calls(MethodRun):
        def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
            calls.append(("count", stage.index))
            return torch.tensor([stage.cells, stage.cells])

        def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
            calls.append(("plan", stage.index))
            assert counts == TokenCounts(stage.cells, stage.cells, 2 * stage.cells)
            return StagePlan(observed=(1,))

        def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
            calls.append(("select_tokens", tokens.stage.index))
            return tokens

        def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
            calls.append(("observe", tokens.stage.index))

        def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
            calls.append(("restore", tokens.stage.index))
            return Restored(logits, tokens)

    tiny.assert_same_bits(generated("hart", method=Running(lambda setup: Calls())), generated("hart"))
    hooks = ("count", "plan", "select_tokens", "observe", "restore")
    assert calls == [*product(hooks, [0]), *product(hooks, [1]), *product(hooks, [2]), *product(hooks, [3])]


def test_the_interface_has_ten_hooks() -> None:
    hooks = {name for owner in (Method, MethodRun) for name, one in vars(owner).items() if isfunction(one) and name[0] != "_"}
    assert hooks == {
        *("forecast", "start", "resolve"),
        *("count", "plan", "select_tokens", "observe", "restore", "layer_cache", "state"),
    }


def test_a_fork_goes_on_from_the_same_tensors_without_changing_the_other() -> None:
    @dataclass
    class Remembering(MethodRun):
        kept: Tensor

    one = Remembering(torch.ones(2))
    other = copy.copy(one)
    assert isinstance(other, Remembering) and other is not one
    assert other.kept is one.kept
    other.kept = torch.zeros(2)
    assert one.kept.tolist() == [1, 1]


@dataclass(frozen=True)
class WithOwnCache(Method):
    """Makes the caches itself and counts them."""

    specs: list[CacheSpec] = field(default_factory=list, compare=False)

    exclusive = frozenset({"cache"})

    def start(self, setup: RunSetup) -> MethodRun:
        return WithOwnCacheRun(self.specs)


@dataclass
class WithOwnCacheRun(MethodRun):
    specs: list[CacheSpec]

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        self.specs.append(spec)
        return LayerCache(spec, workspace)


def test_a_method_may_have_its_own_cache_alone_or_beside_others() -> None:
    for others in ([], [SkipStages(0)]):
        method = WithOwnCache()
        tiny.assert_same_bits(generated("var", method=[*others, method]), generated("var"))
        assert [[keys.tokens for keys in spec.stages] for spec in method.specs] == [[(1,), (4,), (9,), (16,)]] * 3
    with pytest.raises(SettingError, match="each of WithOwnCache and WithOwnCache changes cache"):
        generated("var", method=[WithOwnCache(), WithOwnCache()])
