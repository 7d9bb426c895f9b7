"""STAR: the refiner's rounds, the row of text that the reference implementation reads, and guidance by the empty prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextscale.errors import PromptError, SettingError, TextEncoderUnavailable
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import build_model
from nextscale.models import Star, StarConfig
from nextscale.models.refiner import RefinementState, Refiner, cells_per_round
from nextscale.pipeline import Output, Pipeline
from nextscale.sampling import Refinement, filter_logits
from nextscale.stage import Stage, Tokens
from nextscale.text import Encoder, TextFeatures
from nextscale.text.prompts import TextReader
from tests.helpers import tiny
from tests.methods.test_method import KeepShare, keeping, one_from

SCHEDULE = tiny.schedule_of("star")
REFINED = [stage for stage in SCHEDULE if stage.index >= tiny.REFINEMENT.first_stage]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(family: str = "star_refined", images: int = 2, seed: Any = 11, **settings: Any) -> Output:
    return tiny.shared_pipeline(family)(tiny.prompts(family, images), seed=seed, **settings)


# --- how many cells a round settles


@pytest.mark.parametrize(
    ("rounds", "side", "counts"),
    [
        (8, 21, [1, 31, 44, 55, 65, 74, 82, 89]),
        (8, 48, [1, 162, 232, 289, 338, 384, 428, 470]),
        (15, 64, [1, 106, 151, 186, 216, 243, 268, 292, 314, 336, 357, 377, 397, 417, 435]),
    ],
)
def test_the_published_rounds(rounds: int, side: int, counts: list[int]) -> None:
    assert cells_per_round(rounds, torch.tensor(side * side)).tolist() == counts
    assert sum(counts) == side * side


def test_every_image_has_its_own_rounds() -> None:
    cells = torch.tensor([441, 7, 2304])
    assert cells_per_round(8, cells).T.tolist() == [cells_per_round(8, count).tolist() for count in cells]


@settings(deadline=None)
@given(rounds=st.integers(1, 20), cells=st.integers(1, 5000))
def test_rounds_settle_all_cells_and_never_fewer_than_before(rounds: int, cells: int) -> None:
    """With fewer cells than rounds, each round but the last settles one, and the last may settle none."""
    counts = cells_per_round(rounds, torch.tensor(cells)).tolist()
    early = counts[:-1]
    assert len(counts) == rounds
    assert min(counts) >= 0 and all(count >= 1 for count in early)
    assert early == sorted(early)
    assert counts[-1] == max(cells - sum(early), 0)
    assert sum(counts) >= cells
    if rounds > 1:
        assert counts[0] == 1


# --- the board


def test_the_best_cells_are_settled_and_of_equals_the_first() -> None:
    """The tokens of two images are cells 4, 0 and 2 of five; the others are never settled."""
    stage = Stage(2, 1, 5, 2, False)
    state = RefinementState(Tokens(stage, torch.tensor([[4, 0, 2], [4, 0, 2]])), 2, torch.device("cpu"))
    assert state.cells.tolist() == [3, 3]
    state.settle(torch.tensor([[0.5, 0.5, 0.1], [0.0, 0.2, 0.3]]), torch.tensor([1, 2]), torch.tensor([[7, 8, 9], [7, 8, 9]]))
    assert state.settled.long().tolist() == [[1, 0, 0, 0, 0], [1, 0, 1, 0, 0]]
    assert state.numbers.tolist() == [[8, 0, 0, 0, 0], [8, 0, 9, 0, 0]]
    state.settle(torch.tensor([[0.5, 0.9, 0.1], [0.5, 0.9, 0.1]]), torch.tensor([3, 1]), torch.tensor([[1, 2, 3], [1, 2, 3]]))
    assert state.settled.long().tolist() == [[1, 0, 1, 0, 1], [1, 0, 1, 0, 0]]  # the second image's best was settled before
    assert state.numbers.tolist() == [[8, 0, 3, 0, 1], [8, 0, 9, 0, 0]]
    assert state.at(state.numbers).tolist() == [[1, 8, 3], [0, 8, 9]]


def test_a_board_has_as_many_cells_to_settle_as_an_image_has_tokens() -> None:
    stage = Stage(2, 1, 5, 2, False)
    assert RefinementState(Tokens(stage), 3, torch.device("cpu")).cells.tolist() == [5, 5, 5]
    ragged = Tokens(stage, torch.tensor([[1, 4], [2, 2]]), torch.tensor([2, 1]))
    assert RefinementState(ragged, 2, torch.device("cpu")).cells.tolist() == [2, 1]


class WatchedState(RefinementState):
    """Records the settled cells after every call."""

    boards: list[WatchedState]

    def __init__(self, tokens: Tokens, batch: int, device: torch.device) -> None:
        super().__init__(tokens, batch, device)
        self.counts: list[Tensor] = []
        self.history = [(self.numbers, self.settled)]
        self.boards.append(self)

    def settle(self, score: Tensor, count: Tensor, drawn: Tensor) -> None:
        super().settle(score, count, drawn)
        self.counts.append(count)
        self.history.append((self.numbers, self.settled))

    @property
    def newly(self) -> list[list[int]]:
        """Returns the number of cells of each image that each call settled."""
        totals = torch.stack([settled.sum(dim=1) for _, settled in self.history])
        return totals.diff(dim=0).tolist()


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[WatchedState]:
    WatchedState.boards = []
    monkeypatch.setattr("nextscale.models.refiner.RefinementState", WatchedState)
    return WatchedState.boards


@pytest.mark.parametrize("chosen", [{}, {"greedy": True}, {"top_k": 1}], ids=["drawn", "greedy", "all equally certain"])
def test_every_cell_is_settled_once(boards: list[WatchedState], chosen: dict[str, Any]) -> None:
    output = drawn(**chosen)
    assert [state.tokens.stage for state in boards] == REFINED
    for state in boards:
        (numbers, settled), *_ = state.history
        assert not settled.any()
        for later_numbers, later_settled in state.history[1:]:
            assert (settled <= later_settled).all()
            assert torch.equal(later_numbers[settled], numbers[settled])
            numbers, settled = later_numbers, later_settled
        assert settled.all()
        assert torch.equal(numbers, output.codes[state.tokens.stage.index])


def test_drafted_rounds_settle_twice(boards: list[WatchedState]) -> None:
    """First the most certain of all cells, those already settled included; then as many that are not, while there are any."""
    drawn()
    for state, rounds, drafted in zip(boards, tiny.REFINEMENT.rounds, tiny.REFINEMENT.drafted, strict=True):
        counts = cells_per_round(rounds, torch.tensor(state.tokens.stage.cells)).tolist()
        expected = [count for turn, count in enumerate(counts) for _ in range(2 if turn < drafted else 1)]
        assert [count.tolist() for count in state.counts] == [[count, count] for count in expected]
        left = torch.full((2,), state.tokens.stage.cells)
        for call, (count, newly) in enumerate(zip(expected, state.newly, strict=True)):
            again = call % 2 == 0 and call < 2 * drafted
            for image in range(2):
                assert newly[image] <= count if again else newly[image] == min(count, left[image])
            left = left - torch.tensor(newly)


def test_only_the_kept_tokens_are_settled(boards: list[WatchedState]) -> None:
    shares = (0.3, 0.9)
    drawn(method=KeepShare(shares))
    for state in boards:
        _, settled = state.history[-1]
        kept = torch.zeros_like(settled).scatter(1, state.tokens.index, True)
        assert torch.equal(settled, kept)
        assert settled.sum(dim=1).tolist() == [max(1, round(share * state.tokens.stage.cells)) for share in shares]


def test_stages_beyond_the_listed_rounds_repeat_the_last_entry(boards: list[WatchedState]) -> None:
    drawn(refine=Refinement(first_stage=1, rounds=(3, 2), drafted=(1, 0), random=1))
    assert [state.tokens.stage.index for state in boards] == [1, 2, 3]
    assert [len(state.counts) for state in boards] == [3 + 1, 2, 2]


# --- the refiner


class WatchedRefiner:
    """Records inputs and outputs of the refiner in every round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: list[Tensor] = []
        self.stages: list[int] = []
        self.logits: list[Tensor] = []
        forward = Refiner.forward

        def watched(refiner: Refiner, x: Tensor, known: Tensor, tokens: Tokens, ctx: Any) -> Tensor:
            self.known.append(known)
            self.stages.append(tokens.stage.index)
            self.logits.append(forward(refiner, x, known, tokens, ctx))
            return self.logits[-1]

        monkeypatch.setattr(Refiner, "forward", watched)


