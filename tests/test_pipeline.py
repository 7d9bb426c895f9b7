"""Whole requests on tiny models: batches, seeds, guidance, previews, reports and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nextscale
from nextscale.errors import NextscaleError, NonFiniteLogits, OutOfMemory, PromptError, SettingError, SizeError, UnknownModel
from nextscale.generate import StageOutput
from nextscale.guidance import LARGEST_SCALE, ConstantGuidance, StageGuidance
from nextscale.loading.presets import MODELS, model_spec
from nextscale.methods import Method, SkipStages, StagePlan
from nextscale.methods.method import Plans
from nextscale.models import NextScaleModel
from nextscale.output import Output, Preview, mask_of
from nextscale.pipeline import Pipeline
from nextscale.planning.memory import reserved_bytes
from nextscale.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, SharedRng
from nextscale.schedules import InfinitySchedules
from nextscale.stage import Schedule, Stage
from nextscale.text import TextFeatures
from tests.helpers import tiny


def drawn(family: str, images: int = 3, seed: Any = 5, **settings: Any) -> Output:
    return tiny.shared_pipeline(family)(tiny.prompts(family, images), seed=seed, **settings)


def picked(prompt: Any, images: Sequence[int]) -> Any:
    """Some images' prompts, in the order given."""
    return TextFeatures.joined([prompt.one(i) for i in images]) if isinstance(prompt, TextFeatures) else [prompt[i] for i in images]


class SkipSecond(Method):
    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return tuple(StagePlan(skip=stage.index == 1) for stage in schedule)


# --- batches and seeds


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *product(tiny.FAMILIES, [{}, {"greedy": True}, {"guidance": 0.5}]),
        ("hart", {"smooth": False}),
        ("star_refined", {"refine": None}),
    ],
    ids=str,
)
def test_a_batch_equals_its_images_alone(family: str, settings: dict[str, Any]) -> None:
    """Texts of a batch have different lengths, so this covers padding as well."""
    together = drawn(family, seed=[5, 60, 700], **settings)
    for image, seed in enumerate((5, 60, 700)):
        alone = tiny.shared_pipeline(family)(tiny.one_prompt(family, image), seed=seed, **settings)
        tiny.assert_close(family, tiny.one_image(together, image), alone)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_images_of_a_batch_differ(family: str) -> None:
    """Otherwise the tests above would compare copies: by prompt, by seed, and by both."""
    by_both = drawn(family)
    by_prompt = drawn(family, seed=[5, 5, 5])
    by_seed = tiny.shared_pipeline(family)(tiny.one_prompt(family, 0), seed=[5, 6, 7])
    for output in (by_both, by_prompt, by_seed):
        first, second, third = output.pixels
        assert min((first - second).abs().max(), (first - third).abs().max(), (second - third).abs().max()) > 0.1


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 0, 2]])
def test_a_permuted_batch_permutes_the_images(family: str, order: list[int]) -> None:
    """To rounding: what ends a vector of a processor may be computed in another way than what stands inside it."""
    seeds = [5, 60, 700]
    straight = drawn(family, seed=seeds)
    permuted = tiny.shared_pipeline(family)(picked(tiny.prompts(family, 3), order), seed=picked(seeds, order))
    for place, image in enumerate(order):
        tiny.assert_close(family, tiny.one_image(permuted, place), tiny.one_image(straight, image))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_seed_repeats_its_images_bit_for_bit(family: str) -> None:
    tiny.assert_same_bits(drawn(family), drawn(family))
    assert not tiny.close_codes(family, drawn(family, seed=6).codes, drawn(family, seed=5).codes)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_number_counts_on_from_image_to_image(family: str) -> None:
    tiny.assert_same_bits(drawn(family, seed=5), drawn(family, seed=[5, 6, 7]))
    assert drawn(family, seed=5).report.seeds == (5, 6, 7)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_prompt_and_several_seeds_are_several_images(family: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    several = pipeline(tiny.one_prompt(family, 1), seed=(8, 3))
    tiny.assert_same_bits(several, pipeline(picked(tiny.prompts(family, 2), [1, 1]), seed=[8, 3]))
    assert several.report.seeds == (8, 3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_fresh_seed_is_reported_in_the_report(family: str) -> None:
    first, second = drawn(family, images=2, seed=None), drawn(family, images=2, seed=None)
    assert first.report.seeds != second.report.seeds
    tiny.assert_same_bits(drawn(family, images=2, seed=first.report.seeds), first)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_generator_is_one_stream_for_the_whole_batch(family: str) -> None:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    alone, seeded = drawn(family, images=1, seed=generator()), drawn(family, images=1, seed=5)
    tiny.assert_same_bits(alone, seeded)
    assert alone.report.seeds is None
    batch = drawn(family, images=3, seed=generator())
    tiny.assert_same_bits(drawn(family, images=3, seed=SharedRng(generator())), batch)
    assert not tiny.close_codes(family, batch.codes, drawn(family, images=3, seed=5).codes)
    advanced = generator()
    drawn(family, images=1, seed=advanced)
    assert not tiny.close_codes(family, drawn(family, images=1, seed=advanced).codes, alone.codes)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_codes_do_not_depend_on_the_seed(family: str) -> None:
    """HART's residual does, and so do the cells that STAR's refiner settles first, unless it goes by certainty alone."""
    settings = {"refine": replace(tiny.REFINEMENT, random=0)} if family == "star_refined" else {}
    first, second = (drawn(family, seed=seed, greedy=True, **settings) for seed in (1, 2))
    if family != "hart":
        tiny.assert_same_bits(first, second)
    assert tiny.same_codes(first.codes, second.codes)


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], ()])
def test_the_number_of_seeds_is_the_number_of_images(seed: Sequence[int]) -> None:
    with pytest.raises(SettingError, match=rf"one per image \(2\); got {len(seed)}"):
        tiny.shared_pipeline("var")([1, 2], seed=seed)


