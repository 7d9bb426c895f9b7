"""Guidance dropped from a stage on, or faded: the arithmetic, and what every method must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nextscale.errors import SettingError
from nextscale.guidance import CfgBranch, ConstantGuidance, RampGuidance, ResolvedGuidance, StageGuidance
from nextscale.methods import DENSE, DropGuidance, FastVAR, Method, SkipStages, SparseVAR, StagePlan, StageVAR
from nextscale.methods.combine import Combined
from nextscale.methods.registry import parse_method
from nextscale.pipeline import Output
from nextscale.stage import Schedule
from tests.helpers import tiny
from tests.helpers.toy_methods import STAGES, Planned

INTEGER_CODES: dict[str, dict[str, Any]] = {"hart": {"smooth": False}}
UNREFINED = [family for family in tiny.FAMILIES if family != "star_refined"]  # a refiner is guided as at the last stage in all of them
BRANCHES: tuple[CfgBranch, ...] = ("cond", "uncond")


def generated(family: str, images: int = 2, method: Any = None, **settings: Any) -> Output:
    settings = INTEGER_CODES.get(family, {}) | settings
    return tiny.shared_pipeline(family)(tiny.prompts(family, images), seed=11, method=method, **settings)


def constant(family: str, scale: float = 2.5) -> StageGuidance:
    return StageGuidance(values=(scale,) * STAGES[family])


def with_share(share: float, first: int) -> Planned:
    """Both rows in all stages, guided by a share of what the scale has above 1 from stage `first` on."""
    return Planned(lambda stage: StagePlan(guidance_decay=share if stage.index >= first else 1.0))


# --- the arithmetic

FOUR = Schedule(((1, 1), (2, 2), (3, 3), (4, 4)))


def test_fading_weakens_what_a_scale_has_above_one() -> None:
    guided = ResolvedGuidance(ConstantGuidance(strength=3.0), FOUR, 2)
    faded = guided.with_decay((1.0, 0.75, 0.5, 0.0))
    assert faded.scales == (3.0, 2.5, 2.0, 1.0) and faded.excess == (2.0, 1.5, 1.0, 0.0)
    assert guided.scales == (3.0,) * 4 and faded.key != guided.key
    assert guided.with_decay((1.0,) * 4) is guided


def test_stages_that_do_not_fade_keep_their_scale_to_the_bit() -> None:
    ramp = ResolvedGuidance(RampGuidance(strength=2.7), FOUR, 2)
    assert ramp.with_decay((1.0, 1.0, 1.0, 0.3)).scales[:3] == ramp.scales[:3]


def test_a_refiner_fades_by_the_share_of_its_own_stage() -> None:
    """From the last stage's full scale, not from what fading has left of it."""
    both = torch.tensor([[[2.0]], [[5.0]]])
    faded = ResolvedGuidance(StageGuidance(values=(1.0, 2.0, 3.0, 5.0)), FOUR, 2).with_decay((1.0, 1.0, 0.5, 0.0))
    assert [faded.guide_as_last(both, stage, 1).item() for stage in FOUR] == [5 * 2 - 4 * 5, 5 * 2 - 4 * 5, 3 * 2 - 2 * 5, 2]


def test_a_tail_past_the_schedule_still_decides_that_both_rows_run() -> None:
    faded = ResolvedGuidance(StageGuidance(values=(1.0, 1.0, 1.0, 1.0, 2.0)), FOUR, 2).with_decay((1.0, 1.0, 0.5, 0.5))
    assert faded.needs_both and faded.scales == (1.0, 1.0, 1.0, 1.0, 2.0)


def test_plans() -> None:
    model, schedule = tiny.shared_pipeline("infinity").model, tiny.infinity_schedule(1.0, "1M")
    plans = DropGuidance(11, fade=2).forecast(model, schedule)
    assert plans[:9] == (DENSE,) * 9
    assert [plan.guidance_decay for plan in plans[9:11]] == [2 / 3, 1 / 3]
    assert plans[11:] == (StagePlan(cfg_branches="cond"),) * 2
    assert DropGuidance().forecast(model, schedule) == DropGuidance(11).forecast(model, schedule)
    assert DropGuidance(kept_rows="uncond").forecast(model, schedule)[11:] == (StagePlan(cfg_branches="uncond"),) * 2
    assert DropGuidance(fade=2).forecast(model, schedule, guided=False) == (DENSE,) * 13
    assert DropGuidance(13, fade=1).forecast(model, schedule) == (DENSE,) * 12 + (StagePlan(guidance_decay=0.5),)  # faded, never dropped


