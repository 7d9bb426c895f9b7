"""HART: the text before the image, the hybrid canvas, and the diffusion that completes the last stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.canvas import ResidualCanvas, to_map
from nextscale.errors import NonFiniteLogits, PromptError, SettingError, SizeError
from nextscale.guidance import RampGuidance, ResolvedGuidance, StageGuidance
from nextscale.loading.load import fill_random, random_pipeline
from nextscale.models import Hart, HartConfig
from nextscale.models.context import Conditioning
from nextscale.models.residual_head import ResidualHead, diffusion_steps, sinusoids
from nextscale.pipeline import Output, Pipeline
from nextscale.sampling import ImageRng
from nextscale.stage import Schedule, Stage, Tokens
from nextscale.text import TextFeatures
from nextscale.tokenizers import HartTokenizer, HartTokenizerConfig, VarTokenizer, VarTokenizerConfig
from tests.helpers import tiny
from tests.helpers.tiny import encode_hybrid
from tests.methods.test_method import first_token, keeping
from tests.test_canvas import nearest_by_search, with_codes

CPU = torch.device("cpu")
SCHEDULE = Schedule(tiny.HART_SIDES)
LAST = SCHEDULE[-1]
DEFAULT_SCALES = (1.0, 1 + 4.5 * (1 / 3), 1 + 4.5 * (2 / 3), 1 + 4.5 * (2 / 3))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(images: int = 2, seed: Any = 11, **settings: Any) -> Output:
    return tiny.shared_pipeline("hart")(tiny.prompts("hart", images), seed=seed, **settings)


def residual_of(prompt: TextFeatures | None = None, seed: Any = 11, pipeline: Pipeline | None = None, **settings: Any) -> Tensor:
    """Returns the residual that a request adds to its last stage, [B, cells, Z]."""
    residuals: list[Tensor | None] = []
    pipeline = pipeline or tiny.shared_pipeline("hart")
    pipeline(prompt or tiny.prompts("hart", 2), seed=seed, on_stage=lambda preview: residuals.append(preview.done.residual), **settings)
    assert residuals[:-1] == [None] * (len(residuals) - 1)
    return residuals[-1]


def hart_model() -> Hart:
    return tiny.shared_pipeline("hart").model


# --- diffusion steps


@pytest.mark.parametrize(
    ("count", "timesteps"),
    [
        (8, [0, 143, 285, 428, 571, 714, 856, 999]),
        (6, [0, 200, 400, 599, 799, 999]),
        (7, [0, 166, 333, 500, 666, 832, 999]),  # 166.5, 499.5 and 832.5 go to the even neighbor
        (3, [0, 500, 999]),
        (2, [0, 999]),
    ],
)
def test_steps_are_evenly_spaced_and_taken_from_the_last(count: int, timesteps: list[int]) -> None:
    steps = diffusion_steps(count)
    assert [step.timestep for step in steps] == timesteps[::-1]
    assert [step.first for step in steps] == [False] * (count - 1) + [True]


def trained_signal(timestep: int) -> float:
    """Returns alpha-bar of the trained process, as a product of 1 - beta."""
    signal = 1.0
    for i in range(timestep + 1):
        now, then = (math.cos((place + 0.008) / 1.008 * math.pi / 2) ** 2 for place in ((i + 1) / 1000, i / 1000))
        signal *= 1 - min(1 - now / then, 0.999)
    return signal


@pytest.mark.parametrize("count", [4, 8])
def test_constants_are_those_of_the_respaced_process(count: int) -> None:
    """Textbook formulas of the posterior q(previous | state, clean), from the signal (alpha-bar) of the retained steps in float64.

    As published, the process is rebuilt from its betas, which costs the smallest signal its ninth digit.
    """
    steps = diffusion_steps(count)[::-1]
    signals = [1.0, *(trained_signal(step.timestep) for step in steps)]
    variances = []
    for step, before, signal in zip(steps, signals, signals[1:], strict=False):
        alpha = signal / before
        variances.append((1 - alpha) * (1 - before) / (1 - signal))
        assert step.clean_from_state == pytest.approx(signal**-0.5, rel=1e-8)
        assert step.clean_from_noise == pytest.approx(((1 - signal) / signal) ** 0.5, rel=1e-8)
        assert step.mean_from_clean == pytest.approx(before**0.5 * (1 - alpha) / (1 - signal), rel=1e-8)
        assert step.mean_from_state == pytest.approx(alpha**0.5 * (1 - before) / (1 - signal), rel=1e-8, abs=1e-12)
        assert step.max_log_variance == pytest.approx(math.log(1 - alpha), abs=1e-8)
    variances[0] = variances[1]  # the first step's variance is zero and has no logarithm
    assert [step.min_log_variance for step in steps] == pytest.approx([math.log(variance) for variance in variances], abs=1e-8)


def test_almost_nothing_of_the_signal_is_left_at_the_end() -> None:
    """The first step therefore multiplies its input by 2e4."""
    step = diffusion_steps(8)[0]
    assert 1 / step.clean_from_state**2 == pytest.approx(2.4e-9, rel=0.02)
    assert step.clean_from_noise == pytest.approx(2.03e4, rel=0.01)


def test_the_last_step_takes_the_clean_estimate_alone() -> None:
    step = diffusion_steps(8)[-1]
    assert (step.mean_from_clean, step.mean_from_state) == (pytest.approx(1), 0)


def test_numbers_become_cosines_then_sines() -> None:
    table = sinusoids(torch.tensor([0, 3]))
    assert table.shape == (2, 256)
    assert table[0].tolist() == [1.0] * 128 + [0.0] * 128
    for i in (0, 1, 64, 127):
        angle = 3 * math.exp(-math.log(10000) * i / 128)
        assert table[1, i].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert table[1, 128 + i].item() == pytest.approx(math.sin(angle), abs=1e-6)


# --- drawing a residual

CHANNELS, CONDITION_WIDTH, STEPS = 3, 12, 5
STAGE = Stage(3, 2, 2, 14, True)


@pytest.fixture(scope="module")
def head() -> ResidualHead:
    head = ResidualHead(CHANNELS, CONDITION_WIDTH, dim=32, depth=2, steps=STEPS)
    fill_random(head, torch.Generator().manual_seed(0), torch.float32, ())
    with torch.no_grad():
        head.final.weight.mul_(0.3)  # noise that is too large leaves little but signs of the clean estimates
    return head


class WatchedNormal(ImageRng):
    """Records the normal random numbers."""

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__(seeds, CPU)
        self.normals: list[Tensor] = []

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        self.normals.append(super().normal(shape, device))
        return self.normals[-1]


def published_draw(head: ResidualHead, condition: Tensor, noise: list[Tensor], t: float) -> Tensor:
    """Computes the specified residual for a batch whose second half is unconditional."""
    batch = len(condition) // 2
    embedded = head.condition_embed(condition)
    state = noise[0]
    for i, step in enumerate(diffusion_steps(STEPS)):
        conditional, unconditional = (
            head(state, embedded[rows], torch.tensor([step.timestep])).double() for rows in (slice(0, batch), slice(batch, None))
        )
        predicted = (1 + t) * conditional[..., :CHANNELS] - t * unconditional[..., :CHANNELS]
        clean = (step.clean_from_state * state - step.clean_from_noise * predicted).clamp(-1, 1)
        mean = step.mean_from_clean * clean + step.mean_from_state * state
        share = (conditional[..., CHANNELS:] + 1) / 2
        spread = (0.5 * (share * step.max_log_variance + (1 - share) * step.min_log_variance)).exp()
        state = (mean if i == STEPS - 1 else mean + spread * noise[i + 1]).float()
    return 0.6 * state


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0, 2.0, 4.1538])
def test_a_residual_is_drawn_as_published(head: ResidualHead, t: float) -> None:
    """Equal up to rounding, which the first step multiplies by 2e4: the largest difference over 500 draws was 4.6e-5."""
    condition = torch.randn(4, STAGE.cells, CONDITION_WIDTH, generator=torch.Generator().manual_seed(1))
    draws = WatchedNormal([5, 6])
    residual = head.sample(condition, Tokens(STAGE), 1 + t, draws, batch=2)
    assert len(draws.normals) == STEPS  # the start, and every step but the last
    assert torch.allclose(residual, published_draw(head, condition, draws.normals, t), rtol=0, atol=1e-3)
    assert residual.abs().mean() > 0.05
    assert residual.abs().max() <= 0.6


@pytest.fixture()
def seen_states(head: ResidualHead) -> Iterator[list[Tensor]]:
    states: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0].clone()))
    yield states
    handle.remove()


@pytest.mark.parametrize(("scale", "rows"), [(1.0, 2), (2.0, 4), (5.1538, 4)])
def test_both_halves_share_their_state_and_without_guidance_one_runs(
    head: ResidualHead, seen_states: list[Tensor], scale: float, rows: int
) -> None:
    condition = torch.randn(4, STAGE.cells, CONDITION_WIDTH, generator=torch.Generator().manual_seed(1))
    head.sample(condition, Tokens(STAGE), scale, ImageRng([5, 6], CPU), batch=2)
    assert [len(state) for state in seen_states] == [rows] * STEPS
    for state in seen_states:
        assert torch.equal(state[:2], state[-2:])
    assert not torch.equal(seen_states[0][0], seen_states[0][1])


def test_without_guidance_the_unconditional_half_cannot_matter(head: ResidualHead) -> None:
    condition = torch.randn(4, STAGE.cells, CONDITION_WIDTH, generator=torch.Generator().manual_seed(1))
    changed = torch.cat([condition[:2], -condition[2:]])
    for scale, same in ((1.0, True), (2.0, False), (2.5, False)):
        first, second = (head.sample(each, Tokens(STAGE), scale, ImageRng([5, 6], CPU), batch=2) for each in (condition, changed))
        assert torch.equal(first, second) == same


def test_a_cell_draws_the_same_noise_whichever_others_are_run(head: ResidualHead) -> None:
    condition = torch.randn(2, STAGE.cells, CONDITION_WIDTH, generator=torch.Generator().manual_seed(1))
    everywhere = head.sample(condition, Tokens(STAGE), 1.0, ImageRng([5, 6], CPU), batch=2)
    some = Tokens(STAGE, torch.tensor([[3, 1], [0, 0]]), torch.tensor([2, 1]))
    part = head.sample(some.gather(condition), some, 1.0, ImageRng([5, 6], CPU), batch=2)
    assert torch.allclose(part, some.gather(everywhere), atol=1e-3)


# --- the residual of a request


def test_the_residual_follows_the_seed_of_its_image() -> None:
    """Greedy, so that codes are the same and only the noise of the diffusion differs."""
    prompt = tiny.one_prompt("hart", 0)
    one = residual_of(prompt, seed=[11], greedy=True)
    several = residual_of(prompt, seed=[11, 12, 11], greedy=True)
    assert torch.equal(residual_of(prompt, seed=[11], greedy=True), one)
    for image in (0, 2):
        assert torch.allclose(several[image], one[0], atol=tiny.ROUNDING["hart"].latents)
    assert (several[0] - several[1]).abs().mean() > 0.1
    assert several.std() > 0.2


def test_the_residual_is_added_once_and_not_blended() -> None:
    previews = []
    output = drawn(on_stage=previews.append)
    canvas = tiny.shared_pipeline("hart").tokenizer.canvas(SCHEDULE, 2)
    for stage, codes in zip(SCHEDULE, output.codes, strict=True):
        canvas.add(codes, Tokens(stage))
    residual = previews[-1].done.residual
    assert residual.shape == (2, LAST.cells, tiny.LATENT_CHANNELS)
    assert torch.equal(output.latent, canvas.latent + to_map(residual, LAST))
    assert torch.equal(previews[-1].latent, output.latent)


def test_tokens_whose_logits_alone_are_restored_get_no_residual() -> None:
    previews = []
    output = drawn(method=first_token(propagate=True, from_stage=LAST.index), greedy=True, on_stage=previews.append)
    residual = previews[-1].done.residual
    assert residual.shape == (2, 1, tiny.LATENT_CHANNELS)
    canvas = tiny.shared_pipeline("hart").tokenizer.canvas(SCHEDULE, 2)
    for stage, codes in zip(SCHEDULE, output.codes, strict=True):
        canvas.add(codes, Tokens(stage))
    added = output.latent - canvas.latent
    assert torch.allclose(added[:, :, 0, 0], residual[:, 0], atol=1e-6)
    assert (added.flatten(2)[..., 1:] == 0).all()


def test_at_a_scale_of_two_only_the_logits_are_guided() -> None:
    """The reference implementation takes t = 1 for "no guidance" in the diffusion: equal codes then give the residual of scale 1."""
    codes = drawn(greedy=True).codes
    forced = {"revise": lambda stage, _: codes[stage.index], "greedy": True}
    unguided, two, above = (residual_of(guidance=[1.0, 1.0, 2.5, scale], **forced) for scale in (1.0, 2.0, 2.25))
    assert torch.allclose(two, unguided, atol=tiny.ROUNDING["hart"].latents)
    assert (above - unguided).abs().mean() > 0.02
    free_codes = [drawn(guidance=[1.0, 1.0, 2.5, scale], greedy=True).codes for scale in (1.0, 2.0)]
    assert torch.equal(free_codes[0][2], free_codes[1][2])
    assert not torch.equal(free_codes[0][3], free_codes[1][3])


def test_where_the_output_is_not_guided_the_residual_is_not_either() -> None:
    plain, nowhere = (drawn(guidance=StageGuidance(logits=False, values=(scale,) * 4), greedy=True) for scale in (1.0, 3.0))
    tiny.assert_close("hart", nowhere, plain)


def test_the_variance_is_that_of_the_conditional_rows() -> None:
    """With scale 0 at the last stage, the codes are those of the unconditional rows, but not the residual."""
    pipeline, prompt = tiny.shared_pipeline("hart"), tiny.prompts("hart", 2)
    mixed = pipeline(prompt, seed=11, guidance=[2.0, 0.0, 0.0, 0.0], greedy=True)
    alone = pipeline(prompt, seed=11, guidance=[2.0] * 4, method=keeping("uncond", 1), greedy=True)
    assert tiny.same_codes(mixed.codes, alone.codes)
    assert (mixed.latent - alone.latent).abs().max() > 0.1


class WatchedIds:
    """Records the codes that condition the residual."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[Tensor] = []
        residual = Hart.residual

        def watched(model: Hart, hidden: Any, ids: Tensor) -> Tensor:
            self.ids.append(ids)
            return residual(model, hidden, ids)

        monkeypatch.setattr(Hart, "residual", watched)