def test_the_refiner_runs_in_the_rounds_that_are_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = WatchedRefiner(monkeypatch)
    drawn()
    assert seen.stages == [2] * (4 - 2) + [3] * 5


def test_the_refiner_sees_what_is_settled_and_zero_elsewhere(monkeypatch: pytest.MonkeyPatch, boards: list[WatchedState]) -> None:
    seen = WatchedRefiner(monkeypatch)
    drawn(refine=replace(tiny.REFINEMENT, first_stage=3, rounds=(5,), drafted=(0,)))
    (state,) = boards
    codebook = tiny.shared_pipeline("star_refined").tokenizer.codebook
    assert len(seen.known) == 5
    for known, (numbers, settled) in zip(seen.known, state.history[:-1], strict=True):
        assert torch.equal(known, codebook[numbers] * settled[..., None])
    assert (seen.known[0] == 0).all() and (seen.known[-1] != 0).any()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_refiner_is_guided_in_full_at_every_stage(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """A ramp of strength 4 is 1 + 4 at the last stage; before it, the main model's logits are guided by less."""
    seen = WatchedRefiner(monkeypatch)
    output = drawn(refine=Refinement(first_stage=stage, rounds=(1,), drafted=(0,)), greedy=True)
    cond, uncond = seen.logits[0].chunk(2)
    assert torch.equal(output.codes[stage], (5 * cond - 4 * uncond).argmax(-1))
    weaker = 1 + 4 * 1 / 3
    assert not torch.equal(output.codes[stage], (weaker * cond + (1 - weaker) * uncond).argmax(-1))


def test_a_list_of_scales_guides_the_refiner_by_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = WatchedRefiner(monkeypatch)
    refine = Refinement(first_stage=2, rounds=(1,), drafted=(0,))
    output = drawn(refine=refine, greedy=True, guidance=[1.0, 1.0, 9.0, 3.0, 7.0])
    cond, uncond = seen.logits[0].chunk(2)
    assert torch.equal(output.codes[2], (3 * cond - 2 * uncond).argmax(-1))


@pytest.mark.parametrize("temperature", [1.0, 30.0])
def test_temperature_and_filters_act_on_the_refiner(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """In one round every code passes the filters of the refiner's logits; a higher temperature admits more codes."""
    seen = WatchedRefiner(monkeypatch)
    refine = Refinement(first_stage=3, rounds=(1,), drafted=(0,))
    (codes,) = drawn(refine=refine, top_p=0.5, temperature=temperature, guidance=0).codes[3:]

    def possible(at_temperature: float) -> Tensor:
        return filter_logits(seen.logits[0] / at_temperature, 30, 0.5).isfinite().gather(-1, codes[..., None])

    assert possible(temperature).all()
    assert possible(1.0).all() == (temperature == 1.0)


def test_the_refiner_reads_the_pooled_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = WatchedRefiner(monkeypatch)
    pipeline = tiny.fresh_pipeline("star_refined")
    codes = drawn().codes
    for factor in (1.0, 0.0):
        pipeline.model.refiner.text_proj.weight.mul_(factor)
        pipeline(tiny.prompts("star_refined", 2), seed=11, revise=lambda stage, _: codes[stage.index])
    before, after = seen.logits[7], seen.logits[14]  # the seven rounds of a request, after the rounds of `drawn`
    assert (before - after).abs().max() > 1e-2


@pytest.mark.parametrize("random", [0, 2])
def test_the_first_rounds_pick_their_cells_at_random(random: int) -> None:
    """So greedy codes depend on the seed, unless all rounds go by certainty."""
    first, second = (drawn(seed=seed, greedy=True, refine=replace(tiny.REFINEMENT, random=random)) for seed in (1, 2))
    assert tiny.same_codes(first.codes, second.codes) == (random == 0)
    assert tiny.same_codes(first.codes[:2], second.codes[:2])


def drawn_without_refiner(**settings: Any) -> Output:
    """Generates with a model without a refiner that has the same other weights."""
    whole, spec = tiny.shared_pipeline("star_refined"), tiny.SPECS["star"]
    model = build_model(spec.model)
    model.load_state_dict({name: value for name, value in whole.model.state_dict().items() if not name.startswith("refiner.")})
    return Pipeline(model, whole.tokenizer, whole.reader, spec.settings)(tiny.prompts("star", 2), seed=11, **settings)


def test_without_refinement_the_refiner_has_no_say() -> None:
    plain, refined = drawn_without_refiner(), drawn()
    tiny.assert_same_bits(drawn(refine=None), plain)
    assert tiny.same_codes(refined.codes[:2], plain.codes[:2])
    assert not torch.equal(refined.codes[2], plain.codes[2])


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "star_refined"])
def test_refinement_needs_a_refiner(family: str) -> None:
    with pytest.raises(SettingError, match="refine"):
        tiny.shared_pipeline(family)(tiny.prompts(family, 1), seed=5, refine=Refinement())


