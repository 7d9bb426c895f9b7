"""The parts of recordings that need no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nextscale import FastVAR, Method, SparseVAR, StageVAR
from nextscale.accel.combine import Combined
from nextscale.engine.conditions import TEXT_WIDTHS, FixedConditioning, text_tokens, text_width
from nextscale.engine.draws import FixedDraws
from nextscale.errors import SettingError
from nextscale.generate import Request, as_drawn, generate
from nextscale.guidance import GuidedRows
from nextscale.models.base import Conditioning
from nextscale.pipeline import Pipeline
from nextscale.report import Stopwatch
from nextscale.sampling import ImageDraws

from .tiny import CLASS_FAMILIES, FAMILIES, prompts, schedule_of, shared_pipeline, text_features

CPU = torch.device("cpu")


def other_prompts(family: str) -> Any:
    """Not those of `prompts`, and of other lengths."""
    return [5, 2] if family in CLASS_FAMILIES else text_features(family, (2, 4), seed=8)


def request_of(pipe: Pipeline, family: str, draws: object, own: object) -> Request:
    schedule = schedule_of(family)
    guidance = GuidedRows(pipe.settings.guidance, schedule, len(pipe.model.blocks))
    return Request(2, schedule, guidance, pipe.settings.sampling, draws, as_drawn, Stopwatch(CPU), own)  # type: ignore[arg-type]


def condition(pipe: Pipeline, family: str, prompt: object) -> Conditioning:
    schedule = schedule_of(family)
    empty = pipe.reader.empty()
    with torch.inference_mode():
        return pipe.model.condition(pipe.reader.read(prompt), True, schedule, None if empty is None else empty.repeat(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_draws_and_conditions_give_the_images_of_the_request_that_is_loaded(family: str) -> None:
    """The first request fixes the buffers; the second one's numbers and prompts take their place."""
    pipe = shared_pipeline(family)
    first, second = prompts(family, 2), other_prompts(family)
    expected = pipe(second, seed=[5, 6], method=Method())
    draws, own = FixedDraws(), FixedDraws()
    cond = condition(pipe, family, first)
    fixed = FixedConditioning(cond, text_width(max(text_tokens(cond), 1)))
    fixed.load(cond)
    request = request_of(pipe, family, draws, own)

    def drawn() -> torch.Tensor:
        draws.rewind()
        own.rewind()
        canvas = pipe.tokenizer.canvas(request.schedule, 2)
        generate(pipe.model, replace(fixed.value), canvas, request, Method(), lambda done: None)
        return canvas.latent

    before = drawn()
    draws.refill(ImageDraws([5, 6], CPU))
    fixed.load(condition(pipe, family, second))
    after = drawn()
    torch.testing.assert_close(after, expected.latent, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(before, after)


def test_a_request_that_draws_otherwise_the_second_time_is_told() -> None:
    draws = FixedDraws()
    draws.exponential((2, 3), CPU)
    draws.rewind()
    with pytest.raises(RuntimeError, match=r"drew exponential \[2, 3\] at first and uniform \[2, 3\]"):
        draws.uniform((2, 3), CPU)


def test_texts_are_padded_to_few_widths() -> None:
    assert [text_width(tokens) for tokens in (0, 1, 16, 17, 512, 600)] == [16, 16, 16, 32, 512, 600]
    assert list(TEXT_WIDTHS) == sorted(TEXT_WIDTHS)


def test_equal_methods_have_one_recording() -> None:
    pairs = [(Method(), Method()), (FastVAR({9: 0.4}), FastVAR({9: 0.4})), (Combined((StageVAR(),)), Combined((StageVAR(),)))]
    for one, other in pairs:
        assert one == other
        assert hash(one) == hash(other)
    assert Method() != FastVAR()
    assert FastVAR() != Method()
    assert FastVAR({9: 0.4}) != FastVAR({9: 0.5})


def test_methods_tell_whether_the_image_decides() -> None:
    assert not any(method.follows_image for method in (Method(), FastVAR(), StageVAR()))
    assert SparseVAR().follows_image
    assert Combined((SparseVAR(), StageVAR(alphas=()))).follows_image


def test_recording_without_a_gpu_is_refused() -> None:
    pipe = shared_pipeline("var")
    assert pipe.engine == "eager"
    with pytest.raises(SettingError, match="recorded on a GPU; this model is on cpu"):
        pipe.warmup(1)
    with pytest.raises(SettingError, match="engine 'fast': choose one of graphs, eager"):
        Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, engine="fast")  # type: ignore[arg-type]