@pytest.mark.parametrize("seed", [-1, 2**63, [5, -2], [2**64, 1]], ids=str)
def test_seeds_out_of_range_are_refused(seed: Any) -> None:
    with pytest.raises(SettingError, match=r"an int from 0 to 2\*\*63 - 1"):
        tiny.shared_pipeline("var")([1, 2] if isinstance(seed, list) else 1, seed=seed)
    tiny.shared_pipeline("var")(1, seed=2**63 - 1)


def test_the_last_image_of_a_batch_has_a_seed_too() -> None:
    with pytest.raises(SettingError, match=r"at most 2\*\*63 - 2 for 2 images.* got 9223372036854775807"):
        tiny.shared_pipeline("var")([1, 2], seed=2**63 - 1)
    assert tiny.shared_pipeline("var")([1, 2], seed=2**63 - 2).report.seeds == (2**63 - 2, 2**63 - 1)


@pytest.mark.parametrize("seed", [[], 1.5, "12", ["a"], [1.5], True, [True], b"1", {1}], ids=str)
def test_impossible_seeds_are_refused_in_words(seed: Any) -> None:
    with pytest.raises(NextscaleError):
        tiny.shared_pipeline("var")(1, seed=seed)


@pytest.mark.parametrize(("label", "seed"), [(3, np.int64(5)), (np.int64(3), 5), (np.array([3]), 5)])
def test_numbers_from_numpy_are_numbers(label: Any, seed: Any) -> None:
    pipeline = tiny.shared_pipeline("var")
    tiny.assert_same_bits(pipeline(label, seed=seed), pipeline(3, seed=5))


# --- guidance


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_no_guidance_is_the_conditional_branch_alone(family: str) -> None:
    """A list whose tail past the last stage differs from 1 runs both branches, but every stage takes the conditional one."""
    stages = len(tiny.schedule_of(family))
    one_branch = drawn(family, guidance=tiny.NO_GUIDANCE[family])
    both_branches = drawn(family, guidance=[1.0] * stages + [2.0])
    assert {stage.rows for stage in one_branch.report.stages} == {3}
    assert {stage.rows for stage in both_branches.report.stages} == {6}
    tiny.assert_close(family, one_branch, both_branches)
    tiny.assert_same_bits(one_branch, drawn(family, guidance=[1] * stages))
    assert not tiny.close_codes(family, one_branch.codes, drawn(family).codes)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_guidance_at_one_stage_changes_that_stage_and_none_before(family: str) -> None:
    """Except that STAR's refiner is guided by the last stage's scale from its first stage on."""
    stages = len(tiny.schedule_of(family))
    plain = drawn(family, guidance=tiny.NO_GUIDANCE[family], greedy=True)
    for guided in range(1, stages):
        scales = [4.0 if stage == guided else 1.0 for stage in range(stages)]
        output = drawn(family, guidance=scales, greedy=True)
        first = tiny.REFINEMENT.first_stage if family == "star_refined" and guided == stages - 1 else guided
        assert tiny.same_codes(output.codes[:first], plain.codes[:first])
        assert not torch.equal(output.codes[first], plain.codes[first])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_number_is_the_published_form_at_that_strength(family: str) -> None:
    form = tiny.SPECS[family].settings.guidance
    schedule = tiny.schedule_of(family)
    tiny.assert_same_bits(drawn(family, guidance=1.7), drawn(family, guidance=form.with_strength(1.7).scales(schedule)))
    tiny.assert_same_bits(drawn(family), drawn(family, guidance=StageGuidance(values=form.scales(schedule))))
    assert not tiny.close_codes(family, drawn(family).codes, drawn(family, guidance=1.7).codes)


def test_a_short_guidance_list_is_refused() -> None:
    with pytest.raises(SettingError, match=r"one per stage \(4\); got 2"):
        drawn("infinity", guidance=[3, 2])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_negative_prompts_change_the_image(family: str) -> None:
    against = tiny.prompts(family, 3)
    plain, steered = drawn(family), drawn(family, negative=picked(against, [1, 2, 0]))
    assert not tiny.close_codes(family, plain.codes, steered.codes)
    same_for_all = drawn(family, negative=tiny.one_prompt(family, 1))
    tiny.assert_same_bits(same_for_all, drawn(family, negative=picked(against, [1, 1, 1])))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_steering_away_from_the_prompt_itself_is_no_guidance(family: str) -> None:
    """Both branches are equal, so s * x + (1 - s) * x = x, to rounding."""
    steered = drawn(family, negative=tiny.prompts(family, 3))
    assert tiny.close_codes(family, steered.codes, drawn(family, guidance=tiny.NO_GUIDANCE[family]).codes)