def test_smoothing_and_refinement_exclude_each_other() -> None:
    with pytest.raises(SettingError, match="smooth and refine"):
        drawn(smooth=True)
    assert tiny.close_codes("star_refined", drawn(smooth=True, refine=None).codes, drawn_without_refiner(smooth=True).codes)


def test_smoothing_mixes_all_codes_whatever_the_filters_say() -> None:
    tiny.assert_same_bits(drawn("star", smooth=True, top_k=1, top_p=0.1), drawn("star", smooth=True, top_k=0, top_p=0.0))
    assert not tiny.same_codes(drawn("star", top_k=1).codes, drawn("star").codes)


# --- whose text is read


def star_pipeline(as_released: bool) -> Pipeline:
    spec = tiny.SPECS["star"]
    assert isinstance(spec.model, StarConfig)
    return random_pipeline(replace(spec, model=replace(spec.model, as_released=as_released)))


def other_tokens(text: TextFeatures, image: int) -> TextFeatures:
    """Returns another, longer text for one image, with the same pooled vectors."""
    rows = list(text.rows)
    rows[image] = tiny.text_features("star", (10,), seed=7).rows[0]
    return replace(text, rows=tuple(rows))


def other_pooled(text: TextFeatures, image: int) -> TextFeatures:
    pooled = text.pooled.clone()
    pooled[image] *= -1
    return replace(text, pooled=pooled)