def test_the_residual_completes_the_codes_that_were_revised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = WatchedIds(monkeypatch)
    other = torch.arange(2 * LAST.cells).view(2, LAST.cells) % tiny.CODES
    for settings in ({"smooth": False}, {"greedy": True}, {"smooth": True}):
        free = residual_of(**settings)
        revised = residual_of(revise=lambda stage, codes: other if stage.last else codes, **settings)
        assert not torch.equal(seen.ids[-2], other)
        assert torch.equal(seen.ids[-1], other)
        assert (free - revised).abs().mean() > 0.01


def test_mixtures_are_completed_by_the_codes_drawn_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, ids = WatchedIds(monkeypatch), []
    drawn(on_stage=lambda preview: ids.append(preview.done.ids))
    drawn(revise=lambda stage, codes: codes.roll(1, dims=-1), on_stage=lambda preview: ids.append(preview.done.ids))
    assert torch.equal(seen.ids[0], ids[len(SCHEDULE) - 1])
    assert torch.equal(seen.ids[1], ids[-1])


# --- stages


def test_the_last_stage_repeats_guidance_of_the_one_before() -> None:
    tiny.assert_same_bits(drawn(), drawn(guidance=list(DEFAULT_SCALES)))
    assert not tiny.close_codes("hart", drawn().codes[-1:], drawn(guidance=[*DEFAULT_SCALES[:-1], 1 + 4.5]).codes[-1:])


