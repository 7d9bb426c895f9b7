"""How strongly each stage follows the condition: the published formulas, stage by stage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextscale.errors import SettingError
from nextscale.guidance import ConstantGuidance, Guidance, RampGuidance, ResolvedGuidance, StageGuidance, mix, resolve_guidance
from nextscale.loading.presets import FLEXVAR_SETTINGS, MODELS
from nextscale.schedules import FLEXVAR_512, FLEXVAR_STEPS, HART_1024, VAR_256, VAR_512
from nextscale.stage import Schedule
from tests.helpers import tiny
from tests.helpers.tiny import infinity_schedule

THREE = Schedule((1, 2, 3))
DEPTH = 4


def rows(guidance: Guidance, schedule: Schedule = THREE) -> ResolvedGuidance:
    return ResolvedGuidance(guidance, schedule, DEPTH)


# --- scales


@pytest.mark.parametrize("sides", [VAR_256, VAR_512, (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("strength", [0.0, 1.5, 4.0])
def test_var_ramps_from_nothing_to_full_strength(sides: tuple[int, ...], strength: float) -> None:
    scales = RampGuidance(strength=strength).scales(Schedule(sides))
    last = len(sides) - 1
    assert scales == tuple(1 + strength * (i / last) for i in range(len(sides)))
    assert (scales[0], scales[-1]) == (1, 1 + strength)


def flexvar_t(side: int, i: int, stages: int, g: float, widest: int) -> float:
    """The published rule: r = i / min(S - 1, 9); t = g * r up to side M, g above."""
    return g * i / min(stages - 1, 9) if side <= widest else g


@pytest.mark.parametrize("sides", [*FLEXVAR_STEPS.values(), FLEXVAR_512], ids=lambda sides: f"{len(sides)}steps")
@pytest.mark.parametrize("g", [2.5, 3.0])
def test_flexvar_divides_by_at_most_nine(sides: tuple[int, ...], g: float) -> None:
    scales = FLEXVAR_SETTINGS.guidance.with_strength(g).scales(Schedule(sides))
    assert scales == pytest.approx([1 + flexvar_t(side, i, len(sides), g, 16) for i, side in enumerate(sides)])


def test_flexvar_with_thirteen_stages_exceeds_its_strength() -> None:
    scales = FLEXVAR_SETTINGS.guidance.scales(Schedule(FLEXVAR_STEPS[13]))
    assert scales[9] == 1 + 2.5
    assert scales[12] == pytest.approx(1 + 2.5 * 12 / 9)


def test_flexvar_at_512_falls_back_to_its_strength_above_sixteen() -> None:
    scales = FLEXVAR_SETTINGS.guidance.with_strength(3.0).scales(Schedule(FLEXVAR_512))
    assert scales[12:] == pytest.approx((1 + 3 * 12 / 9, 4.0, 4.0))


def test_the_longer_side_decides_about_full_strength() -> None:
    guidance = RampGuidance(strength=1.0, full_above=3)
    assert guidance.scales(Schedule((1, (2, 4), (4, 2), (3, 3), (2, 2)))) == (1, 2, 2, 1.75, 2)


def test_six_stages_of_flexvar_ramp_over_five() -> None:
    assert RampGuidance(strength=5.0, longest_span=9).scales(Schedule(FLEXVAR_STEPS[6])) == (1, 2, 3, 4, 5, 6)


def test_constant_guidance_is_the_same_at_every_stage() -> None:
    """LlamaGen's form, in FlexVAR's demo: uncond + g * (cond - uncond); g = 4 is t = 3."""
    schedule = Schedule(VAR_256)
    assert ConstantGuidance(strength=4.0).scales(schedule) == (4.0,) * 10
    out = torch.tensor([[5.0], [2.0]])
    for stage in schedule:
        assert ResolvedGuidance(ConstantGuidance(strength=4.0), schedule, 1).on_logits(out, stage, 1).item() == 2 + 4 * (5 - 2)


@pytest.mark.parametrize(("name", "strength"), [("infinity-2b", 4.0), ("infinity-8b", 3.0), ("infinity-8b-512", 3.0)])
def test_infinity_is_constant_over_all_thirteen_stages(name: str, strength: float) -> None:
    assert MODELS[name].settings.guidance.scales(infinity_schedule(1.0, "1M")) == (strength,) * 13


def test_hart_guides_its_last_stage_like_the_one_before() -> None:
    """t = 4.5 * 12 / 13 = 4.1538 at both of them."""
    scales = MODELS["hart-0.7b"].settings.guidance.scales(Schedule(HART_1024))
    assert scales == (*(1 + 4.5 * (i / 13) for i in range(13)), 1 + 4.5 * (12 / 13))
    assert scales[-1] - 1 == pytest.approx(4.1538, abs=1e-4)
    assert MODELS["hart-0.7b"].settings.guidance.with_strength(13.0).scales(Schedule(HART_1024))[-3:] == (12, 13, 13)


@pytest.mark.parametrize(("name", "stages"), [("star-256", 10), ("star-512", 10), ("star-1024", 14), ("star-1024-sampler", 14)])
def test_star_ramps_like_var(name: str, stages: int) -> None:
    settings = MODELS[name].settings
    scales = settings.guidance.scales(settings.schedules.choose(None, None))
    assert scales == tuple(1 + 4.0 * (i / (stages - 1)) for i in range(stages))


@pytest.mark.parametrize("last_repeats", [False, True])
def test_a_single_stage_is_not_divided_by_zero(last_repeats: bool) -> None:
    assert RampGuidance(strength=4.0, last_repeats=last_repeats).scales(Schedule((1,))) == (1.0,)


# --- mixing


@settings(deadline=None)
@given(st.floats(0, 10), st.integers(0, 9))
def test_var_mixes_as_published(g: float, i: int) -> None:
    schedule = Schedule(VAR_256)
    cond, uncond = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 3.0]])
    t = g * i / 9
    guided = ResolvedGuidance(RampGuidance(strength=g), schedule, 1).on_logits(torch.cat([cond, uncond]), schedule[i], 1)
    assert torch.allclose(guided, (1 + t) * cond - t * uncond, atol=1e-5)


def test_infinity_mixes_as_published_and_takes_the_condition_alone_at_one() -> None:
    guided = rows(StageGuidance(values=(3.0, 1.0, 0.5)))
    out = torch.tensor([[2.0], [4.0], [10.0], [20.0]])  # two images: conditional, then unconditional
    assert guided.on_logits(out, THREE[0], 2).tolist() == [[3 * 2 - 2 * 10], [3 * 4 - 2 * 20]]
    assert guided.on_logits(out, THREE[1], 2).tolist() == [[2.0], [4.0]]
    assert guided.on_logits(out, THREE[2], 2).tolist() == [[6.0], [12.0]]


def test_at_scale_one_the_other_cfg_branch_cannot_even_poison() -> None:
    out = torch.tensor([[2.0], [float("nan")]])
    assert rows(StageGuidance(values=(2.0, 1.0, 2.0))).on_logits(out, THREE[1], 1).tolist() == [[2.0]]


def test_rows_of_one_cfg_branch_pass_as_they_are() -> None:
    out = torch.tensor([[2.0], [4.0]])
    assert rows(ConstantGuidance(strength=3.0)).on_logits(out, THREE[0], batch=2).tolist() == [[2.0], [4.0]]


@pytest.mark.parametrize(
    ("guidance", "both"),
    [
        (ConstantGuidance(), False),
        (ConstantGuidance(strength=1.5), True),
        (ConstantGuidance(strength=0.0), True),
        (RampGuidance(), False),
        (RampGuidance(strength=0.1), True),
        (StageGuidance(values=(1.0, 1.0, 1.0)), False),
        (StageGuidance(values=(1.0, 1.0, 2.0)), True),
        (StageGuidance(values=(1.0, 1.0, 1.0, 1.0)), False),
        (StageGuidance(values=(1.0, 1.0, 1.0, 2.0)), True),  # as published, the tail past the last stage decides as well
    ],
)
def test_the_second_cfg_branch_runs_if_any_scale_differs_from_one(guidance: Guidance, both: bool) -> None:
    assert rows(guidance).needs_both == both


def test_a_longer_list_guides_by_stage_number() -> None:
    guided = rows(StageGuidance(values=(1.0, 2.0, 3.0, 4.0)))
    assert [guided.on_logits(torch.tensor([[1.0], [0.0]]), stage, 1).item() for stage in THREE] == [1, 2, 3]


@pytest.mark.parametrize("values", [(), (2.0,), (1.0, 2.0)])
def test_a_list_shorter_than_the_schedule_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(SettingError, match=rf"one per stage \(3\); got {len(values)}"):
        rows(StageGuidance(values=values))


@pytest.mark.parametrize("guidance", [RampGuidance(strength=3.0), StageGuidance(values=(1.0, 2.0, 4.0, 9.0))])
def test_full_strength_is_that_of_the_last_stage_whatever_the_stage(guidance: Guidance) -> None:
    """Not of the tail past it. STAR's refiner is guided so."""
    guided = rows(guidance)
    both = torch.tensor([[[2.0]], [[5.0]]])
    assert (
        {guided.guide_as_last(both, stage, 1).item() for stage in THREE} == {4 * 2 - 3 * 5} == {guided.on_logits(both, THREE[-1], 1).item()}
    )
    assert guided.guide_as_last(both, THREE[0], 2).tolist() == both.tolist()
    assert rows(StageGuidance(logits=False, values=(1.0, 1.0, 4.0))).guide_as_last(both, THREE[0], 1).tolist() == [[[2.0]]]