def test_settings_as_text() -> None:
    assert parse_method("dropguidance") == DropGuidance()
    assert parse_method("dropguidance:first_stage=11,fade=2") == DropGuidance(11, fade=2)
    assert parse_method("dropguidance:kept_rows=uncond") == DropGuidance(kept_rows="uncond")
    assert parse_method("stagevar:kept_rows=cond") == StageVAR(kept_rows="cond")
    assert DropGuidance(11, fade=2).label == "DropGuidance(first_stage=11, fade=2)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_stage": -1}, "first_stage .* got -1"),
        ({"first_stage": 2.5}, "first_stage .* got 2.5"),
        ({"kept_rows": "both"}, "kept_rows.*cond, uncond; got 'both'"),
        ({"fade": -1}, "fade.*got -1"),
        ({"fade": True}, "fade .* got True"),
        ({"fade": 1, "kept_rows": "uncond"}, "kept_rows.*fade.*got 'uncond'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        DropGuidance(**settings)


def test_what_does_not_fit_is_refused() -> None:
    model, schedule = tiny.shared_pipeline("var").model, tiny.schedule_of("var")
    with pytest.raises(SettingError, match="fade must be at most 2.*got 3"):
        DropGuidance(2, fade=3).forecast(model, schedule)
    with pytest.raises(SettingError, match="kept_rows must be one of"):
        StageVAR(kept_rows="all")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="kept_rows.*as_released; got 'cond'"):
        StageVAR(kept_rows="cond", as_released=True)
    with pytest.raises(SettingError, match=r"two methods set cfg_branches"):
        Combined((StageVAR(alphas=()), DropGuidance(2))).forecast(model, schedule)
    with pytest.raises(SettingError, match=r"two methods set guidance_decay, to 0.5 and to 0.66"):
        Combined((DropGuidance(2, fade=1), DropGuidance(3, fade=2))).forecast(model, schedule)
    with pytest.raises(ValueError, match="guidance_decay must be a number from 0 to 1; got 1.5"):
        StagePlan(guidance_decay=1.5)


# --- what every method must keep


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_never_is_dense_bit_for_bit(family: str) -> None:
    dense = generated(family)
    tiny.assert_same_bits(generated(family, method=DropGuidance(99)), dense)
    tiny.assert_same_bits(generated(family, method=StageVAR(guidance_off=99, alphas=(), kept_rows="cond")), dense)
    tiny.assert_same_bits(generated(family, method=DropGuidance(STAGES[family] + 2, fade=2)), dense)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_request_without_guidance_runs_as_it_is(family: str) -> None:
    unguided = {"guidance": tiny.NO_GUIDANCE[family]}
    for method in (DropGuidance(2, fade=1), DropGuidance(1, kept_rows="uncond"), StageVAR(1, (), kept_rows="cond")):
        tiny.assert_same_bits(generated(family, method=method, **unguided), generated(family, **unguided))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("first", [0, 2])
def test_conditional_rows_alone_are_a_scale_of_one(family: str, first: int) -> None:
    """Which both rows at no share of the scale generate too, to the rounding of other numbers of rows."""
    guidance = constant(family)
    alone = generated(family, method=DropGuidance(first), guidance=guidance, greedy=True)
    both = generated(family, method=with_share(0.0, first), guidance=guidance, greedy=True)
    assert [stage.rows for stage in alone.report.stages] == [4] * first + [2] * (STAGES[family] - first)
    assert [stage.rows for stage in both.report.stages] == [4] * STAGES[family]
    tiny.assert_close(family, alone, both)
    assert alone.report.cost_share < both.report.cost_share