def test_mixtures_hold_the_most_likely_codes_of_their_stage_only() -> None:
    stages = []
    drawn(guidance=0.0, temperature=20.0, on_stage=lambda preview: stages.append(preview.done))
    for done, top_k in zip(stages, tiny.HART_TOP_K, strict=True):
        likely = done.logits >= done.logits.topk(top_k).values[..., -1:]
        assert ((done.codes > 0) <= likely).all()
        assert (done.codes > 0).sum(-1).max() == top_k


def test_more_stages_than_published_need_their_own_top_k() -> None:
    """Levels are a function of the stage's number, so the model itself has no limit."""
    longer = Schedule((1, 2, 2, 3, 3, 4))
    with pytest.raises(SettingError, match=r"top_k must be .* stage \(6\); got 4 values"):
        drawn(size=longer)
    assert len(drawn(size=longer, top_k=30).codes) == 6


@pytest.mark.parametrize("changes", [{"level_table": True}, {"text_norm": False}, {"cosine": True}], ids=str)
def test_variants_that_a_checkpoint_may_have(changes: dict[str, bool]) -> None:
    spec = tiny.SPECS["hart"]
    assert isinstance(spec.model, HartConfig)
    pipeline = random_pipeline(replace(spec, model=replace(spec.model, **changes)))
    prompt = tiny.prompts("hart", 2)
    together = pipeline(prompt, seed=5, greedy=True)
    tiny.assert_close("hart", tiny.one_image(together, 1), pipeline(prompt.one(1), seed=6, greedy=True))
    if "level_table" in changes:
        with pytest.raises(SizeError, match="schedule must have"):
            pipeline(prompt, size=Schedule((1,) * 5), top_k=30, seed=5)


