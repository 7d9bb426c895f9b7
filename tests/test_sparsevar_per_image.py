"""Budgets of SparseVAR that follow each image: more for those that change evenly, and the same images in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nextscale.accel import DropGuidance, SparseVAR
from nextscale.accel.sparsevar.choice import LEAST_SHARE, MOST_SHARE, USUAL_EVENNESS, own_shares
from nextscale.errors import SettingError
from nextscale.stage import Tokens

from . import tiny
from .test_sparsevar import EAST, TOY, NoReads, assert_same_bits, generated, plan_of, toy, watched

EVEN = torch.full_like(EAST, 8.0)


def test_the_share_grows_with_evenness_and_not_with_size() -> None:
    half = torch.cat([torch.full((1, 50), 1.0), torch.full((1, 50), 2.0)], dim=1)  # a mean of three quarters of the largest
    assert own_shares(half, 1.0).tolist() == pytest.approx([0.75 / USUAL_EVENNESS])
    assert torch.allclose(own_shares(half, 1.0), own_shares(100 * half, 1.0))
    assert own_shares(half, 0.0).tolist() == [1.0]
    peak = torch.cat([torch.zeros(1, 99), torch.full((1, 1), 50.0)], dim=1)
    assert own_shares(peak + 1, 4.0).tolist() == [MOST_SHARE]  # a single cell counts for nothing
    some = torch.cat([torch.full((1, 90), 0.1), torch.full((1, 10), 5.0)], dim=1)
    assert own_shares(some, 4.0).tolist() == [LEAST_SHARE]


def test_images_have_budgets_of_their_own() -> None:
    """Of the twelve cells that are no anchors a quarter, 3: half of that, rounded, for columns that change, twice for all cells."""
    with NoReads():  # all but the counts
        run, _ = toy(alpha=2, keep=0.25, per_image=4)
    run, plan = toy(torch.cat([EAST, EVEN]), alpha=2, keep=0.25, per_image=4)
    assert run.choice.counts.tolist() == [4 + 2, 4 + 6]
    assert (plan.num_tokens, plan.packed) == (10, 16)
    _, tokens = run.reduce(torch.zeros(4, 16, 1), Tokens(TOY[3]))
    assert tokens.count.tolist() == [6, 10] * 2
    assert tokens.index[0, :6].tolist() == [0, 2, 3, 7, 8, 10]
    assert plan_of(run, TOY[4]).num_tokens == 9 + 2 * 7  # the same shares at the next stage, of which a budget is 9 anchors and 7 cells


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_budgets_of_their_own_beside_dropped_guidance(family: str) -> None:
    stages = len(tiny.schedule_of(family))
    method = [SparseVAR(keep=0.4, alpha=3, blocks=0, per_image=20), DropGuidance(stages - 1)]
    report = generated(family, method=method).report
    assert report.stages[-1].tokens < tiny.schedule_of(family)[-1].cells
    assert [stage.rows for stage in report.stages[-2:]] == [6, 3]


def test_without_power_or_reduced_stages_nothing_is_data_dependent() -> None:
    assert not SparseVAR(keep=0.4).data_dependent
    assert SparseVAR(keep=0.4, per_image=4).data_dependent
    assert_same_bits(generated("infinity", method=SparseVAR(keep=1, per_image=4)), generated("infinity"))
    _, seen = watched("infinity", SparseVAR(keep=0.4, per_image=0.0, blocks=0))
    assert all(stage.done.counts is None for stage in seen)


@pytest.mark.parametrize(
    "fields",
    [
        {"per_image": -1, "keep": 0.4},
        {"per_image": "much", "keep": 0.4},
        {"per_image": 4},
        {"per_image": 4, "keep": 0.4, "metric": "logits"},
    ],
    ids=str,
)
def test_what_cannot_be_shared_out_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="per_image"):
        SparseVAR(**fields)