def test_as_released_all_rows_read_the_first_text() -> None:
    pipeline, text = star_pipeline(as_released=True), tiny.prompts("star", 3)
    released = pipeline(text, seed=5)
    for image in (1, 2):
        tiny.assert_same_bits(pipeline(other_tokens(text, image), seed=5), released)
        moved = pipeline(other_pooled(text, image), seed=5)
        for other in range(3):
            same = torch.equal(moved.codes[-1][other], released.codes[-1][other])
            assert same == (other != image)
    first_moved = pipeline(other_tokens(text, 0), seed=5)
    assert not any(torch.equal(first_moved.codes[-1][image], released.codes[-1][image]) for image in range(3))


def test_as_released_the_empty_text_counts_by_its_pooled_vector_alone() -> None:
    pipeline, text = star_pipeline(as_released=True), tiny.prompts("star", 2)
    empty = pipeline.reader.empty()
    released = pipeline(text, seed=5)
    tiny.assert_same_bits(pipeline(text, seed=5, negative=other_tokens(empty, 0)), released)
    assert not tiny.same_codes(pipeline(text, seed=5, negative=other_pooled(empty, 0)).codes, released.codes)


def test_as_released_the_first_image_is_the_one_drawn_alone() -> None:
    pipeline, text = star_pipeline(as_released=True), tiny.prompts("star", 3)
    together = pipeline(text, seed=5)
    tiny.assert_close("star", tiny.one_image(together, 0), pipeline(text.one(0), seed=5))
    assert not tiny.same_codes(tiny.one_image(together, 1).codes, pipeline(text.one(1), seed=6).codes)
    assert not tiny.same_codes(together.codes, drawn("star", images=3, seed=5).codes)


def test_as_released_rows_may_leave() -> None:
    pipeline, text, scales = star_pipeline(as_released=True), tiny.prompts("star", 2), one_from("star", 2)
    both, dropped = (pipeline(text, seed=5, guidance=scales, method=keeping(cfg_branches, 2)) for cfg_branches in ("both", "cond"))
    assert dropped.report.stages[-1].rows == 2
    tiny.assert_close("star", both, dropped)


@pytest.mark.parametrize("family", tiny.STAR_FAMILIES)
def test_by_default_every_row_reads_its_own_text(family: str) -> None:
    pipeline, text = tiny.shared_pipeline(family), tiny.prompts(family, 3)
    plain = pipeline(text, seed=5)
    for change in (other_tokens, other_pooled):
        moved = pipeline(change(text, 1), seed=5)
        assert not tiny.same_codes(tiny.one_image(moved, 1).codes, tiny.one_image(plain, 1).codes)
        for other in (0, 2):
            tiny.assert_close(family, tiny.one_image(moved, other), tiny.one_image(plain, other))


def test_what_pads_a_short_text_has_no_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = drawn("star", images=3)
    conditioned = Star.condition_from
    seen = []

    def with_noise_as_padding(model: Star, *arguments: Any) -> Any:
        cond = conditioned(model, *arguments)
        padding = ~cond.text.mask.view(*cond.text.mask.shape[::3], 1, 1)  # [R, T, 1, 1]
        assert padding.any()
        noisy = [(keys.masked_fill(padding, 50.0), values.masked_fill(padding, 50.0)) for keys, values in cond.text.keys_values]
        cond.text = replace(cond.text, keys_values=noisy)
        seen.append(cond)
        return cond

    monkeypatch.setattr(Star, "condition_from", with_noise_as_padding)
    tiny.assert_same_bits(drawn("star", images=3), plain)
    assert len(seen) == 1