# --- text


def condition(prompts: TextFeatures, guided: bool = True, negative: TextFeatures | None = None) -> Conditioning:
    return hart_model().condition(prompts, guided, SCHEDULE, negative)


def with_mask(text: TextFeatures, *real: Sequence[int]) -> TextFeatures:
    return replace(text, mask=torch.tensor([[token in row for token in range(tiny.HART_TEXT)] for row in real]))


def test_the_text_stands_before_the_first_token_and_shares_its_level() -> None:
    model, env_text = hart_model(), tiny.text_features("hart", (5, 9))
    cond = condition(env_text, guided=False)
    text = model.text_embed(F.rms_norm(torch.stack(env_text.rows), (tiny.TEXT_CHANNELS,), model.text_norm.weight, 1e-6))
    assert torch.allclose(torch.cat([cond.prefix, cond.start], dim=1), text, atol=1e-5)
    assert cond.prefix.shape[1] == model.text_prefix == tiny.HART_TEXT - 1

    class OnlyCond:
        def __init__(self) -> None:
            self.cond = cond

    stage = Tokens(SCHEDULE[0])
    x, tokens = model.with_text(model.embed(None, stage.stage, OnlyCond()), stage, OnlyCond())
    assert tokens.num_tokens == x.shape[1] == tiny.HART_TEXT
    assert torch.allclose(x, text + model.positions(SCHEDULE[0]), atol=1e-5)
    later = Tokens(SCHEDULE[1])
    grid = torch.zeros(2, 4, tiny.WIDTH)
    assert model.with_text(grid, later, OnlyCond()) == (grid, later)