def test_mixing_takes_any_shape_and_leaves_one_cfg_branch_as_it_is() -> None:
    both = torch.rand(4, 3, 2, 2)
    assert torch.equal(mix(both, 3.0, 2), 3 * both[:2] - 2 * both[2:])
    assert torch.equal(mix(both, 0.0, 2), both[2:])
    assert torch.equal(mix(both, 1.0, 2), both[:2])
    assert torch.equal(mix(both[:2], 3.0, 2), both[:2])


# --- guidance inside the network


def test_hidden_states_of_both_halves_become_the_mixture() -> None:
    guided = rows(StageGuidance(logits=False, layers=(-1,), values=(3.0, 1.0, 2.0)))
    x = torch.tensor([[[1.0]], [[2.0]], [[5.0]], [[7.0]]])
    assert guided.layers == {DEPTH - 1}
    assert guided.on_hidden(x, THREE[0], 2).flatten().tolist() == [-7.0, -8.0, -7.0, -8.0]
    assert guided.on_hidden(x, THREE[1], 2) is x
    assert guided.on_hidden(x[:2], THREE[0], 2).flatten().tolist() == [1.0, 2.0]
    assert guided.on_logits(x, THREE[0], 2).flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("layers", "blocks"), [((0,), {0}), ((3,), {3}), ((-1,), {3}), ((-3,), {1}), ((1, -3), {1}), ((-1, 0), {0, 3})])