def no_prompt(family: str) -> Any:
    """What guidance steers away from by default, written out.

    Infinity has learned a text, cut to the length of each prompt. HART reads zeros at position 0, which is where all tokens are if only
    the first is real. STAR reads the empty text.
    """
    if family in tiny.CLASS_FAMILIES:
        return -1
    if family == "hart":
        return TextFeatures((torch.zeros(tiny.HART_TEXT, tiny.TEXT_CHANNELS),), mask=torch.arange(tiny.HART_TEXT)[None] < 1)
    pipeline = tiny.shared_pipeline(family)
    return pipeline.reader.empty() or [pipeline.model.no_text[:length] for length in tiny.TEXT_LENGTHS]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_steering_away_from_no_prompt_is_the_default(family: str) -> None:
    tiny.assert_same_bits(drawn(family, negative=no_prompt(family)), drawn(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_number_of_negative_prompts_is_one_or_that_of_the_images(family: str) -> None:
    with pytest.raises(SettingError, match=r"one per image \(3\); got 2"):
        drawn(family, negative=picked(tiny.prompts(family, 3), [0, 1]))


# --- prompts


@pytest.mark.parametrize("family", tiny.CLASS_FAMILIES)
def test_minus_one_is_no_class(family: str) -> None:
    """Guidance then mixes equal branches, whatever its strength."""
    pipeline = tiny.shared_pipeline(family)
    unconditional = pipeline([-1, -1], seed=5)
    assert tiny.same_codes(unconditional.codes, pipeline([-1, -1], seed=5, guidance=0).codes)
    tiny.assert_same_bits(unconditional, pipeline([tiny.CLASSES, -7], seed=5))
    assert not tiny.same_codes(unconditional.codes, pipeline([tiny.CLASSES - 1, -1], seed=5).codes)


@pytest.mark.parametrize("labels", [torch.tensor([3, 7]), (3, 7), [3, 7]], ids=str)
def test_classes_come_as_lists_or_tensors(labels: Any) -> None:
    tiny.assert_same_bits(tiny.shared_pipeline("var")(labels, seed=5), drawn("var", images=2))


@pytest.mark.parametrize("label", [tiny.CLASSES + 1, 1000, 1.0, True, "3", None, [1, "cat"], [[1]], torch.tensor([0.5])], ids=str)
def test_impossible_classes_are_refused(label: Any) -> None:
    with pytest.raises(PromptError, match="an int from 0 to 9, or -1 for no class"):
        tiny.shared_pipeline("var")(label, seed=5)
    with pytest.raises(PromptError, match="an int from 0 to 9, or -1 for no class"):
        tiny.shared_pipeline("var")(1, negative=[label] if not isinstance(label, list) else label, seed=5)


def test_no_class_at_all_is_refused() -> None:
    with pytest.raises(PromptError, match="classes must be one number per image"):
        tiny.shared_pipeline("var")([], seed=5)


@pytest.mark.parametrize("family", [family for family in tiny.TEXT_FAMILIES if family not in tiny.STAR_FAMILIES])
def test_text_features_come_in_several_shapes(family: str) -> None:
    """Without a mask, all tokens are real. STAR's features are more than tokens: see test_star."""
    pipeline = tiny.shared_pipeline(family)
    features = tiny.text_features(family, (tiny.HART_TEXT, tiny.HART_TEXT))
    stacked = torch.stack(features.rows)
    expected = pipeline(features, seed=5)
    tiny.assert_same_bits(pipeline(stacked, seed=5), expected)
    tiny.assert_same_bits(pipeline(list(features.rows), seed=5), expected)
    tiny.assert_same_bits(pipeline(stacked[0], seed=5), pipeline(features.one(0), seed=5))


@pytest.mark.parametrize("family", tiny.TEXT_FAMILIES)
@pytest.mark.parametrize("lengths", [(1, 24, 8), (8, 16, 7), (5, 5, 6)])
def test_texts_of_different_length_do_not_disturb_one_another(family: str, lengths: tuple[int, ...]) -> None:
    pipeline = tiny.shared_pipeline(family)
    features = tiny.text_features(family, lengths, seed=4)
    together = pipeline(features, seed=5)
    for image in range(len(lengths)):
        alone = pipeline(features.one(image), seed=5 + image)
        tiny.assert_close(family, tiny.one_image(together, image), alone)


@pytest.mark.parametrize("family", tiny.TEXT_FAMILIES)
def test_every_token_of_a_text_counts(family: str) -> None:
    """Cutting off the sixth and last, or changing it. HART's text is cut by the mask: its padding is read as well."""
    pipeline = tiny.shared_pipeline(family)
    six = tiny.text_features(family, (6,))
    (row,) = six.rows
    five = replace(six, rows=(row[:5],)) if six.mask is None else replace(six, mask=tiny.text_features(family, (5,)).mask)
    other_end = replace(six, rows=(torch.cat([row[:5], -row[5:6], row[6:]]),))
    seen = []
    for text in (six, five, other_end):
        pipeline(text, seed=5, on_stage=lambda preview: seen.append(preview.done.logits) if preview.done.stage.index == 0 else None)
    whole, cut, changed = seen
    assert min((whole - cut).abs().max(), (whole - changed).abs().max(), (cut - changed).abs().max()) > 1e-2


@pytest.mark.parametrize("family", ["infinity", "hart", "star"])
@pytest.mark.parametrize("prompt", [[], None, (), 3, {}])
def test_prompts_that_are_no_text_are_refused(family: str, prompt: Any) -> None:
    with pytest.raises(PromptError, match="prompt must be a string, a list of strings or text features"):
        tiny.shared_pipeline(family)(prompt, seed=5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, tiny.TEXT_CHANNELS), r"\[0, 256\]"),
        ((4, 7), "got 7"),
        ((tiny.LONGEST_TEXT + 1, tiny.TEXT_CHANNELS), "at most 24 tokens"),
        ((4,), r"\[4\]"),
    ],
)
def test_features_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str) -> None:
    pipeline = tiny.shared_pipeline("infinity")
    with pytest.raises(PromptError, match=message):
        pipeline(torch.ones(shape), seed=5)
    with pytest.raises(PromptError, match=message):
        pipeline(torch.ones(4, tiny.TEXT_CHANNELS), negative=torch.ones(shape), seed=5)