def test_the_head_is_modulated_by_the_largest_of_every_channel_over_all_positions() -> None:
    model, text = hart_model(), tiny.text_features("hart", (5, 9))
    cond = condition(text, guided=False)
    largest = torch.cat([cond.prefix, cond.start], dim=1).amax(dim=1)
    scale, shift = model.head_ada(F.silu(largest)).chunk(2, dim=-1)
    assert torch.allclose(cond.head.scale.squeeze(1), 1 + scale, atol=1e-5)
    assert torch.allclose(cond.head.shift.squeeze(1), shift, atol=1e-5)


def test_nothing_to_steer_away_from_is_zeros_at_position_zero() -> None:
    """Zeros stay zeros under the norm, so every token is the bias of the embedding; no position turns anything."""
    model, cond = hart_model(), condition(tiny.text_features("hart", (5, 9)))
    assert torch.equal(cond.start[2:], model.text_embed.bias.expand(2, 1, -1))
    assert torch.equal(cond.prefix[2:], model.text_embed.bias.expand(2, tiny.HART_TEXT - 1, -1))
    cosines, sines = cond.rope.tables[0]
    assert (cosines[2:] == 1).all() and (sines[2:] == 0).all()
    cosines, sines = cond.rope.tables[-1]
    assert (cosines[2:, 0] == 1).all() and (sines[2:, 0] == 0).all()
    assert not (cosines[:2, 0] == 1).all()


def test_padding_is_read_like_text() -> None:
    """Only the features of one padding token differ, in the middle of the padding."""
    plain = tiny.text_features("hart", (5,))
    changed = replace(plain, rows=(plain.rows[0].clone(),))
    changed.rows[0][8] *= -1
    pipeline, seen = tiny.shared_pipeline("hart"), []
    for text in (plain, changed):
        pipeline(text, seed=5, on_stage=lambda preview: seen.append(preview.done.logits) if preview.done.stage.index < 2 else None)
    first, second, other_first, other_second = seen
    assert (first - other_first).abs().max() > 1e-2
    assert (second - other_second).abs().max() > 1e-2