@pytest.mark.parametrize("family", UNREFINED)
def test_fading_is_those_scales_written_out(family: str) -> None:
    stages = STAGES[family]
    faded = generated(family, method=DropGuidance(stages - 1, fade=2), guidance=constant(family), greedy=True)
    scales = [2.5] * (stages - 3) + [1 + 1.5 * 2 / 3, 1 + 1.5 / 3, 1.0]
    tiny.assert_close(family, faded, generated(family, guidance=scales, greedy=True))
    assert [stage.cfg_branches for stage in faded.report.stages] == [2] * (stages - 1) + [1]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fading_and_either_branch_generate_other_images(family: str) -> None:
    guidance = constant(family, 9.0)
    methods = (None, DropGuidance(3), DropGuidance(3, "uncond"), DropGuidance(3, fade=2))
    outputs = [generated(family, method=method, guidance=guidance) for method in methods]
    for number, output in enumerate(outputs):
        assert not any(torch.equal(output.latent, other.latent) for other in outputs[:number])


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("kept_rows", BRANCHES)
def test_stagevar_drops_guidance_in_the_same_way(family: str, kept_rows: CfgBranch) -> None:
    ours = generated(family, method=StageVAR(guidance_off=2, alphas=(), kept_rows=kept_rows))
    tiny.assert_same_bits(ours, generated(family, method=DropGuidance(2, kept_rows)))


@pytest.mark.parametrize("family", tiny.TEXT_FAMILIES)
def test_a_negative_prompt_has_no_say_where_the_conditional_rows_run_alone(family: str) -> None:
    negative = tiny.one_prompt(family, 2)
    plain, steered = (generated(family, method=DropGuidance(0), negative=given) for given in (None, negative))
    tiny.assert_same_bits(plain, steered)
    later = generated(family, method=DropGuidance(2), negative=negative, guidance=constant(family, 6.0))
    assert not torch.equal(later.latent, generated(family, method=DropGuidance(2), guidance=constant(family, 6.0)).latent)
    kept = generated(family, method=DropGuidance(0, "uncond"), negative=negative)
    assert not torch.equal(kept.latent, plain.latent)


# What composes, on every backbone. The first three settings also stand alone.
TOGETHER: dict[str, tuple[Method, ...]] = {
    "alone": (DropGuidance(2),),
    "faded": (DropGuidance(3, fade=2),),
    "low rank": (StageVAR(guidance_off=2, ranks=0.3, kept_rows="cond"),),
    "SparseVAR": (SparseVAR(tau=0.9, first_stage=2, blocks=0), DropGuidance(3, fade=1)),
    "a budget": (SparseVAR(keep=0.5, first_stage=2, blocks=0), DropGuidance(2)),
    "FastVAR": (FastVAR({2: 0.5, 3: 0.5}), DropGuidance(3, fade=1)),
    "skipping": (SkipStages(1), DropGuidance(2, fade=1)),
    "all": (SparseVAR(keep=0.5, first_stage=2, blocks=0), DropGuidance(2, fade=1), SkipStages(1)),
}


@pytest.mark.parametrize("methods", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_batch_is_its_images_alone_in_any_order(family: str, methods: tuple[Method, ...]) -> None:
    pipeline = tiny.shared_pipeline(family)
    settings = {"method": methods, "smooth": False, "greedy": True}
    prompts, order = tiny.prompts(family, 2), [1, 0]
    together = pipeline(prompts, seed=[3, 8], **settings)
    turned = [prompts[i] for i in order] if isinstance(prompts, list) else type(prompts).joined([prompts.one(i) for i in order])
    permuted = pipeline(turned, seed=[8, 3], **settings).latent[order]
    assert torch.allclose(permuted, together.latent, rtol=0, atol=tiny.ROUNDING[family].latents)
    alone = pipeline(tiny.one_prompt(family, 1), seed=8, **settings)
    one = tiny.one_image(together, 1)
    assert torch.allclose(one.latent, alone.latent, rtol=0, atol=tiny.ROUNDING[family].latents)
    tiny.assert_same_bits(pipeline(prompts, seed=[3, 8], **settings), together)


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if not family.startswith("var")])  # VAR's positions are square
def test_images_that_are_not_square(family: str) -> None:
    schedule = Schedule([(1, 1), (2, 3), (4, 6), (6, 9)])
    settings = {"method": DropGuidance(3, fade=1), "size": schedule, "smooth": False, "greedy": True}
    together = tiny.shared_pipeline(family)(tiny.prompts(family, 2), seed=[3, 8], **settings)
    alone = tiny.shared_pipeline(family)(tiny.one_prompt(family, 1), seed=8, **settings)
    assert torch.allclose(together.latent[1], alone.latent[0], rtol=0, atol=tiny.ROUNDING[family].latents)
