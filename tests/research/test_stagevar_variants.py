"""Variants of StageVAR: their decompositions, what they run, and that a batch is its images alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.eval.calibrate_ranks import energies
from nextscale.methods import DENSE
from nextscale.methods.stagevar import StageVAR, project
from nextscale.methods.stagevar_ranks import energy_ranks
from nextscale.models import Var, VarConfig
from nextscale.stage import Schedule, Tokens
from nextscale_research.methods import StageVARVariants
from nextscale_research.methods.stagevar_variants import (
    LeastSquaresRows,
    SingularRows,
    StudiedGroup,
    Variant,
    factors,
    leading_factors,
    least_squares_weights,
    same_direction,
)
from tests.helpers import tiny
from tests.methods import test_stagevar
from tests.methods.test_stagevar import (
    BATCH_TOLERANCE,
    FOUR,
    ONE_MEGAPIXEL,
    Doubling,
    X,
    alone,
    assert_same_bits,
    generated,
    infinity,
    last_stage,
    on_meta,
    ranks_of,
    toy_env,
    toy_span,
)

VARIANTS: tuple[Variant, ...] = get_args(Variant)
STUDIED: tuple[Any, ...] = VARIANTS[1:-1]  # those that StageVAR itself does not have


@pytest.mark.parametrize(("alpha", "rank"), [(0.1, 1), (0.63, 1), (0.65, 2), (0.79, 2), (0.81, 3), (0.95, 3), (0.97, 4), (0.999, 4)])
def test_the_energy_rule_on_known_singular_values(alpha: float, rank: int) -> None:
    """Energies 16, 4, 4, 1: shares 0.64, 0.8, 0.96, 1."""
    x = with_singular_values((4, 2, 2, 1))
    assert energies(x)[0].tolist() == pytest.approx([16, 4, 4, 1, 0, 0, 0], abs=1e-4)
    assert factors(x)[1].square()[0].tolist() == pytest.approx([16, 4, 4, 1, 0, 0, 0], abs=1e-4)
    assert energy_ranks(energies(x), alpha).tolist() == [rank]
    shifted = x + 100 * torch.ones(1, 1, 7)  # what all tokens have in common is energy too (equation 4), and one direction
    assert energy_ranks(energies(shifted), alpha).tolist() == [1]
    assert energy_ranks(energies(shifted, centered=True), alpha).tolist() == [rank]  # as the published tables


def with_singular_values(values: Sequence[float], tokens: int = 12, channels: int = 7, seed: int = 0) -> Tensor:
    """[1, tokens, channels], mean-centered, with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(tokens, len(values), generator=generator)
    u = torch.linalg.qr(left - left.mean(dim=0)).Q
    v = torch.linalg.qr(torch.randn(channels, len(values), generator=generator)).Q
    return ((u * torch.tensor(values)) @ v.T)[None]


def test_padding_has_no_energy() -> None:
    x = with_singular_values((4, 2, 2, 1))
    padded = torch.cat([x, x[:, -1:].expand(-1, 5, -1)], dim=1)
    tokens = Tokens(FOUR.stage, torch.zeros(2, 17, dtype=torch.long), torch.tensor([12, 17]))
    span = StudiedGroup(range(1), 0, 1.0, 7, alpha=0.97)
    _, ranks = span.ranks(torch.cat([padded, with_singular_values((1, 1, 1, 1, 1), tokens=17)]), tokens)
    assert ranks is not None and ranks.tolist() == [4, 5]


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_factors_are_directions_with_signs_of_their_own(shape: tuple[int, int]) -> None:
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    u, s, rows = factors(x)
    assert torch.allclose(s, torch.linalg.svdvals(x), atol=1e-5)
    assert torch.allclose(u @ rows, x, atol=1e-5)
    assert torch.allclose(u.transpose(1, 2) @ u, torch.eye(5).expand(2, 5, 5), atol=1e-5)
    assert (rows.gather(2, rows.abs().argmax(dim=2, keepdim=True)) > 0).all()
    flipped, _, same = factors(-x)
    assert torch.allclose(same, rows, atol=1e-5)
    assert torch.allclose(flipped, -u, atol=1e-5)


def test_directions_that_are_not_there_are_zero() -> None:
    x = with_singular_values((3, 2))
    u, _, rows = factors(x)
    assert (u[..., 2:] == 0).all()
    assert torch.allclose(u @ rows, x, atol=1e-5)


