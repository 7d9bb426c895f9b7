"""Late stages that go on from one run of the early ones give what whole requests give."""

from __future__ import annotations

import pytest
import torch

from nextscale.accel import DropGuidance, Method, SkipStages, SparseVAR
from nextscale.accel.combine import Combined
from nextscale.errors import SettingError
from nextscale.lab.evals.late_stages import LateStages

from . import tiny

FIRST = 2


def late_stages(family: str) -> LateStages:
    return LateStages(
        tiny.shared_pipeline(family),
        tiny.schedule_of(family),
        tiny.prompts(family, 3),
        (5, 6, 9),
        FIRST,
        SparseVAR(keep={2: 0.5}, blocks=0),
    )


@pytest.mark.parametrize("family", ["var", "infinity", "star"])
def test_every_method_goes_on_as_in_a_request_of_its_own(family: str) -> None:
    late = late_stages(family)
    for method in (
        Method(),
        SparseVAR(keep={2: 0.5, 3: 0.3}, blocks=0, alpha=3),
        Combined((SparseVAR(tau=0.97, first_stage=2, blocks=0), DropGuidance(2))),
        Combined((SparseVAR(keep={3: 0.3}, blocks=0, anchors="content"), SkipStages(last=0))),
        Method(),
    ):
        found = late.finish(method)
        whole = tiny.shared_pipeline(family)(tiny.prompts(family, 3), seed=[5, 6, 9], method=method)
        assert torch.equal(found.latent, whole.latent), method.label
        reported = sum(stage.tokens for stage in whole.report.stages[FIRST:])
        assert float(found.tokens.mean()) == pytest.approx(reported)


def test_what_changes_early_stages_is_refused() -> None:
    late = late_stages("infinity")
    for method in (SparseVAR(keep={1: 0.5}, blocks=0), DropGuidance(1), SkipStages(last=3)):
        with pytest.raises(SettingError, match="before stage 2"):
            late.finish(method)