@pytest.mark.parametrize("family", tiny.TEXT_FAMILIES)
def test_features_that_are_not_finite_are_refused(family: str) -> None:
    features = tiny.text_features(family, (4,))
    features.rows[0][-1, -1] = float("nan")
    with pytest.raises(PromptError, match="NaN or infinity"):
        tiny.shared_pipeline(family)(features, seed=5)


@pytest.mark.parametrize("family", tiny.TEXT_FAMILIES)
def test_a_random_pipeline_reads_texts(family: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    texts = ["a cat", "a cat on a mat"]
    together = pipeline(texts, seed=5)
    for image, text in enumerate(texts):
        tiny.assert_close(family, tiny.one_image(together, image), pipeline(text, seed=5 + image))
    assert not tiny.close_codes(family, together.codes, pipeline(texts[::-1], seed=5).codes)


# --- previews and revisions


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_previews_decode_at_every_stage_and_end_with_the_image(family: str) -> None:
    previews: list[tuple[Preview, list[Any]]] = []
    output = drawn(family, images=2, on_stage=lambda preview: previews.append((preview, preview.images())))
    schedule = tiny.schedule_of(family)
    assert [preview.done.stage for preview, _ in previews] == list(schedule)
    for (preview, images), stage in zip(previews, schedule, strict=True):
        height, width = stage.size if family == "flexvar" else schedule.grid
        pixels = tiny.shared_pipeline(family).tokenizer.pixels_per_token
        assert [image.size for image in images] == [(pixels * width, pixels * height)] * 2
        assert not preview.done.skipped
        assert preview.done.codes.shape[:2] == (2, stage.cells)
        assert preview.done.rows == 4
    assert [image.tobytes() for image in previews[-1][1]] == [image.tobytes() for image in output.images]
    assert previews[-2][1][0].tobytes() != previews[-1][1][0].tobytes()
    tiny.assert_same_bits(drawn(family, images=2), output)  # looking changes nothing


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_previews_can_be_looked_at_later(family: str) -> None:
    previews: list[tuple[Preview, bytes]] = []
    drawn(family, on_stage=lambda preview: previews.append((preview, preview.images()[0].tobytes())))
    assert [preview.images()[0].tobytes() for preview, _ in previews] == [then for _, then in previews]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_previews_show_skipped_stages_as_skipped(family: str) -> None:
    done = []
    drawn(family, method=SkipStages(1), on_stage=lambda preview: done.append((preview.done, preview.images())))
    assert [stage.skipped for stage, _ in done] == [False] * (len(done) - 1) + [True]
    skipped = done[-1][0]
    assert (skipped.tokens, skipped.logits, skipped.ids, skipped.codes, skipped.rows) == (None, None, None, None, 0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_images_are_what_the_pixels_say(family: str) -> None:
    output = drawn(family, images=1)
    (image,) = output.images
    expected = ((output.pixels[0].clamp(-1, 1) + 1) / 2 * 255).floor().byte()
    assert np.array_equal(np.asarray(image), expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_codes_can_be_revised_before_they_are_drawn(family: str) -> None:
    """A forced prefix of another run: its stages are that run's, and the later ones follow from them."""
    other = drawn(family, seed=99)
    offered = []

    def forced(stage: Stage, codes: Tensor) -> Tensor:
        offered.append(codes)
        return other.codes[stage.index] if stage.index < 2 else codes

    output = drawn(family, revise=forced)
    free = drawn(family)
    assert tiny.same_codes(output.codes[:2], other.codes[:2])
    assert torch.equal(offered[0], free.codes[0])
    assert not tiny.close_codes(family, output.codes[:1], free.codes[:1])
    assert tiny.same_codes(output.codes[2:], offered[2:])
    assert not tiny.close_codes(family, offered[2:3], free.codes[2:3])
    tiny.assert_same_bits(drawn(family, revise=lambda stage, codes: codes), free)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_preview_tells_what_was_drawn_and_what_was_put_on_the_canvas(family: str) -> None:
    seen = []
    drawn(family, smooth=False, revise=lambda stage, codes: torch.zeros_like(codes), on_stage=lambda preview: seen.append(preview.done))
    free = drawn(family, smooth=False)
    assert torch.equal(seen[0].ids, free.codes[0])
    assert all((done.codes == 0).all() for done in seen)


# --- sampling settings


@pytest.mark.parametrize("family", ["var", "var_shared", "hart", "star"])
def test_smoothing_draws_mixtures_of_codes(family: str) -> None:
    ids: list[Tensor] = []
    smooth = drawn(family, smooth=True, on_stage=lambda preview: ids.append(preview.done.ids))
    for codes, numbers, stage in zip(smooth.codes, ids, tiny.schedule_of(family), strict=True):
        assert codes.shape == (3, stage.cells, tiny.CODES)
        assert torch.allclose(codes.sum(-1), torch.ones(()))
        assert numbers.shape == (3, stage.cells)
    largest_share = smooth.codes[0].amax(-1)
    assert largest_share.min() < 0.99  # others may be as good as single codes
    tiny.assert_same_bits(smooth, drawn(family, smooth=True))
    alone = tiny.shared_pipeline(family)(tiny.one_prompt(family, 1), seed=6, smooth=True)
    tiny.assert_close_pixels(family, smooth.pixels[1], alone.pixels[0])


def test_hart_is_smooth_by_default() -> None:
    tiny.assert_same_bits(drawn("hart"), drawn("hart", smooth=True))
    assert not any(codes.is_floating_point() for codes in drawn("hart", smooth=False).codes)


class Ones:
    """Noise of 1 is a Gumbel term of 0."""

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.ones(tuple(shape), device=device)

    uniform = normal = exponential


@pytest.mark.parametrize(
    ("family", "places"), [("var", (0, 1 / 3, 2 / 3, 1)), ("star", (0, 1 / 3, 2 / 3, 1)), ("hart", (0, 1 / 3, 2 / 3, 2 / 3))]
)
def test_smoothing_follows_the_place_of_a_stage_in_its_schedule(family: str, places: tuple[float, ...]) -> None:
    """Without noise the formula of `gumbel_softmax` is left, with HART's last stage in the place of the one before."""
    done = []
    drawn(family, seed=Ones(), smooth=True, top_k=0, top_p=0.0, on_stage=lambda preview: done.append(preview.done))
    for stage, progress in zip(done, places, strict=True):
        tau = 0.27 * (1 - 0.95 * progress)
        assert torch.allclose(stage.codes, (stage.logits * (1 + progress) / tau).softmax(-1), atol=1e-4)


@pytest.mark.parametrize("family", ["flexvar", "infinity", "infinity_patchify"])
def test_smoothing_needs_a_codebook_that_mixes(family: str) -> None:
    name = tiny.SPECS[family].name
    with pytest.raises(SettingError, match=f"smooth mixes entries of a codebook; {name} does not"):
        drawn(family, smooth=True)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_unknown_settings_are_refused(family: str) -> None:
    with pytest.raises(SettingError, match=r"unknown setting temprature: did you mean temperature\?"):
        drawn(family, temprature=0.5)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("num_inference_steps", "skip:last=2"),
        ("generator", "torch.Generator"),
        ("strength", "pipe.edit"),
        ("guidence", "did you mean guidance"),
        ("negative_promt", "did you mean negative_prompt"),
        ("unheard", "a call takes aspect, "),
    ],
)
def test_words_of_other_libraries_are_answered(name: str, advice: str) -> None:
    with pytest.raises(SettingError, match=f"unknown setting {name}: .*{advice}"):
        tiny.shared_pipeline("var")(3, **{name: 1})


def test_words_of_diffusers_are_known() -> None:
    pipeline = tiny.shared_pipeline("var")
    own = pipeline([3, 3, 7, 7], seed=4, guidance=3, negative=1)
    tiny.assert_same_bits(pipeline([3, 7], seed=4, guidance_scale=3, negative_prompt=1, num_images_per_prompt=2), own)
    assert pipeline(3, height=64, width=64).report.size == own.report.size
    with pytest.raises(SizeError, match="8x4"):
        pipeline(3, height=4, width=8)
    for wrong in ({"guidance": 3, "guidance_scale": 3}, {"height": 8}, {"num_images_per_prompt": 0}, {"size": 64, "height": 8, "width": 8}):
        with pytest.raises(SettingError, match="guidance_scale|height|num_images_per_prompt"):
            pipeline(3, **wrong)


def test_values_are_shown_in_one_line() -> None:
    pipeline = tiny.fresh_pipeline("var")
    assert repr(pipeline) == "Pipeline(tiny-var, cpu, float32)"
    pipeline.accelerate("skip:last=1")
    assert repr(pipeline) == "Pipeline(tiny-var, cpu, float32, SkipStages(last=1))"
    output = pipeline([3, 7], seed=1)
    shown = rf"8x8, SkipStages\(last=1\), \d+\.\d\d s, {output.report.cost_share:.0%} of dense MACs\)"
    assert re.fullmatch(rf"Output\(2 images, {shown}", repr(output))
    assert re.fullmatch(rf"Report\(tiny-var, {shown}", repr(output.report))
    assert repr(pipeline(3)).startswith("Output(1 image, ")


def test_the_version_is_that_of_the_package() -> None:
    assert nextscale.__version__ == version("nextscale")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_temperature_acts_at_its_stage(family: str) -> None:
    stages = len(tiny.schedule_of(family))
    plain = drawn(family, temperature=1.0)
    hot = drawn(family, temperature=[1.0, 1.0, 50.0, 1.0, 1.0][:stages])
    assert tiny.same_codes(hot.codes[:2], plain.codes[:2])
    assert not tiny.close_codes(family, hot.codes[2:3], plain.codes[2:3])
    with pytest.raises(SettingError, match=rf"temperature must be one number, or one per stage \({stages}\); got 1 values"):
        drawn(family, temperature=[1.0])


@pytest.mark.parametrize("family", tiny.NUMBERED_FAMILIES)
def test_forbidden_codes_do_not_appear(family: str) -> None:
    free = drawn(family, smooth=False)
    used = tuple(sorted({code for codes in free.codes for code in codes.flatten().tolist()}))[:5]
    for settings in ({"smooth": False}, {"greedy": True}):
        output = drawn(family, suppressed_codes=used, **settings)
        assert not {*used} & {code for codes in output.codes for code in codes.flatten().tolist()}


@pytest.mark.parametrize(("family", "suppressed_codes"), [("infinity", (1,)), ("var", (tiny.CODES,)), ("var", (-1,))])
def test_forbidden_codes_must_exist(family: str, suppressed_codes: tuple[int, ...]) -> None:
    with pytest.raises(SettingError):
        drawn(family, suppressed_codes=suppressed_codes)


def test_flexvars_untrained_sides_are_greedy() -> None:
    """Stages 3 (above the widest drawn side) and 4 (side 7) take the likeliest code; the ones before are drawn."""
    greedy_stages = []
    drawn("flexvar", on_stage=lambda preview: greedy_stages.append(torch.equal(preview.done.ids, preview.done.logits.argmax(-1))))
    assert greedy_stages == [False, False, False, True, True]


# --- sizes


def test_infinitys_book_serves_a_request() -> None:
    pipeline = tiny.fresh_pipeline("infinity", schedules=InfinitySchedules("0.06M"))
    output = pipeline(tiny.one_prompt("infinity", 0), seed=5, aspect="16:9")
    assert [(stage.height, stage.width) for stage in output.report.stages] == [(1, 1), (2, 2), (3, 3), (4, 7), (6, 11), (8, 14), (12, 21)]
    assert output.report.size == (12 * tiny.CELL_PIXELS, 21 * tiny.CELL_PIXELS)
    assert output.images[0].size == (21 * tiny.CELL_PIXELS, 12 * tiny.CELL_PIXELS)


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if not family.startswith("var")])
def test_any_schedule_can_be_written_out(family: str) -> None:
    own = Schedule((1, (2, 3), (5, 4)))
    output = drawn(family, size=own)
    pixels = tiny.shared_pipeline(family).tokenizer.pixels_per_token
    assert output.pixels.shape == (3, 3, 5 * pixels, 4 * pixels)
    assert [codes.shape[1] for codes in output.codes] == [1, 6, 20]
    alone = tiny.shared_pipeline(family)(tiny.one_prompt(family, 1), seed=6, size=own)
    tiny.assert_close(family, tiny.one_image(output, 1), alone)


