"""The parts of recordings that need no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nextscale import FastVAR, Method, SkipStages, SparseVAR, StageVAR, ToMe
from nextscale.accel.combine import Combined
from nextscale.engine.conditions import TEXT_WIDTHS, FixedConditioning, text_tokens, text_width
from nextscale.engine.draws import FixedDraws
from nextscale.engine.graphs import ladder
from nextscale.errors import SettingError
from nextscale.generate import Request, as_drawn, generate
from nextscale.guidance import GuidedRows
from nextscale.models.base import Conditioning
from nextscale.pipeline import Pipeline
from nextscale.random_weights import random_pipeline
from nextscale.report import Stopwatch
from nextscale.sampling import ImageDraws

from .tape import Dispatched, Tape, play_graphs_on_the_cpu
from .tiny import CLASS_FAMILIES, FAMILIES, SPECS, prompts, schedule_of, shared_pipeline, text_features

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


def test_a_ladder_has_few_rungs_and_reaches_all_cells() -> None:
    assert ladder(4096)[0] == 4096
    assert len(ladder(4096)) == 12
    assert list(ladder(4096)) == sorted(ladder(4096), reverse=True)
    assert ladder(4) == (4, 3, 2, 1)


def test_recording_without_a_gpu_is_refused() -> None:
    pipe = shared_pipeline("var")
    assert pipe.engine == "eager"
    with pytest.raises(SettingError, match="recorded on a GPU; this model is on cpu"):
        pipe.warmup(1)
    with pytest.raises(SettingError, match="engine 'fast': choose one of graphs, eager"):
        Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, engine="fast")  # type: ignore[arg-type]


# --- recordings, played on the CPU

RECORDED = (
    Method(),
    SkipStages(last=1),
    FastVAR(),
    StageVAR(),
    ToMe(),
    SparseVAR(tau=0.5, from_stage=3),
    Combined((SparseVAR(tau=0.5, from_stage=3), StageVAR(alphas=(), guidance_off=2))),
)


def recorded(family: str) -> Pipeline:
    pipe = shared_pipeline(family)
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="graphs")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", RECORDED, ids=lambda method: method.label)
def test_replays_draw_what_eager_generation_draws(family: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe, eager = recorded(family), shared_pipeline(family)
    first, second = prompts(family, 2), other_prompts(family)
    pipe.warmup(first, method=method)
    for prompt, seeds in ((second, [5, 6]), (first, [3, 4])):
        ours = pipe(prompt, seed=seeds, method=method)
        with Dispatched():
            theirs = eager(prompt, seed=seeds, method=method)
        assert (ours.report.engine, theirs.report.engine) == ("graphs", "eager")
        for mine, other in zip(ours.codes, theirs.codes, strict=True):
            if mine.shape == other.shape:  # on a ladder tokens are padded to other widths
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-2 if family == "hart" else 1e-3)


def test_recordings_do_not_disturb_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe = recorded("infinity")
    kinds = [(2, Method()), (1, Method()), (2, SparseVAR(tau=0.5, from_stage=3)), (1, FastVAR()), (2, StageVAR())]
    for images, method in kinds:
        pipe.warmup(prompts("infinity", images), method=method)
    first = [pipe(prompts("infinity", images), seed=9, method=method).pixels for images, method in kinds]
    for turn in range(15):
        images, method = kinds[turn * 3 % len(kinds)]
        again = pipe(prompts("infinity", images), seed=9, method=method)
        assert again.report.engine == "graphs"
        assert torch.equal(again.pixels, first[turn * 3 % len(kinds)])


def test_previews_show_every_stage_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe, prompt = recorded("infinity"), prompts("infinity", 2)
    pipe.warmup(prompt)
    shown: list[torch.Tensor] = []
    known: list[torch.Tensor] = []
    pipe(prompt, seed=1, on_stage=lambda preview: shown.append(preview.latent.clone()))
    with Dispatched():
        shared_pipeline("infinity")(prompt, seed=1, on_stage=lambda preview: known.append(preview.latent.clone()))
    assert len(shown) == len(known) > 1
    for ours, theirs in zip(shown, known, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("var", Method(), {"forbidden": (1, 3)}),
        ("infinity", ToMe(random=True), {}),
        ("infinity", Combined((SparseVAR(tau=0.5, metric="logits", from_stage=2), ToMe(random=True))), {}),
        ("star_refined", SparseVAR(tau=0.3, from_stage=3), {}),
    ],
)
def test_recordings_read_all_that_a_method_draws(
    family: str, method: Method, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every way of the stage that draws it; and nothing but a refill writes there."""
    play_graphs_on_the_cpu(monkeypatch)
    pipe = random_pipeline(SPECS[family])
    pipe.warmup(prompts(family, 2), method=method, **settings)
    (recording,) = pipe.recordings._recordings.values()
    tapes = [[way.graph for way in step.ways.values() if isinstance(way.graph, Tape)] for step in recording._steps]
    for drawn in recording._method_draws._drawn:
        place = drawn.numbers.untyped_storage().data_ptr()

        def there(values: object, place: int = place) -> bool:
            tensors = values if isinstance(values, tuple) else (values,)
            return any(isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == place for value in tensors)

        readers = [[any(there(args) for _, args, _, _ in tape.ops) for tape in ways] for ways in tapes]
        assert any(ways and all(ways) for ways in readers)
        assert not [op for ways in tapes for tape in ways for op, args, _, out in tape.ops if there(out) and not there(args)]
