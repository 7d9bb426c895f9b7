"""The interface between generation and acceleration methods: whatever does nothing must change nothing, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from nextscale.accel import DENSE, Method, RunSetup, SkipStages, Span, StagePlan
from nextscale.canvas import Canvas
from nextscale.guidance import CfgBranches, ConstantGuidance, StageGuidance
from nextscale.models.blocks import Block
from nextscale.models.env import Env
from nextscale.pipeline import Output
from nextscale.stage import Schedule, Stage, Tokens

from . import tiny
from .test_cache import MEMORY, fill_memory

STAGES = {family: len(tiny.schedule_of(family)) for family in tiny.FAMILIES}


@dataclass(frozen=True)
class RunBlocks(Span):
    """A span that runs its blocks as generation would."""

    layers: range
    key: str = "identity"

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        for block in blocks:
            x = block(x, tokens, env)
        return x


@dataclass(frozen=True)
class Planned(Method):
    """Does what a function of the stage says."""

    of_stage: Callable[[Stage], StagePlan]

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return self.of_stage(stage)


def drawn(family: str, images: int = 2, **settings: object) -> Output:
    return tiny.shared_pipeline(family)(tiny.prompts(family, images), seed=11, **settings)


# --- plans


def test_merging_with_dense_changes_nothing() -> None:
    plan = StagePlan(skip=True, cfg_branches="cond", num_tokens=5, spans=(RunBlocks(range(2)),), taps=(2,))
    assert plan.merge(DENSE) == plan
    assert DENSE.merge(plan) == plan
    assert DENSE.merge(DENSE) == DENSE
    assert hash(plan) == hash(plan.merge(DENSE))


def test_plans_merge_part_by_part() -> None:
    first = StagePlan(cfg_branches="uncond", spans=(RunBlocks(range(2)),), taps=(6, 4))
    second = StagePlan(skip=True, num_tokens=7, spans=(RunBlocks(range(2, 4)),), taps=(5, 4))
    merged = first.merge(second)
    assert merged == StagePlan(True, "uncond", 7, (RunBlocks(range(2)), RunBlocks(range(2, 4))), (4, 5, 6))
    assert StagePlan(num_tokens=7).merge(StagePlan(num_tokens=7)).num_tokens == 7
    assert StagePlan(cfg_branches="cond").merge(StagePlan(cfg_branches="cond")).cfg_branches == "cond"


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        (StagePlan(num_tokens=5), StagePlan(num_tokens=6), "to 5 and to 6 tokens"),
        (StagePlan(cfg_branches="cond"), StagePlan(cfg_branches="uncond"), "only the conditional rows"),
        (StagePlan(spans=(RunBlocks(range(3)),)), StagePlan(spans=(RunBlocks(range(2, 4)),)), r"range\(0, 3\).*range\(2, 4\)"),
        (StagePlan(spans=(RunBlocks(range(1, 2), "b"),)), StagePlan(spans=(RunBlocks(range(4), "a"),)), "a.*b"),
        (StagePlan(spans=(RunBlocks(range(3)),)), StagePlan(taps=(2,)), "block 2 cannot be observed"),
        (StagePlan(taps=(0,)), StagePlan(spans=(RunBlocks(range(3)),)), "block 0 cannot be observed"),
    ],
)
def test_conflicts_are_named(first: StagePlan, second: StagePlan, conflict: str) -> None:
    with pytest.raises(ValueError, match=conflict):
        first.merge(second)


def test_neighbouring_spans_and_taps_beside_spans_are_no_conflict() -> None:
    plan = StagePlan(spans=(RunBlocks(range(2, 4)), RunBlocks(range(2))), taps=(4,))
    assert len(plan.spans) == 2


# --- spans and taps


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layers", [[range(3)], [range(1)], [range(1, 3)], [range(2, 3), range(2)]], ids=str)
def test_a_span_that_runs_its_blocks_is_dense_bit_for_bit(family: str, layers: list[range]) -> None:
    method = Planned(lambda stage: StagePlan(spans=tuple(RunBlocks(part) for part in layers)))
    tiny.assert_same_bits(drawn(family, method=method), drawn(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
def test_a_span_replaces_its_blocks(family: str, layers: range) -> None:
    """A span that does nothing at the last stage changes the last stage and no other."""

    class Nothing(RunBlocks):
        def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
            assert [block.layer for block in blocks] == list(layers)
            return x

    dense = drawn(family)
    without = drawn(family, method=Planned(lambda stage: StagePlan(spans=(Nothing(layers),)) if stage.last else DENSE))
    assert tiny.same_codes(without.codes[:-1], dense.codes[:-1])
    assert not tiny.close_codes(family, without.codes[-1:], dense.codes[-1:])


@dataclass(frozen=True)
class RunParts(RunBlocks):
    """A span that adds the residual branches one by one, as methods that thin a single branch do."""

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        for block in blocks:
            for part in block.sublayers:
                x = x + part(x, tokens, env)
        return x


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_block_is_the_sum_of_its_parts(family: str) -> None:
    """To rounding: the block fuses gains with additions. Two branches, three where there is attention to a text."""
    blocks = tiny.shared_pipeline(family).model.blocks
    assert {len(block.sublayers) for block in blocks} == {3 if family in tiny.CROSS_ATTENTION_FAMILIES else 2}
    logits: dict[bool, list[Tensor]] = {True: [], False: []}
    for by_parts in (True, False):
        method = Planned(lambda stage, by_parts=by_parts: StagePlan(spans=(RunParts(range(3)),)) if by_parts else DENSE)
        drawn(family, method=method, greedy=True, on_stage=lambda preview, seen=logits[by_parts]: seen.append(preview.done.logits))
    for ours, theirs in zip(logits[True], logits[False], strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-4)


@dataclass
class Watching(Method):
    """Keeps inputs and outputs of some blocks, and the output of every stage before sampling."""

    taps: tuple[int, ...]
    seen: list[tuple[int, int, Tensor, Tensor, int]] = field(default_factory=list)

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return StagePlan(taps=self.taps)

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        self.seen.append((tokens.stage.index, layer, before.clone(), after.clone(), tokens.num_tokens))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_taps_see_inputs_and_outputs_and_change_nothing(family: str) -> None:
    watching = Watching((0, 1, 2))
    tiny.assert_same_bits(drawn(family, method=watching), drawn(family))
    assert [(stage, layer) for stage, layer, *_ in watching.seen] == list(product(range(STAGES[family]), range(3)))
    for (stage, _, before, after, width), (next_stage, _, next_before, _, _) in pairwise(watching.seen):
        assert before.shape[:2] == after.shape[:2] == (4, width)
        assert not torch.equal(before, after)
        if stage == next_stage:
            assert torch.equal(after, next_before)
    some = Watching((1,))
    drawn(family, method=some)
    assert [(stage, layer) for stage, layer, *_ in some.seen] == [(stage, 1) for stage in range(STAGES[family])]


@pytest.mark.parametrize("family", ["var", "infinity"])
def test_layer_guidance_acts_at_the_end_of_a_span(family: str) -> None:
    guidance = ConstantGuidance(logits=False, layers=(1,), strength=3.0)
    tiny.assert_same_bits(
        drawn(family, guidance=guidance, method=Planned(lambda stage: StagePlan(spans=(RunBlocks(range(2)),)))),
        drawn(family, guidance=guidance),
    )


def test_layer_guidance_inside_a_span_is_not_lost() -> None:
    guidance = ConstantGuidance(logits=False, layers=(0,), strength=3.0)
    method = Planned(lambda stage: StagePlan(spans=(RunBlocks(range(2)),)))
    try:
        inside = drawn("infinity", guidance=guidance, method=method)
    except ValueError:
        return
    tiny.assert_same_bits(inside, drawn("infinity", guidance=guidance))


@pytest.mark.parametrize("layers", [range(1, 1), range(0, 3, 2)])
def test_spans_are_non_empty_and_without_gaps(layers: range) -> None:
    with pytest.raises(ValueError):
        StagePlan(spans=(RunBlocks(layers),))


@pytest.mark.parametrize(
    "plan",
    [StagePlan(spans=(RunBlocks(range(3, 5)),)), StagePlan(spans=(RunBlocks(range(2, 5)),)), StagePlan(taps=(3,)), StagePlan(taps=(-1,))],
)
def test_plans_for_blocks_that_do_not_exist_are_refused(plan: StagePlan) -> None:
    with pytest.raises(ValueError):
        drawn("var", method=Planned(lambda stage: plan))


# --- skipped stages


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_skipping_no_stage_is_dense(family: str) -> None:
    tiny.assert_same_bits(drawn(family, method=SkipStages(0)), drawn(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("last", [1, 2])
def test_skipping_decodes_what_the_earlier_stages_drew(family: str, last: int) -> None:
    dense, skipped = drawn(family), drawn(family, method=SkipStages(last))
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
def test_a_stage_in_the_middle_can_be_skipped(family: str) -> None:
    dense = drawn(family)
    skipped = drawn(family, method=Planned(lambda stage: StagePlan(skip=stage.index == 1)))
    assert len(skipped.codes) == STAGES[family] - 1
    assert torch.equal(skipped.codes[0], dense.codes[0])
    assert [stage.tokens == 0 for stage in skipped.report.stages] == [stage == 1 for stage in range(STAGES[family])]


@pytest.mark.parametrize("last", [-1, 4, 5])
def test_impossible_numbers_of_stages_are_refused_before_anything_runs(last: int) -> None:
    with pytest.raises(ValueError, match=f"cannot skip {last} of 4 stages: choose 0 to 3"):
        drawn("var", method=SkipStages(last))


def test_a_method_may_skip_every_stage() -> None:
    assert drawn("var", method=Planned(lambda stage: StagePlan(skip=True))).codes == ()


# --- branches


def one_from(family: str, first: int) -> list[float]:
    """Guidance up to stage `first`, none from there on."""
    return [2.5 if stage < first else 1.0 for stage in range(STAGES[family])]


def keeping(branches: CfgBranches, first: int) -> Planned:
    return Planned(lambda stage: StagePlan(cfg_branches=branches if stage.index >= first else "both"))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("first", [1, 2])
def test_dropping_the_unconditional_rows_where_guidance_is_one_changes_nothing(family: str, first: int) -> None:
    """To rounding, because matrix products of another number of rows round differently."""
    both = drawn(family, guidance=one_from(family, first))
    dropped = drawn(family, guidance=one_from(family, first), method=keeping("cond", first))
    assert [stage.rows for stage in both.report.stages] == [4] * STAGES[family]
    assert [stage.rows for stage in dropped.report.stages] == [4] * first + [2] * (STAGES[family] - first)
    tiny.assert_close(family, both, dropped)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dropping_the_unconditional_rows_where_guidance_acts_changes_the_image(family: str) -> None:
    assert not tiny.close_codes(family, drawn(family, method=keeping("cond", 1)).codes[-1:], drawn(family).codes[-1:])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_unconditional_rows_run_under_the_unconditional_condition(family: str) -> None:
    """Scale 0 is the unconditional branch alone, so leaving only its rows from some stage on is the same thing.

    Except in HART's diffusion, whose variance is never guided: see test_hart.
    """
    mixed = drawn(family, guidance=StageGuidance(values=(2.0,) + (0.0,) * (STAGES[family] - 1)))
    alone = drawn(family, guidance=StageGuidance(values=(2.0,) * STAGES[family]), method=keeping("uncond", 1))
    assert [stage.rows for stage in alone.report.stages] == [4] + [2] * (STAGES[family] - 1)
    assert tiny.close_codes(family, mixed.codes, alone.codes)
    if family != "hart":
        tiny.assert_close(family, mixed, alone)


@pytest.mark.parametrize("family", tiny.CLASS_FAMILIES)
def test_unconditional_rows_alone_are_the_class_minus_one(family: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    alone = drawn(family, method=keeping("uncond", 0))
    unconditional = pipeline([-1, -1], seed=11, guidance=0)
    assert tiny.same_codes(alone.codes, unconditional.codes)


def test_a_branch_that_left_cannot_be_asked_for() -> None:
    method = Planned(lambda stage: StagePlan(cfg_branches=("both", "cond", "uncond", "both")[stage.index]))
    with pytest.raises(ValueError, match="uncond rows do not run any more"):
        drawn("var", method=method)
    with pytest.raises(ValueError, match="uncond rows do not run any more"):
        drawn("var", guidance=0, method=keeping("uncond", 0))


# --- chosen tokens


@dataclass
class EveryToken(Method):
    """Keeps all tokens, but names each of them. `order` may permute them."""

    order: Callable[[int], Tensor] = torch.arange

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        named = Tokens(tokens.stage, self.order(tokens.stage.cells).expand(x.shape[0], -1).contiguous())
        return named.gather(x), named


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_naming_every_token_is_dense_bit_for_bit(family: str) -> None:
    """So positions, rotations, caches and canvases follow the index."""
    tiny.assert_same_bits(drawn(family, method=EveryToken()), drawn(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("settings", [{"greedy": True}, {}], ids=["greedy", "drawn"])
def test_the_order_of_tokens_does_not_matter(family: str, settings: dict[str, bool]) -> None:
    """Random numbers belong to cells. Reversed, every token must find its own position and its own numbers again."""
    reversed_order = drawn(family, method=EveryToken(lambda cells: torch.arange(cells).flip(0)), **settings)
    dense = drawn(family, **settings)
    assert tiny.close_codes(family, [codes.flip(1) for codes in reversed_order.codes], dense.codes)
    tiny.assert_close_pixels(family, reversed_order.pixels, dense.pixels)


@dataclass
class KeepShare(Method):
    """Keeps a share of each image's tokens from stage 1 on, chosen by a score that is the same for all images."""

    shares: tuple[float, ...]
    widths: list[tuple[int, ...]] = field(default_factory=list)

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        cells = tokens.stage.cells
        if tokens.stage.index == 0:
            return x, tokens
        score = torch.rand(cells, generator=torch.Generator().manual_seed(cells))
        keep = torch.tensor([max(1, round(share * cells)) for share in self.shares])
        self.widths.append(tuple(keep.tolist()))
        branches = x.shape[0] // len(keep)
        equal = len(set(keep.tolist())) == 1
        score = score.expand(x.shape[0], -1)
        selection, kept = tokens.top(score, int(keep[0])) if equal else tokens.top(score, keep.repeat(branches), int(keep.max()))
        return Tokens(tokens.stage, selection).gather(x), kept