def test_var_has_positions_for_its_own_schedule_only() -> None:
    with pytest.raises(SizeError, match=r"Schedule\(1x1 2x2 3x3 4x4\).*got Schedule\(1x1 2x2 3x3\)"):
        drawn("var", size=Schedule((1, 2, 3)))
    with pytest.raises(SizeError, match="Nearest: 64x64"):
        drawn("var", size=128)


@pytest.mark.parametrize(("family", "levels"), [("infinity", 15), ("star", 4), ("star_refined", 4)])
def test_schedules_longer_than_the_levels_are_refused(family: str, levels: int) -> None:
    with pytest.raises(SizeError, match="schedule must have"):
        drawn(family, size=Schedule((1,) * (levels + 1)))
    assert len(drawn(family, size=Schedule((1,) * levels)).codes) == levels


# --- reports


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_report_tells_what_happened(family: str) -> None:
    pipeline, schedule = tiny.shared_pipeline(family), tiny.schedule_of(family)
    output = drawn(family, method=SkipStages(1))
    report = output.report
    assert report.model == tiny.SPECS[family].name
    assert (report.device, report.dtype) == ("cpu", "float32")
    assert report.seeds == (5, 6, 7)
    assert report.size == tuple(output.pixels.shape[2:])
    assert [(stage.index, stage.height, stage.width) for stage in report.stages] == [(s.index, *s.size) for s in schedule]
    text = tiny.HART_TEXT - 1 if family == "hart" else 0  # runs before the first stage's token
    ran = [0 if stage.last else stage.cells for stage in schedule]
    assert [stage.tokens for stage in report.stages] == [text + ran[0], *ran[1:]]
    assert [stage.computed for stage in report.stages] == ran
    assert [stage.rows for stage in report.stages] == [0 if stage.last else 6 for stage in schedule]
    plans = SkipStages(1).forecast(pipeline.model, schedule)
    assert report.planned_memory == reserved_bytes(pipeline.model, schedule, plans, 3, 6, max(tiny.TEXT_LENGTHS))
    assert report.peak_memory > report.planned_memory  # the whole process on a CPU
    parts = [report.condition_seconds, report.decode_seconds, *(stage.seconds for stage in report.stages)]
    assert all(part >= 0 for part in parts)
    assert report.seconds == pytest.approx(sum(parts))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_planned_memory_follows_rows_dtype_and_size(family: str) -> None:
    """Keys and values alone: an image more, a branch more and wider numbers all cost in proportion. HART keeps its text like stages."""
    schedule = tiny.schedule_of(family)
    unguided = drawn(family, images=1, guidance=tiny.NO_GUIDANCE[family]).report.planned_memory
    before = tiny.HART_TEXT - 1 if family == "hart" else 0
    tokens = before + schedule.tokens + tiny.DEPTH * (before + schedule[-1].start)
    text_tokens = tiny.DEPTH * 8 if family in tiny.CROSS_ATTENTION_FAMILIES else 0  # five tokens, padded to eight
    assert unguided == 2 * tiny.WIDTH * 4 * (tokens + text_tokens)
    assert drawn(family, images=1).report.planned_memory == 2 * unguided
    same_prompt = tiny.shared_pipeline(family)(tiny.one_prompt(family, 0), seed=[1, 2, 3])
    assert same_prompt.report.planned_memory == 6 * unguided
    half = tiny.shared_pipeline(family, torch.bfloat16)(tiny.one_prompt(family, 0), seed=1)
    assert half.report.planned_memory == unguided  # twice the rows at half the size
    assert tiny.shared_pipeline(family).planned_memory(images=3, text_tokens=5) == 6 * unguided


