"""ToMe: which tokens are merged, what the others get, and what must not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.methods import DENSE, Method, SkipStages, StagePlan
from nextscale.methods.fastvar import FastVAR
from nextscale.models import Infinity, InfinityConfig
from nextscale.models.macs import SublayerTokens
from nextscale.pipeline import Output
from nextscale.stage import Schedule, Stage, Tokens
from nextscale_research.methods.merging import Destinations, Merge, merged_count
from nextscale_research.methods.tome import MergedBlocks, ToMe
from tests.helpers import tiny
from tests.helpers.toy_methods import STAGES, KeepShare, keeping, one_from
from tests.methods.test_fastvar import PIXELS, NoReads, forecast, generated, generated_from, lengths, on_meta, picked, ragged

__all__ = ["lengths"]  # a fixture

HALF = ToMe(0.5, stages=(1, 2, 3))
FLOAT16 = 1e-3  # twice its step below 1
NO_SQUARE = Schedule([(1, 1), (2, 3), (3, 5), (4, 6)])


# --- destinations


def mask_of(tokens: Tokens, priority: Tensor | None = None) -> list[list[int]]:
    rows = 1 if tokens.index is None else tokens.index.shape[0]
    order = torch.arange(tokens.stage.cells).expand(rows, -1) if priority is None else priority
    return Destinations.lowest(tokens, order).mask.long().tolist()


def test_the_top_left_token_of_every_block_is_a_destination() -> None:
    assert mask_of(Tokens(Stage(1, 4, 4, 1, False))) == [[1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]]
    assert mask_of(Tokens(Stage(1, 2, 3, 1, False))) == [[1, 0, 1, 0, 0, 0]]
    assert mask_of(Tokens(Stage(1, 3, 2, 1, False))) == [[1, 0, 0, 0, 1, 0]]
    assert mask_of(Tokens(Stage(1, 1, 1, 1, False))) == [[1]]


def test_of_a_block_with_holes_the_first_that_is_there() -> None:
    """Cells 1, 4, 5 of 2x3 in one row, and 2, 3, with padding, in the other."""
    tokens = Tokens(Stage(1, 2, 3, 1, False), torch.tensor([[1, 4, 5], [2, 3, 3]]), torch.tensor([3, 2]))
    into = Destinations.lowest(tokens, torch.arange(6).expand(2, -1))
    assert into.mask.long().tolist() == [[1, 0, 1], [1, 1, 0]]
    assert into.positions.tolist() == [[0, 2], [0, 1]]
    assert into.count.tolist() == [2, 2]


def test_another_order_of_the_cells_gives_other_destinations() -> None:
    stage = Stage(1, 2, 3, 1, False)
    assert mask_of(Tokens(stage), torch.tensor([[5, 4, 3, 2, 1, 0]])) == [[0, 0, 0, 0, 1, 1]]


# --- merging, by hand: 2x2 cells, one destination


SQUARE = Stage(1, 2, 2, 1, False)


def rows_of(*vectors: Sequence[float]) -> Tensor:
    return torch.tensor([vectors], dtype=torch.float32)


def merge_of(x: Tensor, tokens: Tokens, ratio: float) -> Merge:
    return Merge.closest(x, tokens, Destinations.lowest(tokens, torch.arange(tokens.stage.cells).expand(x.shape[0], -1)), ratio)


def test_the_most_alike_token_is_merged_into_its_destination_and_gets_its_answer() -> None:
    """The cosines with (2, 0) are 0, 1 and about 0.7, whatever the lengths."""
    x = rows_of([2, 0], [0, 1], [6, 0], [1, 1])
    merge = merge_of(x, Tokens(SQUARE), 0.25)
    assert merge.tokens.index.tolist() == [[0, 1, 3]]
    assert merge.tokens.count is None
    assert merge.merge(x).tolist() == [[[4, 0], [0, 1], [1, 1]]]
    assert merge.unmerge(rows_of([10], [20], [30])).flatten().tolist() == [10, 20, 10, 30]


def test_half_of_four_merges_two() -> None:
    x = rows_of([2, 0], [0, 1], [6, 0], [1, 3])
    merge = merge_of(x, Tokens(SQUARE), 0.5)
    assert merge.tokens.index.tolist() == [[0, 1]]
    assert merge.merge(x).tolist() == [[[3, 1], [0, 1]]]
    assert merge.unmerge(rows_of([10], [20])).flatten().tolist() == [10, 20, 10, 10]


@pytest.mark.parametrize("ratio", [0.75, 1.0])
def test_destinations_are_never_merged(ratio: float) -> None:
    x = rows_of([2, 0], [0, 1], [6, 0], [0, 3])
    merge = merge_of(x, Tokens(SQUARE), ratio)
    assert merge.tokens.index.tolist() == [[0]]
    assert merge.merge(x).tolist() == [[[2, 1]]]


def test_a_token_joins_the_destination_that_it_resembles_however_far_that_is() -> None:
    """2x4 cells, destinations 0 and 2; cell 1 is next to both and cell 7 in the second block, but both resemble the first."""
    x = rows_of([1, 0], [3, 0], [0, 1], [1, 2], [1, 1.5], [0, 9], [1, 3], [5, 0])
    merge = merge_of(x, Tokens(Stage(1, 2, 4, 1, False)), 0.4)
    assert merge.tokens.index.tolist() == [[0, 2, 3, 4, 6]]
    assert merge.source.tolist() == [[0, 0, 1, 2, 3, 1, 4, 0]]
    assert torch.allclose(merge.merge(x)[0, :2], torch.tensor([[3.0, 0], [0, 5]]))


def test_rows_merge_by_themselves_and_padding_counts_for_nothing() -> None:
    """The second row has two tokens, of which half are merged; its padding would pull the mean to 5.5."""
    tokens = Tokens(SQUARE, torch.tensor([[0, 1, 2, 3], [0, 3, 3, 3]]), torch.tensor([4, 2]))
    x = torch.cat([rows_of([2, 0], [0, 1], [6, 0], [1, 3]), rows_of([2, 0], [6, 2], [6, 2], [6, 2])])
    merge = merge_of(x, tokens, 0.5)
    assert merge.tokens.index.tolist() == [[0, 1], [0, 0]]
    assert merge.tokens.count.tolist() == [2, 1]
    assert merge.merge(x).tolist() == [[[3, 1], [0, 1]], [[4, 1], [4, 1]]]
    assert merge.unmerge(torch.tensor([[[1.0], [2]], [[3], [3]]])).flatten().tolist() == [1, 2, 1, 1, 3, 3, 3, 3]


def test_half_precision_compares_in_float16() -> None:
    """Cosines of 0.9995 and 0.9985 are both 1 in bfloat16, where the first of the two would be merged."""
    x = rows_of([1, 0], [1, 0.0547], [1, 0.0312], [0, 1]).bfloat16()
    assert merge_of(x, Tokens(SQUARE), 0.25).tokens.index.tolist() == [[0, 1, 3]]


# --- merging, in general


@st.composite
def merges(draw: st.DrawFn) -> tuple[Stage, int, float, int]:
    stage = Stage(2, draw(st.integers(1, 5)), draw(st.integers(1, 5)), 3, False)
    return stage, draw(st.integers(1, 3)), draw(st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.75, 1.0])), draw(st.integers(0, 2**31))


@pytest.mark.parametrize("reduced", [False, True])
@settings(deadline=None, max_examples=60)
@given(merges())
def test_every_token_is_run_or_takes_the_output_of_the_most_similar_destination(reduced: bool, case: tuple[Stage, int, float, int]) -> None:
    stage, rows, ratio, seed = case
    generator = torch.Generator().manual_seed(seed)
    tokens = ragged(stage, rows, generator) if reduced else Tokens(stage)
    index = tokens.index if reduced else torch.arange(stage.cells).expand(rows, -1)
    count = tokens.count if reduced else torch.full((rows,), stage.cells)
    x = Tokens(stage, index).gather(torch.randn(rows, stage.cells, 4, generator=generator))
    priority = torch.rand(rows, stage.cells, generator=generator).argsort(dim=1).argsort(dim=1)
    into = Destinations.lowest(tokens, priority)
    merge = Merge.closest(x, tokens, into, ratio)
    merged = merge.merge(x)
    answer = merge.unmerge(merged)
    for row in range(rows):
        real = int(count[row])
        cells = index[row, :real].tolist()
        blocks = {(cell // stage.width // 2, cell % stage.width // 2) for cell in cells}
        destinations = [place for place in range(real) if into.mask[row, place]]
        assert len(destinations) == len(blocks)
        left = max(real - int(real * ratio), len(blocks))
        chosen = merge.selection[row, :left].tolist()
        assert chosen == sorted(set(chosen))
        assert set(destinations) <= set(chosen)
        if merge.tokens.count is not None:
            assert merge.tokens.count[row] == left
        assert left <= merge.selection.shape[1] <= stage.cells
        assert index[row, chosen].tolist() == merge.tokens.index[row, :left].tolist()
        likeness = torch.cosine_similarity(x[row, :, None], x[row, destinations][None], dim=-1)
        members = {place: [place] for place in chosen}
        rest = [float(likeness[other].max()) for other in chosen if other not in destinations]
        for place in set(range(real)) - set(chosen):
            taken = chosen[int(merge.source[row, place])]
            members[taken].append(place)
            alike = float(likeness[place, destinations.index(taken)])
            assert alike >= float(likeness[place].max()) - FLOAT16
            assert all(alike >= other - FLOAT16 for other in rest)
        for slot, place in enumerate(chosen):
            assert torch.allclose(merged[row, slot], x[row, members[place]].mean(dim=0), atol=1e-5)
            for member in members[place]:
                assert torch.equal(answer[row, member], merged[row, slot])
        assert (answer[row, real:] == answer[row, real - 1]).all()


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_fewer_tokens_never_leave_more_than_was_planned(height: int, width: int, ratio: float) -> None:
    """So rows with fewer tokens fit beside the longest."""
    blocks = -(-height // 2) * -(-width // 2)
    left = [merged_count(tokens, ratio, blocks) for tokens in range(1, height * width + 1)]
    assert left == sorted(left)
    assert left[-1] >= blocks


# --- blocks


@dataclass
class ToyBlock:
    """Adds nothing, and remembers how many tokens each sublayer saw."""

    has_text: bool = True
    seen: list[int] = field(default_factory=list)

    @property
    def num_sublayers(self) -> int:
        return 3 if self.has_text else 2

    def sublayers(self, ctx: Any) -> tuple[Callable[..., Tensor], ...]:
        def sublayer(x: Tensor, tokens: Tokens, ctx: Any) -> Tensor:
            assert x.shape[1] == tokens.num_tokens
            self.seen.append(x.shape[1])
            return 0 * x

        return (sublayer,) * self.num_sublayers


@pytest.mark.parametrize(
    ("sublayers", "with_text", "without"),
    [
        (("attention",), [2, 4, 4], [2, 4]),
        (("attention", "feed_forward"), [2, 4, 2], [2, 2]),
        (("feed_forward",), [4, 4, 2], [4, 2]),
        (("attention", "cross_attention", "feed_forward"), [2, 2, 2], None),
    ],
)
def test_only_the_chosen_sublayers_run_on_merged_tokens(
    sublayers: tuple[Any, ...], with_text: list[int], without: list[int] | None
) -> None:
    span = MergedBlocks(range(1), 0.5, sublayers, destinations=1)
    for block, expected in ((ToyBlock(), with_text), (ToyBlock(has_text=False), without)):
        if expected is not None:
            span([block], torch.randn(2, 4, 3), Tokens(SQUARE), SimpleNamespace(computed=None))
            assert block.seen == expected
    assert span.sublayer_tokens(4) == SublayerTokens(*with_text)


def test_nothing_is_read_back_from_the_device() -> None:
    tokens = Tokens(SQUARE, torch.tensor([[0, 1, 2, 3], [0, 3, 3, 3]]), torch.tensor([4, 2]))
    span = MergedBlocks(range(1), 0.5, ("attention",), destinations=1)
    with NoReads():
        span([ToyBlock()], torch.randn(2, 4, 3), tokens, SimpleNamespace(computed=None))


def test_the_macs_of_merging_are_counted() -> None:
    """Per block and row 4 tokens with 1 destination, in 3 channels: once to compare, once per sublayer for the means."""
    assert MergedBlocks(range(2), 0.5, ("attention", "feed_forward"), destinations=1).own_macs(4, 3) == 2 * (1 + 2) * 4 * 1 * 3


# --- settings


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": -0.1},
        {"ratio": 1.1},
        {"ratio": "half"},
        {"ratio": True},
        {"stages": (-1,)},
        {"stages": (1.5,)},
        {"stages": 3},
        {"stages": "all"},
        {"sublayers": ("attention", "mlp")},
        {"sublayers": 3},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        ToMe(**options)


def test_settings_are_values_however_they_are_written() -> None:
    assert ToMe(sublayers="attention").sublayers == ("attention",)  # type: ignore[arg-type]
    assert ToMe(sublayers=["feed_forward", "attention"]) == ToMe()  # type: ignore[arg-type]
    assert len({ToMe(stages=[3, 2]), ToMe(stages=(2, 3, 3))}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ToMe(stages=(4,)), "stages.*0 to 3.*got 4"),
        (ToMe(sublayers=("cross_attention",)), "sublayers.*Var, which has no cross_attention"),
    ],
)
def test_conflicts_with_the_model_or_schedule_raise_before_anything_runs(method: ToMe, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        forecast(method)
    with pytest.raises(SettingError, match=message):
        generated("var", method=method, on_stage=lambda preview: pytest.fail("a stage was run"))


def test_blocks_that_are_more_than_their_sublayers_are_refused() -> None:
    chunked = on_meta(Infinity, InfinityConfig(4, 64, 4, 2, text_channels=256, longest_text=8, level_every_chunk=True))
    with pytest.raises(SettingError, match="level_every_chunk"):
        ToMe().forecast(chunked, Schedule((1, 2, 3)))


def merging_stages(method: Method, schedule: Schedule) -> list[int]:
    return [stage for stage, plan in enumerate(forecast(method, "var", schedule)) if plan.spans]


def test_the_last_three_stages_merge_unless_others_are_named() -> None:
    assert merging_stages(ToMe(), Schedule((1, 2, 3, 4, 5))) == [2, 3, 4]
    assert merging_stages(ToMe(), Schedule((1, 2))) == [1]
    assert merging_stages(ToMe(), Schedule((1,))) == []
    assert merging_stages(ToMe(stages=(0, 1, 3)), Schedule((1, 2, 3, 4))) == [1, 3]  # nothing to merge at stage 0
    assert merging_stages(ToMe(0.2), Schedule((1, 2, 3, 4))) == [2, 3]  # 0.2 of 4 tokens is none


# --- whole images


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("method", [ToMe(0.0, stages=(1, 2, 3)), ToMe(0.0, random=True), ToMe(0.5, stages=()), ToMe(0.5, sublayers=())])
def test_no_strength_is_dense_bit_for_bit(family: str, method: ToMe) -> None:
    assert forecast(method, family) == (DENSE,) * STAGES[family]
    tiny.assert_same_bits(generated(family, method=method), generated(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_merging_changes_its_stages_and_no_earlier_one(family: str) -> None:
    dense, merged = generated(family), generated(family, method=ToMe(0.7, stages=(2,)))
    assert torch.equal(merged.codes[1], dense.codes[1])
    assert not torch.equal(merged.codes[2], dense.codes[2])
    assert merged.pixels.isfinite().all()


def test_every_knob_changes_what_is_computed() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"ratio": 0.3},
        {"sublayers": ("attention",)},
        {"sublayers": ("cross_attention",)},
        {"random": True},
    ]
    logits: list[Tensor] = []
    for option in options:
        done: list[Tensor] = []
        method = ToMe(**{"stages": (3,), **option})
        generated("infinity", method=method, on_stage=lambda preview, done=done: done.append(preview.done.logits))
        logits.append(done[3])
    assert all((a - b).abs().max() > 1e-3 for place, a in enumerate(logits) for b in logits[:place])


def test_equal_tokens_are_merged_alike_in_every_batch() -> None:
    """A matrix product rounds them differently, and the last bit must not choose."""
    stage = Stage(1, 16, 16, 1, False)
    few = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    x = few[torch.arange(256) % 3].repeat(3, 1, 1)
    together = merge_of(x, Tokens(stage), 0.4)
    alone = merge_of(x[:1], Tokens(stage), 0.4)
    assert torch.equal(together.source, alone.source.repeat(3, 1))
    sources = [place for place in range(256) if place // 16 % 2 or place % 2]
    assert [place for place in alone.selection[0].tolist() if place in sources] == sources[:90]  # of equal ones the last are merged


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("random", [False, True])
def test_a_batch_equals_its_images_alone(family: str, random: bool) -> None:
    method = ToMe(0.5, stages=(1, 2, 3), random=random)
    together = generated(family, 3, method=method)
    for image in range(3):
        alone = generated_from(tiny.one_prompt(family, image), family, seed=11 + image, method=method)
        assert all(torch.equal(ours[image], theirs[0]) for ours, theirs in zip(together.codes, alone.codes, strict=True))
        assert torch.allclose(together.pixels[image], alone.pixels[0], rtol=0, atol=PIXELS[family])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_permuted_batch_permutes_the_images(family: str) -> None:
    order, method = [2, 0, 1], ToMe(0.5, random=True)
    straight = generated_from(picked(family, range(3)), family, seed=[5, 60, 700], method=method)
    permuted = generated_from(picked(family, order), family, seed=[700, 5, 60], method=method)
    assert all(torch.equal(ours, theirs[order]) for ours, theirs in zip(permuted.codes, straight.codes, strict=True))
    assert torch.allclose(permuted.pixels, straight.pixels[order], rtol=0, atol=PIXELS[family])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_same_seed_gives_the_same_image(family: str) -> None:
    tiny.assert_same_bits(generated(family, method=ToMe(random=True)), generated(family, method=ToMe(random=True)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_that_guidance_does_not_need_can_leave(family: str) -> None:
    for method in (HALF, ToMe(0.5, random=True)):
        both = generated(family, guidance=one_from(family, 2), method=method)
        dropped = generated(family, guidance=one_from(family, 2), method=[method, keeping("cond", 2)])
        assert [stage.rows for stage in dropped.report.stages] == [4, 4] + [2] * (STAGES[family] - 2)
        assert all(torch.equal(a, b) for a, b in zip(both.codes, dropped.codes, strict=True))


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if not family.startswith("var")])  # VAR knows squares only
def test_images_need_not_be_square(family: str) -> None:
    together = generated(family, size=NO_SQUARE, method=HALF)
    assert [codes.shape[1] for codes in together.codes] == [1, 6, 15, 24]
    alone = generated_from(tiny.one_prompt(family, 1), family, seed=12, size=NO_SQUARE, method=HALF)
    assert all(torch.equal(ours[1], theirs[0]) for ours, theirs in zip(together.codes, alone.codes, strict=True))
    assert not torch.equal(together.codes[2], generated(family, size=NO_SQUARE).codes[2])


def test_half_precision() -> None:
    pipeline = tiny.shared_pipeline("infinity", torch.bfloat16)
    assert pipeline(tiny.prompts("infinity", 2), seed=1, method=HALF).pixels.isfinite().all()


def test_merged_tokens_leave_one_key(lengths: dict[int, int]) -> None:
    """Stages of 1, 4, 9 and 16 tokens; half of 4, 9 and 16, rounded down, are merged away, which leaves 1, 2, 5 and 8."""
    output = generated("var", method=HALF)
    assert set(lengths.values()) == {1 + 2 + 5 + 8}
    generated("var", method=ToMe(0.5, stages=(1, 2, 3), sublayers=("feed_forward",)))
    assert lengths[3] == 1 + 4 + 9 + 16  # the second request's caches are counted after the first's
    assert len(output.codes) == 4


# --- together with other methods


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_inside_stages_that_another_method_reduces(family: str) -> None:
    shares = (0.5, 1.0, 0.7)
    method = ToMe(0.6, stages=(2, 3))
    together = generated(family, 3, greedy=True, method=[KeepShare(shares, from_stage=2), method])
    whole = generated(family, 3, greedy=True, method=KeepShare(shares, from_stage=2))
    assert any(not torch.equal(a, b) for a, b in zip(together.codes, whole.codes, strict=True))
    for image, share in enumerate(shares):
        prompt = tiny.one_prompt(family, image)
        alone = generated_from(prompt, family, seed=11 + image, greedy=True, method=[KeepShare((share,), from_stage=2), method])
        for ours, theirs in zip(together.codes, alone.codes, strict=True):
            assert torch.equal(ours[image, : theirs.shape[1]], theirs[0])
            assert (ours[image, theirs.shape[1] :] == theirs[0, -1]).all()
        assert torch.allclose(together.pixels[image], alone.pixels[0], rtol=0, atol=PIXELS[family])


def test_with_skipped_stages() -> None:
    tiny.assert_same_bits(
        generated("var", method=[ToMe(stages=(2, 3)), SkipStages(1)]), generated("var", method=[SkipStages(1), ToMe(stages=(2,))])
    )


def test_with_fastvar_only_at_other_stages() -> None:
    fast = FastVAR({3: 0.5})  # keeps outputs of stage 2
    with pytest.raises(SettingError, match="at stage 2 both change block"):
        generated("var", method=[ToMe(stages=(2,)), fast], on_stage=lambda preview: pytest.fail("a stage was run"))
    assert len(generated("var", method=[ToMe(stages=(1,)), fast]).codes) == 4


# --- what was run


def plans_of(output_plans: list[StagePlan], **options: Any) -> Output:
    return generated("var", on_stage=lambda preview: output_plans.append(preview.done.plan), **options)


@pytest.mark.parametrize("random", [False, True])
def test_plans_are_as_forecast(random: bool) -> None:
    plans: list[StagePlan] = []
    method = ToMe(random=random)
    plans_of(plans, method=method)
    assert tuple(plans) == forecast(method)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_share_of_the_network_that_ran_for_every_cell(rows: int) -> None:
    """Three blocks of two sublayers, one of which merges: three sublayers for all cells, six for destinations."""
    options: dict[str, Any] = {"method": ToMe(0.5, stages=(3,), sublayers=("attention",))}
    options |= {} if rows == 2 else {"guidance": tiny.NO_GUIDANCE["var"]}
    output = generated("var", compute_mask=True, **options)
    assert output.compute_mask is not None
    assert all((share == 1).all() for share in output.compute_mask[:3])
    times = output.compute_mask[3] * 6
    assert torch.equal(rows * times, (rows * times).round())  # the mean over the rows of an image
    assert rows == 1 or not torch.equal(times, times.round())  # which merge for themselves
    assert times.min() >= 3
    assert (times[:, ::2, ::2] == 6).all()
    assert times.sum(dim=(1, 2)).tolist() == [3 * 16 + 3 * 8] * 2
    tiny.assert_same_bits(output, generated("var", **options))