@pytest.mark.parametrize("family", ["var", "hart"])  # what the method keeps of the grid counts, not the text before it
def test_a_planned_width_must_be_kept(family: str) -> None:
    class KeepTwo(Planned):
        def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
            kept = tokens.take(torch.arange(min(2, x.shape[1])).expand(x.shape[0], -1))
            return kept.gather(x), kept

    drawn(family, method=KeepTwo(lambda stage: StagePlan(num_tokens=min(2, stage.cells))))
    with pytest.raises(ValueError, match="stage 2 was planned with 3 tokens, and 2 entered"):
        drawn(family, method=KeepTwo(lambda stage: StagePlan(num_tokens=min(1 + stage.index, stage.cells))))


SHARES = (0.3, 0.9, 0.6)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_share_of_one_is_dense_bit_for_bit(family: str) -> None:
    tiny.assert_same_bits(drawn(family, method=KeepShare((1.0, 1.0))), drawn(family))


@MEMORY
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_images_that_keep_different_numbers_of_tokens_equal_those_images_alone(
    family: str, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy codes are equal; pixels to rounding."""
    fill_memory(monkeypatch, memory)
    pipeline = tiny.shared_pipeline(family)
    method = KeepShare(SHARES)
    together = drawn(family, images=3, method=method, greedy=True)
    assert all(len(set(kept)) > 1 for kept in method.widths)
    last, kept = together.report.stages[-1], method.widths[-1]
    assert last.tokens == max(kept)
    assert 0 < last.padding == pytest.approx(1 - sum(kept) / len(kept) / max(kept))
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
    together = drawn(family, images=3, method=KeepShare(SHARES))
    for image, share in enumerate(SHARES):
        alone = pipeline(tiny.one_prompt(family, image), seed=11 + image, method=KeepShare((share,)))
        tiny.assert_close_pixels(family, together.pixels[image], alone.pixels[0])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dense_rows_do_not_depend_on_what_memory_held_before(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = drawn(family)
    fill_memory(monkeypatch, float("nan"))
    tiny.assert_same_bits(drawn(family), clean)


# --- leaving


@dataclass
class RunFirst(Method):
    """Runs the first token only, from some stage on."""

    first_stage: int = 0

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        if tokens.stage.index < self.first_stage:
            return x, tokens
        first = Tokens(tokens.stage, torch.zeros(x.shape[0], 1, dtype=torch.long))
        return first.gather(x), first


class SpeakForAll(RunFirst):
    """Lets it speak for the others."""

    def restore(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        if tokens.index is None:
            return out, tokens
        assert tokens.index.shape == (out.shape[0], 1)
        return out.expand(-1, tokens.stage.cells, *out.shape[2:]), Tokens(tokens.stage)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_method_may_speak_for_tokens_that_were_left_out(family: str) -> None:
    """Where STAR refines, the tokens that ran are settled by the refiner, and the others keep what the method says."""
    output = drawn(family, method=SpeakForAll(), greedy=True)
    for codes, stage in zip(output.codes, output.report.stages, strict=True):
        refined = family == "star_refined" and stage.index >= tiny.REFINEMENT.first_stage
        spoken = codes[:, 1:] if refined else codes
        assert codes.shape[:2] == (2, stage.height * stage.width)
        assert (spoken == spoken[:, :1]).all()
    if family == "star_refined":
        assert not torch.equal(output.codes[-1][:, 0], output.codes[-1][:, 1])


class ToTheWholeGrid(EveryToken):
    """Speaks for the whole grid after all of it ran."""

    def restore(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        whole = Tokens(tokens.stage)
        return tokens.move(out, whole), whole


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_speaking_for_tokens_that_all_ran_is_dense_bit_for_bit(family: str) -> None:
    tiny.assert_same_bits(drawn(family, method=ToTheWholeGrid()), drawn(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_tokens_that_ran_get_the_same_codes_whether_or_not_others_are_spoken_for(family: str) -> None:
    last = STAGES[family] - 1
    alone, spoken = (drawn(family, method=method(first_stage=last), greedy=True) for method in (RunFirst, SpeakForAll))
    assert (alone.codes[last].shape[1], spoken.codes[last].shape[1]) == (1, tiny.schedule_of(family)[last].cells)
    assert torch.equal(spoken.codes[last][:, :1], alone.codes[last])


@pytest.mark.parametrize(("family", "text"), [("var", 0), ("hart", tiny.HART_TEXT - 1)])
def test_the_report_counts_the_tokens_that_ran(family: str, text: int) -> None:
    """HART's text before its first token as well."""
    assert [stage.tokens for stage in drawn(family, method=SpeakForAll()).report.stages] == [text + 1, 1, 1, 1]


# --- runs


def test_state_belongs_to_the_run() -> None:
    """`start` is asked once per request and its answer does the work."""
    started = []

    class Starting(Method):
        def start(self, setup: RunSetup) -> Method:
            started.append((setup.model, setup.schedule, setup.batch))
            return SkipStages(1).start(setup)

        def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
            raise AssertionError("the method itself was asked, not its run")

    pipeline = tiny.shared_pipeline("var")
    output = pipeline([1, 2, 3], seed=0, method=Starting())
    assert len(output.codes) == 3
    assert started == [(pipeline.model, Schedule(tiny.VAR_SIDES), 3)]


def test_a_plan_sees_the_canvas_of_the_stages_before() -> None:
    sums = []

    class Looking(Method):
        def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
            sums.append(canvas.latent.abs().sum().item())
            return DENSE

    drawn("infinity", method=Looking())
    assert sums[0] == 0
    assert all(later != earlier for earlier, later in pairwise(sums))