@pytest.mark.parametrize("family", tiny.CROSS_ATTENTION_FAMILIES)
def test_the_longest_text_counts_also_among_the_negative_ones(family: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    per_token = 2 * tiny.DEPTH * 2 * tiny.WIDTH * 4
    short, long = tiny.text_features(family, (5,)), tiny.text_features(family, (17,))
    plain, against = (pipeline(short, seed=1, negative=negative).report.planned_memory for negative in (None, long))
    assert against - plain == (24 - 8) * per_token


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_report_tells_how_much_of_a_stage_went_into_codes_and_residual(family: str) -> None:
    for stage in drawn(family, method=SkipSecond()).report.stages:
        last = stage.index == len(tiny.schedule_of(family)) - 1
        assert (stage.sampling_seconds is not None) == (stage.index != 1)
        assert (stage.residual_seconds is not None) == (family == "hart" and last)
        assert 0 <= (stage.sampling_seconds or 0) + (stage.residual_seconds or 0) < stage.seconds


def test_maps_of_whole_stages_are_where_the_canvas_is() -> None:
    stage = Schedule((1, 2))[1]
    elsewhere: Any = SimpleNamespace(latent=torch.empty(2, 8, 2, 2, device="meta"))
    shown = mask_of(StageOutput(stage, elsewhere), batch=2)
    assert (shown.device.type, shown.shape) == ("meta", (2, 2, 2))


def test_reports_become_plain_values() -> None:
    report = drawn("var").report
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["seconds"] == report.seconds
    assert plain["stages"][2]["tokens"] == 9
    assert plain["seeds"] == [5, 6, 7]
    assert {"seconds", "sampling_seconds", "residual_seconds"} < plain["stages"][2].keys()


@pytest.mark.parametrize("guidance", [1e300, ConstantGuidance(strength=-1e300), [1e300] * 9, ConstantGuidance(strength=1e300)], ids=str)
def test_guidance_that_must_overflow_is_refused(guidance: Any) -> None:
    with pytest.raises(SettingError, match="guidance scales must be numbers from -10000 to 10000"):
        drawn("var", guidance=guidance)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
@pytest.mark.parametrize("filter_first", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_extreme_settings_that_are_taken_do_not_overflow(family: str, temperature: float, filter_first: bool) -> None:
    output = drawn(family, temperature=temperature, guidance=[LARGEST_SCALE] * 5, filter_first=filter_first)
    assert output.pixels.isfinite().all()


# --- logits that are not finite


def poisoned(family: str, parameter: str) -> Pipeline:
    pipeline = tiny.fresh_pipeline(family)
    pipeline.model.get_parameter(parameter).data.view(-1)[-1] = float("nan")  # of qkv, the values: torch's CPU attention hides NaN queries
    return pipeline


DRAWN_AND_GREEDY = pytest.mark.parametrize("settings", [{}, {"greedy": True}], ids=["drawn", "greedy"])


@pytest.mark.parametrize(
    ("family", "parameter"),
    [
        (family, parameter)
        for family in tiny.FAMILIES
        for parameter in ("head.weight", "blocks.1.attention.qkv.weight", "text_embed.bias" if family == "hart" else "pos_start")
    ],
)
@DRAWN_AND_GREEDY
def test_damaged_weights_are_noticed(family: str, parameter: str, settings: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteLogits, match="stage 0 of .*weights file is damaged"):
        poisoned(family, parameter)(tiny.prompts(family, 2), seed=5, **settings)


@pytest.mark.parametrize("parameter", ["residual_norm.weight", "residual_head.input_proj.weight", "residual_head.final.bias"])
@DRAWN_AND_GREEDY
def test_damage_in_the_diffusion_head_is_noticed(parameter: str, settings: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteLogits, match="stage 3 of 4.*weights file is damaged"):
        poisoned("hart", parameter)(tiny.prompts("hart", 2), seed=5, **settings)


@pytest.mark.parametrize("parameter", ["refiner.pos_start", "refiner.blocks.1.feed_forward.fc2.bias", "refiner.head.weight"])
@DRAWN_AND_GREEDY
def test_damage_in_the_refiner_is_noticed(parameter: str, settings: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteLogits, match="stage 2 of 4.*weights file is damaged"):
        poisoned("star_refined", parameter)(tiny.prompts("star_refined", 2), seed=5, **settings)


def test_the_first_stage_that_failed_is_named() -> None:
    pipeline = tiny.fresh_pipeline("var")
    pipeline.model.level_embed.weight.data[2, 0] = float("inf")
    with pytest.raises(NonFiniteLogits, match="stage 2 of 4"):
        pipeline(1, seed=5)


def test_the_first_stage_that_failed_is_named_when_an_earlier_one_was_skipped() -> None:
    pipeline = tiny.fresh_pipeline("var")
    pipeline.model.level_embed.weight.data[2, 0] = float("inf")
    with pytest.raises(NonFiniteLogits, match="stage 2 of 4"):
        pipeline(1, seed=5, method=SkipSecond())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_overflow_of_float16_is_noticed_and_bfloat16_advised(family: str) -> None:
    """Activations near 1e5: above float16's largest number, 65504, and harmless in the other types."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pipeline = tiny.fresh_pipeline(family, dtype)
        for layer in pipeline.model.blocks[1].feed_forward.children():
            layer.weight.data.mul_(400)
        if dtype == torch.float16:
            with pytest.raises(NonFiniteLogits, match="In float16 this is overflow.*bfloat16"):
                pipeline(tiny.prompts(family, 2), seed=5)
        else:
            assert pipeline(tiny.prompts(family, 2), seed=5).pixels.isfinite().all()


# --- memory


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_request_that_cannot_fit_is_refused_before_it_starts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny.shared_pipeline(family)
    need = drawn(family).report.planned_memory
    monkeypatch.setattr("nextscale.engine.memory.free_memory", lambda device, captured: need)
    drawn(family)
    monkeypatch.setattr("nextscale.engine.memory.free_memory", lambda device, captured: need - 1)
    monkeypatch.setattr(type(pipeline.model), "prompt_inputs", lambda *arguments: pytest.fail("the request was started"))
    with pytest.raises(OutOfMemory, match=r"GiB are free\. 3 image\(s\) of Schedule.*Generate fewer images"):
        drawn(family)


def test_where_the_system_does_not_tell_the_request_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.engine.memory.free_memory", lambda device, captured: None)
    assert drawn("var").report.engine == "eager"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize("part", ["model.blocks.1.feed_forward", "tokenizer.decoder"])
def test_running_out_on_the_way_is_explained(error: RuntimeError, part: str) -> None:
    pipeline = tiny.fresh_pipeline("var")
    owner, _, path = part.partition(".")

    def fail(*arguments: object) -> None:
        raise error

    getattr(pipeline, owner).get_submodule(path).register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemory, match=r"out of memory\. 2 image\(s\) of Schedule.*smaller dtype") as caught:
        pipeline([1, 2], seed=5)
    assert caught.value.__cause__ is error


def test_other_errors_pass_as_they_are() -> None:
    pipeline = tiny.fresh_pipeline("var")
    error = RuntimeError("something else")

    def fail(*arguments: object) -> None:
        raise error

    pipeline.model.head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="something else") as caught:
        pipeline(1, seed=5)
    assert caught.value is error


# --- names


@pytest.mark.parametrize(
    ("name", "meant"), [("var-d17", "var-d16"), ("flexvar_d24", "flexvar-d24"), ("Infinity-2B", "infinity-2b"), ("hart", "hart-0.7b")]
)
def test_an_unknown_model_suggests_a_known_one(name: str, meant: str) -> None:
    for ask in (nextscale.load, model_spec):
        with pytest.raises(UnknownModel, match=rf"unknown model '{name}'; did you mean .*{meant}.*\?") as caught:
            ask(name)
        assert all(known in str(caught.value) for known in MODELS)


def test_a_name_like_none_gets_the_list() -> None:
    with pytest.raises(UnknownModel, match=r"unknown model 'zzzzzzzzz'\. Known models: ") as caught:
        model_spec("zzzzzzzzz")
    assert all(known in str(caught.value) for known in MODELS)
    assert "did you mean" not in str(caught.value)