def test_the_mask_moves_positions_and_does_nothing_else() -> None:
    text = tiny.text_features("hart", (5,))
    cond, moved = condition(text), condition(with_mask(text, range(9)))
    assert torch.equal(cond.start, moved.start)
    assert torch.equal(cond.prefix, moved.prefix)
    assert torch.equal(cond.head.scale, moved.head.scale)
    for ours, theirs in zip(cond.rope.tables, moved.rope.tables, strict=True):
        assert not torch.equal(ours[1][0], theirs[1][0])
        assert torch.equal(ours[1][1], theirs[1][1])  # of the unconditional row


@pytest.mark.parametrize(
    ("real", "positions"),
    [
        (range(4), [0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3]),
        (range(8, 12), [-1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3]),
        (range(12), list(range(12))),
        ([0], [0] * 12),
    ],
    ids=["right padding", "left padding", "no padding", "one token"],
)
def test_a_position_counts_the_real_tokens_so_far(real: Sequence[int], positions: list[int]) -> None:
    cond = condition(with_mask(tiny.text_features("hart", (5,)), real), guided=False)
    fastest = cond.rope.tables[0][1][0, :, 0, 0, 0]  # the first channel turns by one radian per position
    assert torch.allclose(fastest, torch.tensor(positions).float().sin(), atol=1e-5)
    on_grid = cond.rope.tables[-1][1][0, 0, 0, 0, 0]
    assert on_grid.item() == pytest.approx(math.sin(positions[-1]), abs=1e-5)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.ones(tiny.HART_TEXT - 1, tiny.TEXT_CHANNELS), "must have 12 tokens.*got 11"),
        (torch.ones(tiny.HART_TEXT + 1, tiny.TEXT_CHANNELS), "must have 12 tokens.*got 13"),
        ([torch.ones(12, tiny.TEXT_CHANNELS), torch.ones(7, tiny.TEXT_CHANNELS)], "must have 12 tokens.*got 7 and 12"),
        (torch.ones(tiny.HART_TEXT, 7), "got 7"),
    ],
)
def test_features_that_do_not_fit_are_refused(features: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        tiny.shared_pipeline("hart")(features, seed=5)
    with pytest.raises(PromptError, match=message):
        drawn(images=len(TextFeatures.of(features)), negative=features)


# --- the hybrid tokenizer


def hart_toy(codebook: list[list[float]], weights: tuple[float, ...], bias: float = 0.0) -> HartTokenizer:
    tokenizer = HartTokenizer(HartTokenizerConfig(len(codebook), len(codebook[0]), channels=32, multipliers=(1,), blocks_per_level=1))
    return with_codes(tokenizer, codebook, weights, bias)


def test_the_last_stage_is_added_without_its_blend() -> None:
    """Blend 0 multiplies by 3 and adds 1: stage 0 adds (v + 3 v + 1) / 2. The last one's would be felt by far."""
    schedule = Schedule((1, 2))
    canvas = hart_toy([[0.0], [2.0], [10.0]], weights=(3, 5, 7, 100), bias=1.0).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[1]]), Tokens(schedule[0]))
    assert canvas.latent.flatten().tolist() == [4.5] * 4
    assert canvas.input(schedule[1]).flatten().tolist() == [4.5] * 4
    canvas.add(torch.tensor([[0, 2, 0, 1]]), Tokens(schedule[1]))
    assert canvas.latent.flatten().tolist() == [4.5, 14.5, 4.5, 6.5]


def test_a_residual_is_added_as_it_is_where_its_tokens_are() -> None:
    schedule = Schedule((1, 2))
    canvas = hart_toy([[0.0]], weights=(9, 9, 9, 9)).canvas(schedule, batch=2)
    canvas.add_residual(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), Tokens(schedule[1], torch.tensor([[3, 0], [1, 2]])))
    assert canvas.latent.flatten(1).tolist() == [[2.0, 0.0, 0.0, 1.0], [0.0, 3.0, 4.0, 0.0]]
    canvas.add_residual(torch.ones(2, 4, 1), Tokens(schedule[1]))
    assert canvas.latent.flatten(1).tolist() == [[3.0, 1.0, 1.0, 2.0], [1.0, 4.0, 5.0, 1.0]]


def some_images(tokenizer: HartTokenizer) -> Tensor:
    side = tokenizer.pixels_per_token * tiny.HART_SIDES[-1]
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(3)) * 2 - 1