def test_a_given_rank_finds_the_same_leading_directions_without_the_others() -> None:
    x = with_singular_values((8, 4, 0.5, 0.02, 0.01), tokens=40, channels=30)
    q = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(3))
    u, rows = leading_factors(x.repeat(2, 1, 1), q, torch.tensor([3, 2]))
    expected_u, _, expected_rows = factors(x)
    assert u.shape == (2, 40, 3) and rows.shape == (2, 3, 30)
    for image, rank in enumerate((3, 2)):
        near = torch.zeros(3).scatter(0, torch.arange(rank), 1.0)
        assert torch.allclose(rows[image], expected_rows[0, :3] * near[:, None], atol=0.05)
        assert torch.allclose(u[image], expected_u[0, :, :3] * near, atol=0.05)
    error = (u @ rows - x).square().sum(dim=(1, 2))
    assert error.tolist() == pytest.approx([0.0005, 0.2505], rel=0.01)  # of the best approximation: the energies that are left out


def test_directions_are_compared_column_by_column() -> None:
    like = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    u = torch.tensor([[[-1.0, 2.0, 0.0], [5.0, 1.0, 1.0], [3.0, 4.0, 0.0]]])
    assert same_direction(u, like).tolist() == [[[1.0, 2.0, 0.0], [-5.0, 1.0, 1.0], [-3.0, 4.0, 0.0]]]


