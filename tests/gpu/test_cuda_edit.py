"""Edits on a GPU: captured edits equal eager ones, pixels outside the mask stay, and a full mask is plain generation."""

from __future__ import annotations

import pytest
import torch

from nextscale import EditOptions, Pipeline
from nextscale.io import to_levels
from tests.gpu.test_cuda import on_gpu
from tests.helpers.tiny import KINDS, one_prompt, prompts, shared_pipeline
from tests.test_edit import corner, images_of, size_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def eager(pipe: Pipeline) -> Pipeline:
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="eager")


@pytest.mark.parametrize("family", KINDS)
def test_captured_edits_are_eager_edits(family: str) -> None:
    graphs, options = on_gpu(shared_pipeline(family)), EditOptions(from_stage=1)
    first = {"mask": [corner(family), corner(family, 0.7)], "seed": [1, 2], "options": options}
    graphs.edit(images_of(family, 2), prompts(family, 2), warmup=True, **first)
    again = {"mask": [corner(family, 0.3).flip(0), corner(family, 0.6)], "seed": [7, 8], "options": options}
    images = images_of(family, 2, seed=9)
    found, expected = (pipe.edit(images, prompts(family, 2), **again) for pipe in (graphs, eager(graphs)))
    assert found.report.engine == "graphs" and "NearMask" in found.report.method
    agree = [float((ours == theirs).float().mean()) for ours, theirs in zip(found.codes, expected.codes, strict=True)]
    assert family == "hart" or min(agree) > 0.9
    for row, mask in enumerate(again["mask"]):  # type: ignore[arg-type, var-annotated]
        assert torch.equal(to_levels(found.pixels[row].cpu())[:, mask == 0], to_levels(images[row])[:, mask == 0])


@pytest.mark.parametrize("family", KINDS)
def test_a_full_mask_is_plain_generation(family: str) -> None:
    pipe, prompt = eager(on_gpu(shared_pipeline(family))), one_prompt(family, 0)
    found = pipe.edit(images_of(family), prompt, mask=torch.ones(size_of(family)), seed=3)
    assert torch.equal(found.pixels, pipe(prompt, seed=3).pixels)