def test_the_first_token_is_the_pooled_text() -> None:
    model, text, empty = tiny.shared_pipeline("star").model, tiny.prompts("star", 2), tiny.shared_pipeline("star").reader.empty()
    cond = model.condition(text, True, SCHEDULE, empty.repeat(2))
    pooled = torch.cat([text.pooled, empty.pooled, empty.pooled])
    assert torch.allclose(cond.start.squeeze(1), model.text_proj(pooled) + model.pos_start, atol=1e-5)
    assert cond.head is None and cond.prefix is None and not cond.modulation


# --- the empty prompt


def without_encoder() -> Pipeline:
    """Returns a pipeline whose text encoder cannot be found."""

    def nowhere() -> Encoder:
        raise TextEncoderUnavailable("nobody/encoder is not here.")

    whole = tiny.shared_pipeline("star")
    return Pipeline(whole.model, whole.tokenizer, TextReader(nowhere, reads_empty=True), whole.settings, whole.name)


def test_guidance_needs_the_empty_text_or_something_else_to_steer_away_from() -> None:
    pipeline, text = without_encoder(), tiny.prompts("star", 2)
    with pytest.raises(TextEncoderUnavailable, match=r"negative=.*nobody/encoder is not here"):
        pipeline(text, seed=11)
    tiny.assert_same_bits(pipeline(text, seed=11, negative=tiny.shared_pipeline("star").reader.empty()), drawn("star"))
    tiny.assert_same_bits(pipeline(text, seed=11, guidance=0), drawn("star", guidance=0))
    with pytest.raises(PromptError, match="negative prompts"):
        pipeline.model.condition(text, True, SCHEDULE)


def test_the_empty_text_is_encoded_when_a_guided_request_asks_for_it() -> None:
    empties = []

    class Counting:
        def __call__(self, prompts: Any) -> TextFeatures:
            raise AssertionError("no text was given")

        def empty(self) -> TextFeatures:
            empties.append(tiny.text_features("star", (2,), seed=3))
            return empties[-1]

    whole = tiny.shared_pipeline("star")
    pipeline = Pipeline(whole.model, whole.tokenizer, TextReader(Counting, reads_empty=True), whole.settings, whole.name)
    text = tiny.prompts("star", 3)
    pipeline(text, seed=5, guidance=0)
    pipeline(text, seed=5, negative=tiny.one_prompt("star", 1))
    assert not empties
    steered = pipeline(text, seed=5)
    assert len(empties) == 1
    tiny.assert_same_bits(steered, whole(text, seed=5, negative=empties[0]))


# --- invalid features


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.ones(4, tiny.TEXT_CHANNELS), "pooled must be .* 256 channels .* got none"),
        (TextFeatures((torch.ones(4, tiny.TEXT_CHANNELS),), pooled=torch.ones(1, 7)), "got 7 channels"),
        (TextFeatures((torch.ones(4, 7),), pooled=torch.ones(1, tiny.TEXT_CHANNELS)), "got 7"),
    ],
    ids=["no pooled vector", "another pooled vector", "other tokens"],
)
@pytest.mark.parametrize("family", tiny.STAR_FAMILIES)
def test_features_that_do_not_fit_are_refused(family: str, features: Any, message: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    with pytest.raises(PromptError, match=message):
        pipeline(features, seed=5)
    with pytest.raises(PromptError, match=message):
        pipeline(tiny.one_prompt(family, 0), seed=5, negative=features)


@pytest.mark.parametrize("family", ["star", "infinity"])
def test_padding_with_a_mask_is_not_read(family: str) -> None:
    pipeline, text = tiny.shared_pipeline(family), tiny.text_features(family, (5, 3))
    padded = [torch.cat([row, torch.full((6 - len(row), row.shape[1]), 7.0)]) for row in text.rows]
    mask = torch.arange(6) < torch.tensor([[5], [3]])
    tiny.assert_same_bits(pipeline(TextFeatures(tuple(padded), text.pooled, mask), seed=2), pipeline(text, seed=2))


def test_refine_is_a_refinement() -> None:
    with pytest.raises(SettingError, match="refine must be a Refinement"):
        tiny.shared_pipeline("star_refined")(tiny.prompts("star_refined", 1), seed=0, refine=True)


def test_without_unit_vectors_text_attention_is_as_soft_as_self_attention() -> None:
    block = Star(replace(tiny.SPECS["star"].model, cosine=False)).stack[0]
    assert block.text_attention.scale == block.attention.scale == 0.25 / 4