def test_least_squares_weights_restore_what_the_rows_span() -> None:
    x = with_singular_values((4, 2))
    rows = project(x, torch.randn(1, 12, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(least_squares_weights(rows, x) @ rows, x, atol=1e-4)
    padded = torch.cat([rows, torch.zeros(1, 2, 7)], dim=1)
    weights = least_squares_weights(padded, x)
    assert (weights[..., 3:].abs() < 1e-5).all()
    assert torch.allclose(weights @ padded, x, atol=1e-4)


def test_least_squares_doubles_what_the_block_doubles() -> None:
    """All of X lies in the span of two rows, so the input's solution restores 2 X; the previous map is X too and gives as much again."""
    ctx = toy_env(X, FOUR)
    out = toy_span(LeastSquaresRows)([Doubling()], X, FOUR, ctx)  # type: ignore[list-item]
    assert torch.allclose(out, 4 * X, atol=1e-4)


def test_singular_rows_double_what_the_block_doubles() -> None:
    ctx = toy_env(-3 * X, FOUR)  # the same directions with other signs and lengths
    block = Doubling()
    out = toy_span(SingularRows)([block], X, FOUR, ctx)  # type: ignore[list-item]
    assert torch.allclose(out, 4 * X, atol=1e-4)
    assert torch.allclose(block.seen[0][0][0], torch.tensor([[0.0, 20**0.5], [10**0.5, 0.0]]), atol=1e-5)
    assert block.seen[0][1].index.tolist() == [[0, 1]]


def test_measured_ranks_forecast_what_is_assumed() -> None:
    span = StudiedGroup(range(1), 0, 1.0, 30, alpha=0.9, assumed=0.5)
    assert [span.num_tokens(tokens) for tokens in (1, 10, 100)] == [1, 5, 15]
    plans = StageVARVariants(ranks="measured").forecast(infinity(dim=48), ONE_MEGAPIXEL, kept=0.25)
    assert ranks_of(plans[10], ONE_MEGAPIXEL[10]) == [12] * 8


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_variant_changes_the_low_rank_stage_and_no_other(family: str) -> None:
    vanilla = generated(family, method=StageVARVariants(variant="vanilla"))
    last = [vanilla.codes[-1]]
    for variant in VARIANTS[1:]:
        ours = generated(family, method=StageVARVariants(variant=variant))
        assert all(torch.equal(a, b) for a, b in zip(ours.codes[:-1], vanilla.codes[:-1], strict=True))
        assert not any(torch.equal(ours.codes[-1], other) for other in last)
        assert ours.pixels.isfinite().all()
        last.append(ours.codes[-1])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_measured_ranks_differ_between_images_and_a_batch_is_its_images_alone(family: str) -> None:
    last = last_stage(family)
    method = StageVARVariants(ranks="measured", alphas={last - 1: 0.9, last: 0.96})
    together = generated(family, 3, method, compute_mask=True)
    shares = [mask.mean(dim=(1, 2)).tolist() for mask in together.compute_mask[-2:]]
    assert any(len(set(row)) > 1 for row in shares)
    for image in range(3):
        single = alone(family, image, method)
        assert all(torch.equal(a[image], b[0]) for a, b in zip(together.codes, single.codes, strict=True))
        assert torch.allclose(together.pixels[image], single.pixels[0], atol=BATCH_TOLERANCE)


@pytest.mark.parametrize(("variant", "share"), [("vanilla", 1), ("svd_approximation", 1), ("svd_fixed", 3 / 16), ("least_squares", 3 / 16)])
def test_the_compute_mask_without_representatives_is_the_share_of_rows(variant: Variant, share: float) -> None:
    masks = generated("var", method=StageVARVariants(variant=variant), compute_mask=True).compute_mask
    assert all(torch.allclose(stage, torch.tensor(expected)) for stage, expected in zip(masks, (1.0, 1.0, 1.0, float(share)), strict=True))


@pytest.mark.parametrize("variant", STUDIED)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_batch_is_its_images_alone(family: str, variant: Variant) -> None:
    test_stagevar.test_a_batch_is_its_images_alone(family, StageVARVariants(variant=variant))


@pytest.mark.parametrize("variant", STUDIED)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_low_rank_inside_a_reduced_stage(family: str, variant: Variant) -> None:
    test_stagevar.test_low_rank_inside_a_reduced_stage(family, StageVARVariants(variant=variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forecast_is_what_runs(variant: Variant) -> None:
    test_stagevar.test_the_forecast_is_what_runs(StageVARVariants(variant=variant))
    assert StageVARVariants(ranks=0.3).forecast(infinity(), ONE_MEGAPIXEL) == StageVAR(ranks=0.3).forecast(infinity(), ONE_MEGAPIXEL)


@pytest.mark.parametrize(("kind", "share"), [(LeastSquaresRows, 0.5), (SingularRows, 0.5)])
def test_a_span_reports_what_its_blocks_computed(kind: type[StudiedGroup], share: float) -> None:
    test_stagevar.test_a_span_reports_what_its_blocks_computed(kind, share)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_full_rank_is_dense_bit_for_bit(family: str) -> None:
    vanilla = StageVARVariants(guidance_off=99, alphas={last_stage(family): 0.5}, variant="vanilla")
    assert_same_bits(generated(family, method=vanilla), generated(family))


@pytest.mark.parametrize("family", ["infinity", "hart"])
def test_half_precision(family: str) -> None:
    """Decompositions need float32; what enters and leaves the blocks has the model's type."""
    pipe = tiny.shared_pipeline(family, torch.bfloat16)
    for method in (*(StageVARVariants(variant=variant) for variant in VARIANTS), StageVARVariants(ranks="measured")):
        assert pipe(tiny.prompts(family, 2), seed=1, method=method).pixels.isfinite().all()


def test_an_approximation_needs_nothing_of_the_stage_before() -> None:
    model, schedule = on_meta(Var, VarConfig(3, 64, 4, (1, 2, 3, 4, 5, 6), False)), Schedule((1, 2, 3, 4, 5, 6))
    approximated = StageVARVariants(alphas={3: 0.96}, variant="svd_approximation").forecast(model, schedule)
    assert [len(plan.spans) for plan in approximated] == [0, 0, 0, 3, 0, 0]
    assert ranks_of(approximated[3], schedule[3]) == [16] * 3
    assert StageVARVariants(alphas={2: 0.96}, guidance_off=9, variant="vanilla").forecast(model, schedule) == (DENSE,) * 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "pca"}, "variant.*got 'pca'"),
        ({"variant": "vanilla", "ranks": 0.2}, "ranks"),
        ({"variant": "svd", "ranks": 0.2}, "ranks"),
        ({"variant": "svd_fixed", "ranks": "measured"}, "ranks"),
        ({"variant": "svd", "as_released": True}, "variant"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        StageVARVariants(**settings)


def test_what_reads_from_the_device_is_not_captured() -> None:
    assert StageVARVariants().capturable and StageVARVariants(variant="vanilla").capturable
    for method in (StageVARVariants(ranks="measured"), *(StageVARVariants(variant=variant) for variant in STUDIED)):
        assert not method.capturable