def test_codes_and_residual_complete_one_another_to_the_features() -> None:
    tokenizer = tiny.shared_pipeline("hart").tokenizer
    images = some_images(tokenizer)
    codes, residual = encode_hybrid(tokenizer, images, SCHEDULE)
    canvas = tokenizer.canvas(SCHEDULE, 2)
    for stage, numbers in zip(SCHEDULE, codes, strict=True):
        canvas.add(numbers, Tokens(stage))
    features = tokenizer.features(images)
    assert (canvas.latent - features).abs().max() > 0.1
    canvas.add_residual(residual, Tokens(LAST))
    assert torch.allclose(canvas.latent, features, atol=1e-5)
    assert torch.allclose(tokenizer.decode(canvas.latent), tokenizer.decode(features), atol=1e-4)


def test_the_codes_are_those_of_the_discrete_tokenizer() -> None:
    """Chosen here on a canvas where the last stage is blended as well, which comes too late to change them."""
    tokenizer = tiny.shared_pipeline("hart").tokenizer
    images = some_images(tokenizer)
    canvas, features = ResidualCanvas(tokenizer, SCHEDULE, 2), tokenizer.features(images)
    hybrid, _ = encode_hybrid(tokenizer, images, SCHEDULE)
    for stage, codes, same in zip(SCHEDULE, tokenizer.encode(images, SCHEDULE), hybrid, strict=True):
        assert torch.equal(codes, nearest_by_search(tokenizer, F.adaptive_avg_pool2d(features - canvas.latent, stage.size)))
        assert torch.equal(codes, same)
        canvas.add(codes, Tokens(stage))
    assert len({code for codes in hybrid for code in codes.flatten().tolist()}) > 5


def test_codes_alone_are_decoded_as_var_decodes_them() -> None:
    tokenizer = tiny.shared_pipeline("hart").tokenizer
    var = VarTokenizer(VarTokenizerConfig(**asdict(tokenizer.config)))
    var.load_state_dict(tokenizer.state_dict())
    codes = tokenizer.encode(some_images(tokenizer), SCHEDULE)
    discrete, hybrid, theirs = ResidualCanvas(tokenizer, SCHEDULE, 2), tokenizer.canvas(SCHEDULE, 2), var.canvas(SCHEDULE, 2)
    for stage, numbers in zip(SCHEDULE, codes, strict=True):
        for canvas in (discrete, hybrid, theirs):
            canvas.add(numbers, Tokens(stage))
        assert torch.equal(discrete.latent, theirs.latent)
        assert torch.equal(discrete.latent, hybrid.latent) == (not stage.last)
    assert torch.equal(tokenizer.decode(discrete.latent), var.decode(theirs.latent))


def test_overflow_in_the_diffusion_head_is_noticed_although_its_estimates_are_clamped() -> None:
    pipeline = tiny.fresh_pipeline("hart")
    pipeline.model.residual_head.final.bias.data[0] = float("inf")
    with pytest.raises(NonFiniteLogits):
        pipeline(tiny.prompts("hart", 1), seed=5, guidance=0)


@pytest.mark.parametrize("steps", [0, 1, 1001])
def test_numbers_of_steps_that_make_no_process_are_refused(steps: int) -> None:
    with pytest.raises(SettingError, match="residual_steps"):
        Hart(replace(tiny.SPECS["hart"].model, residual_steps=steps))


@pytest.mark.parametrize(
    ("strength", "stages", "guided"),
    [(1.5, 4, False), (12 / 11, 13, True), (4.5, 14, True)],
    ids=["exactly 1 at the last stage", "one rounding below 1", "published"],
)
def test_only_a_guidance_of_exactly_one_leaves_the_residual_unguided(strength: float, stages: int, guided: bool) -> None:
    """12 / 11 * (11 / 12) is 0.9999999999999999, whose sum with 1 rounds to 2."""
    schedule = Schedule(range(1, stages + 1))
    rows = ResolvedGuidance(RampGuidance(strength=strength, last_repeats=True), schedule, depth=tiny.DEPTH)
    scale = tiny.shared_pipeline("hart").model.residual_scale(rows, schedule[-1])
    assert scale == (rows.scales[-1] if guided else 1.0)
    assert rows.scales[-1] == (pytest.approx(1 + strength * (stages - 2) / (stages - 1)))
