"""AREdit: what stays, what is sampled again, and that its ends are the image and plain sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale import EditOptions
from nextscale.errors import SettingError
from nextscale.io import from_levels, to_levels
from nextscale_research.methods.aredit import AREdit, SourceReading, aredit
from tests.helpers.tiny import CLASS_FAMILIES, assert_same_bits, prompts, same_codes, schedule_of, shared_pipeline

FAMILIES = ("infinity", "var", "flexvar", "star")


def image_of(family: str) -> Tensor:
    pixels = shared_pipeline(family).tokenizer.pixels_per_token
    height, width = (side * pixels for side in schedule_of(family).grid)
    levels = torch.randint(0, 256, (1, 3, height, width), generator=torch.Generator().manual_seed(0))
    return from_levels(levels)


def prompts_of(family: str) -> tuple[Any, Any]:
    both = prompts(family, 2)
    return (both[0], both[1]) if family in CLASS_FAMILIES else (both.one(0), both.one(1))


def changed(family: str, **settings: Any) -> list[float]:
    """The share of the codes that differ from the image's, per stage."""
    found = aredit(shared_pipeline(family), image_of(family), *prompts_of(family), seed=3, **settings).codes
    return [float((ours != theirs).float().mean()) for ours, theirs in zip(found, source_codes(family), strict=True)]


def source_codes(family: str) -> list[Tensor]:
    return shared_pipeline(family).tokenizer.encode(from_levels(to_levels(image_of(family) + 1e-5)), schedule_of(family))


@pytest.mark.parametrize("settings", [{"tau": 1}, {"gamma": 99}, {"tau": 1, "gamma": 0}])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_image_stays_where_nothing_may_change(family: str, settings: dict[str, Any]) -> None:
    found = aredit(shared_pipeline(family), image_of(family), *prompts_of(family), seed=3, **settings)
    assert same_codes(found.codes, source_codes(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_may_change_is_plain_sampling(family: str) -> None:
    pipe, (source, prompt) = shared_pipeline(family), prompts_of(family)
    found = aredit(pipe, image_of(family), source, prompt, tau=-2, gamma=0, seed=3)
    assert_same_bits(found, pipe(prompt, seed=3))
    later = aredit(pipe, image_of(family), source, prompt, tau=-2, gamma=2, seed=3)
    assert_same_bits(later, pipe.edit(image_of(family), prompt, seed=3, options=EditOptions(from_stage=2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_larger_tau_changes_less_and_early_stages_stay(family: str) -> None:
    all_of, some, none = (changed(family, tau=tau, gamma=2) for tau in (-2, 0, 1))
    assert all_of[:2] == some[:2] == [0, 0] and sum(none) == 0
    assert 0 < sum(some) < sum(all_of)


def test_the_same_prompt_changes_nothing_at_first() -> None:
    """Both predictions are equal until a code differs, which tau 0 does not allow."""
    pipe, (source, _) = shared_pipeline("infinity"), prompts_of("infinity")
    found = aredit(pipe, image_of("infinity"), source, source, tau=1e-4, seed=3)
    assert same_codes(found.codes, source_codes("infinity"))


def test_it_needs_an_image_and_two_prompts() -> None:
    pipe, (source, prompt) = shared_pipeline("infinity"), prompts_of("infinity")
    with pytest.raises(SettingError, match="aredit"):
        pipe(prompt, method=AREdit(SourceReading(), 0.2))
    for settings in ({"tau": "much"}, {"gamma": -1}):
        with pytest.raises(SettingError, match=next(iter(settings))):
            aredit(pipe, image_of("infinity"), source, prompt, **settings)  # type: ignore[arg-type]