def test_negative_layers_count_from_the_end(layers: tuple[int, ...], blocks: set[int]) -> None:
    assert rows(ConstantGuidance(layers=layers)).layers == blocks


@pytest.mark.parametrize("layer", [4, 5, -4, -5])
def test_blocks_that_do_not_exist_are_refused(layer: int) -> None:
    """-depth as well, as published: what it would guide is the input."""
    with pytest.raises(SettingError, match=f"blocks of this model, 0 to 3.* got {layer}"):
        rows(ConstantGuidance(layers=(layer,)))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layer_guidance_works_inside_a_request(family: str) -> None:
    """Guiding after the last block and guiding the logits differ only by the head's norm; both differ from no guidance."""
    pipeline = tiny.shared_pipeline(family)
    stages = len(tiny.schedule_of(family))

    def first_logits(guidance: Guidance) -> torch.Tensor:
        seen = []
        pipeline(tiny.prompts(family, 2), seed=1, guidance=guidance, greedy=True, on_stage=lambda preview: seen.append(preview.done.logits))
        return seen[0]

    plain = first_logits(StageGuidance(values=(1.0,) * stages))
    at_logits = first_logits(StageGuidance(values=(3.0,) * stages))
    inside = first_logits(StageGuidance(logits=False, layers=(-1,), values=(3.0,) * stages))
    nowhere = first_logits(StageGuidance(logits=False, values=(3.0,) * stages))
    assert (inside - plain).abs().max() > 0.1
    assert (inside - at_logits).abs().max() > 1e-3
    assert torch.allclose(nowhere, plain, atol=1e-4)


# --- what a caller may pass


def test_numbers_keep_the_published_form() -> None:
    default = RampGuidance(strength=4.0, longest_span=9, full_above=16, layers=(2,))
    assert resolve_guidance(None, default) is default
    assert resolve_guidance(1.5, default) == RampGuidance(strength=1.5, longest_span=9, full_above=16, layers=(2,))
    assert resolve_guidance(2, ConstantGuidance(strength=4.0)) == ConstantGuidance(strength=2.0)
    assert resolve_guidance(2, RampGuidance(strength=4.5, last_repeats=True)) == RampGuidance(strength=2.0, last_repeats=True)
    own = ConstantGuidance(strength=7.0)
    assert resolve_guidance(own, default) is own


def test_lists_are_scales_per_stage() -> None:
    resolved = resolve_guidance([1, 2.5], RampGuidance(logits=False, layers=(-2,), strength=4.0))
    assert resolved == StageGuidance(logits=False, layers=(-2,), values=(1.0, 2.5))
    assert resolve_guidance(3.0, resolved) == ConstantGuidance(logits=False, layers=(-2,), strength=3.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), [1.0, float("nan"), 1.0], "123", 10**400])
def test_impossible_guidance_is_refused(bad: float | list[float] | str) -> None:
    with pytest.raises(SettingError):
        rows(resolve_guidance(bad, ConstantGuidance()))
