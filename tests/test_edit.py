"""Editing: what stays outside a mask, what changes inside, and the same images alone, in batches and as captured graphs."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import nextscale
from nextscale import EditOptions, NearMask, Output, Pipeline, Preview
from nextscale.edit import Box, Edit, Paste, chosen, touched
from nextscale.edit_inputs import default_stage, filled, of_aspect, ramp, read_edit, read_image
from nextscale.errors import PromptError, SettingError, SizeError
from nextscale.io import from_levels, to_levels, to_pil
from nextscale.methods.strategy import Strategy
from nextscale.schedules import InfinitySchedules, SquareSchedules, infinity_stages
from nextscale.stage import Schedule, Stage, Tokens
from tests.helpers.tape import play_graphs_on_the_cpu
from tests.helpers.tiny import (
    CLASS_FAMILIES,
    FAMILIES,
    KINDS,
    assert_close,
    assert_same_bits,
    one_image,
    one_prompt,
    prompts,
    same_codes,
    schedule_of,
    shared_pipeline,
)

PLAIN = EditOptions(paste=False)


def size_of(family: str) -> tuple[int, int]:
    pixels = shared_pipeline(family).tokenizer.pixels_per_token
    return tuple(side * pixels for side in schedule_of(family).grid)  # type: ignore[return-value]


def images_of(family: str, count: int = 1, seed: int = 0) -> Tensor:
    """8-bit images: every pixel is in the middle of its level."""
    levels = torch.randint(0, 256, (count, 3, *size_of(family)), generator=torch.Generator().manual_seed(seed))
    return ((levels + 0.5) / 127.5 - 1).clamp(max=1)


def corner(family: str, share: float = 0.5) -> Tensor:
    """The mask of a corner, [H, W]."""
    height, width = size_of(family)
    mask = torch.zeros(height, width)
    mask[: round(share * height), : round(share * width)] = 1
    return mask


def outside(pixels: Tensor, mask: Tensor) -> Tensor:
    return to_levels(pixels)[..., mask == 0]


# --- the whole image, and nothing of it


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_mask_from_stage_0_is_plain_generation(family: str) -> None:
    pipe, prompt, image = shared_pipeline(family), one_prompt(family, 0), images_of(family)
    mask, options = torch.ones(size_of(family)), EditOptions(feather=3)
    assert_same_bits(pipe.edit(image, prompt, mask=mask, seed=3, options=options), pipe(prompt, seed=3))


@pytest.mark.parametrize("method", ["skip:last=1", "skip:stages=[2]", "sparsevar:keep=0.5,first_stage=none", "fastvar:ratios={3: 0.4}"])
@pytest.mark.parametrize("family", KINDS)
def test_a_full_mask_is_plain_generation_with_a_method(family: str, method: str) -> None:
    pipe, prompt, image = shared_pipeline(family), one_prompt(family, 1), images_of(family)
    ours = pipe.edit(image, prompt, mask=torch.ones(size_of(family)), seed=3, method=method)
    theirs = pipe(prompt, seed=3, method=method)
    if family == "hart" and method.startswith("skip:last"):
        return  # without the last stage plain generation ends with codes, and so does the inside of the mask
    assert torch.equal(ours.latent, theirs.latent)
    assert torch.equal(ours.pixels, theirs.pixels)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_mask_returns_the_image(family: str) -> None:
    pipe, image, schedule = shared_pipeline(family), images_of(family), schedule_of(family)
    with pytest.warns(UserWarning, match="selects nothing"):
        found = pipe.edit(image, one_prompt(family, 0), mask=torch.zeros(size_of(family)), seed=3)
        decoded = pipe.edit(image, one_prompt(family, 0), mask=torch.zeros(size_of(family)), seed=3, options=PLAIN)
    assert torch.equal(to_levels(found.pixels), to_levels(image))
    assert found.report.edit is not None and found.report.edit.from_stage == (len(schedule) - 1,)
    source = source_latent(pipe, from_levels(to_levels(image)), schedule)
    assert torch.equal(decoded.latent, source)
    with torch.inference_mode():
        assert torch.equal(decoded.pixels, pipe.tokenizer.decode(source))


@torch.inference_mode()
def source_latent(pipe: Pipeline, image: Tensor, schedule: Schedule) -> Tensor:
    """What remains of an image that is encoded and not changed: HART completes its codes to the continuous latent."""
    features = pipe.tokenizer.features(image)
    canvas = pipe.tokenizer.canvas(schedule, len(image))
    for stage, codes in zip(schedule, pipe.tokenizer.quantize(features, schedule), strict=True):
        canvas.add(codes, Tokens(stage))
    return features if pipe.model.adds_residual else canvas.latent


# --- outside the mask


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_changes_outside_the_mask(family: str) -> None:
    pipe, image, mask, schedule = shared_pipeline(family), images_of(family), corner(family), schedule_of(family)
    options = EditOptions(from_stage=1, grow=1, fill="original")
    found = pipe.edit(image, one_prompt(family, 0), mask=mask, seed=3, options=options)
    grown = torch.nn.functional.max_pool2d(mask[None], 3, stride=1, padding=1)[0]
    assert torch.equal(outside(found.pixels, grown), outside(image, grown))
    assert not torch.equal(to_levels(found.pixels), to_levels(image))
    source = source_latent(pipe, from_levels(to_levels(image)), schedule)
    gate = touched(grown[None, None], tuple(source.shape[2:])).expand_as(source)
    assert torch.equal(found.latent[~gate], source[~gate])
    assert not torch.equal(found.latent[gate], source[gate])


def test_pixels_stay_the_same_through_files_and_five_turns() -> None:
    pipe, (height, width) = shared_pipeline("infinity"), size_of("infinity")
    first = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))
    mask, image = Image.new("1", (width, height)), first
    mask.paste(1, (0, 0, 3, 3))
    for turn in range(5):
        file = io.BytesIO()
        pipe.edit(image, one_prompt("infinity", 0), mask=mask, seed=turn).images[0].save(file, "PNG")
        image = Image.open(file)
        image.load()
    kept = ~np.asarray(mask)
    assert np.array_equal(np.asarray(image)[kept], np.asarray(first)[kept])
    assert not np.array_equal(np.asarray(image), np.asarray(first))


def test_every_level_survives_a_paste() -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    weight = torch.zeros(1, 1, 16, 16)
    weight[..., 8:, :] = 1
    own = torch.rand(1, 3, 16, 16) * 3 - 1.5
    pasted = Paste(levels, weight, (Box(0, 0, 16, 16),))(own)
    assert torch.equal(to_levels(pasted)[..., :8, :], levels[..., :8, :])
    assert torch.equal(pasted[..., 8:, :], own[..., 8:, :])
    half = Paste(levels, torch.full((1, 1, 16, 16), 0.5), (Box(0, 0, 16, 16),))(from_levels(torch.zeros(1, 3, 16, 16)))
    assert (to_levels(half).float() - levels.float() / 2).abs().max() <= 0.5


def test_tensors_of_levels_are_those_levels() -> None:
    """`to_levels` alone would lower 63 of 256 levels by one."""
    levels = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 16, 16)
    assert torch.equal(read_image(from_levels(levels))[0], levels[0])
    assert torch.equal(read_image((levels.float() / 255) * 2 - 1)[0], levels[0])


def test_an_edit_around_the_mask_keeps_the_images_own_size() -> None:
    pipe, rng = shared_pipeline("infinity"), np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8))
    mask = Image.new("L", image.size)
    mask.paste(255, (20, 9, 25, 15))
    found = pipe.edit(image, one_prompt("infinity", 0), mask=mask, seed=1, options=EditOptions(padding_mask_crop=2, grow=1))
    changed = np.asarray(found.images[0]) != np.asarray(image)
    rows, columns = np.nonzero(changed.any(axis=2))
    assert found.images[0].size == image.size
    assert rows.min() >= 8 and rows.max() < 16 and columns.min() >= 19 and columns.max() < 26 and changed.any()


def test_a_box_grows_to_the_aspect_ratio_inside_the_frame() -> None:
    assert of_aspect(Box(10, 10, 20, 20), (64, 128), (40, 40)) == Box(10, 5, 20, 25)
    assert of_aspect(Box(0, 30, 10, 40), (64, 128), (40, 40)) == Box(0, 20, 10, 40)
    with pytest.raises(SizeError, match="box"):
        of_aspect(Box(0, 0, 40, 40), (64, 128), (40, 40))


# --- what is hidden stays hidden


@pytest.mark.parametrize("scale", [1, 3])
def test_hidden_pixels_change_nothing(scale: int) -> None:
    """Also where the image is resized."""
    pipe, (height, width) = shared_pipeline("infinity"), size_of("infinity")
    rng = np.random.default_rng(0)
    levels = rng.integers(0, 256, (scale * height, scale * width, 3), dtype=np.uint8)
    mask = Image.new("L", (scale * width, scale * height))
    mask.paste(255, (0, 0, scale * 4, scale * 4))
    other = np.where(np.asarray(mask)[..., None] > 0, rng.integers(0, 256, levels.shape, dtype=np.uint8), levels)
    ours, theirs = (pipe.edit(Image.fromarray(one), one_prompt("infinity", 0), mask=mask, seed=1) for one in (levels, other))
    assert_same_bits(ours, theirs)
    shown = EditOptions(fill="original")
    ours, theirs = (pipe.edit(Image.fromarray(one), one_prompt("infinity", 0), mask=mask, seed=1, options=shown) for one in (levels, other))
    assert not torch.equal(ours.latent, theirs.latent)


def test_a_hole_is_filled_from_its_surroundings() -> None:
    levels = torch.full((3, 16, 16), 200, dtype=torch.uint8)
    hole = torch.zeros(16, 16, dtype=torch.bool)
    hole[4:11, 2:16] = True
    levels[:, hole] = 7
    assert (filled(levels, hole) == 200).all()
    assert (filled(levels, torch.ones(16, 16, dtype=torch.bool)) == 128).all()


def test_the_ramp_lies_inside_the_mask() -> None:
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:, 32:] = True
    weight = ramp(mask, 16)
    assert (weight[:, :32] == 0).all() and (weight[:, 32] == 1 / 16).all() and (weight[:, 47:] == 1).all()
    assert torch.equal(ramp(mask, 0), mask.float())


# --- batches and captures


MASKS = (0.5, 1.0, 0.25)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_its_images_alone(family: str) -> None:
    pipe, images, masks = shared_pipeline(family), images_of(family, 3), [corner(family, share) for share in MASKS]
    many = pipe.edit(images, prompts(family, 3), mask=masks, seed=[4, 5, 6], options=PLAIN)
    assert many.report.edit is not None and len(set(many.report.edit.from_stage)) > 1
    for position, mask in enumerate(masks):
        alone = pipe.edit(images[position], one_prompt(family, position), mask=mask, seed=4 + position, options=PLAIN)
        ours = one_image(many, position)
        if family == "hart":  # an image whose stage is given has numbers there, and mixtures in company
            ours, alone = replace(ours, codes=()), replace(alone, codes=())
        assert_close(family, ours, alone)
    turned = pipe.edit(images.flip(0), reversed_prompts(family), mask=masks[::-1], seed=[6, 5, 4], options=PLAIN)
    assert_close(family, one_image(turned, 2), one_image(many, 0))


def reversed_prompts(family: str) -> Any:
    return prompts(family, 3)[::-1] if family in CLASS_FAMILIES else prompts(family, 3).take([2, 1, 0])


def test_one_image_serves_several_prompts_and_seeds() -> None:
    pipe, image, mask = shared_pipeline("infinity"), images_of("infinity"), corner("infinity")
    several = pipe.edit(image, one_prompt("infinity", 0), mask=mask, seed=[1, 2], options=PLAIN)
    assert len(pipe.edit(image, one_prompt("infinity", 0), mask=mask, seed=[1, 2]).images) == 2
    assert not torch.equal(several.pixels[0], several.pixels[1])
    assert_close("infinity", one_image(several, 1), pipe.edit(image, one_prompt("infinity", 0), mask=mask, seed=2, options=PLAIN))
    assert len(pipe.edit(images_of("infinity", 2), one_prompt("infinity", 0), mask=mask, seed=1).images) == 2
    assert len(pipe.edit(image, one_prompt("infinity", 0), mask=[mask, corner("infinity", 1.0)], seed=1).images) == 2


@pytest.mark.parametrize("family", KINDS)
def test_captured_edits_serve_other_images_masks_and_smaller_batches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    eager, options = shared_pipeline(family), EditOptions(from_stage=1, paste=False)
    graphs = Pipeline(eager.model, eager.tokenizer, eager.reader, eager.settings, eager.name, engine="graphs")
    monkeypatch.setattr("nextscale.engine.captures.Captures._larger_batch", lambda self, key, request: larger(self, key))
    eager = Pipeline(eager.model, eager.tokenizer, eager.reader, eager.settings, eager.name, engine="eager")
    images, masks = images_of(family, 2), [corner(family, 0.5), corner(family, 0.7)]
    first = graphs.edit(images, prompts(family, 2), mask=masks, seed=[1, 2], options=options, warmup=True)
    assert first.report.engine == "graphs" and "NearMask" in first.report.method
    others, moved = images_of(family, 2, seed=9), [corner(family, 0.3).flip(0), corner(family, 0.6).flip(1)]
    for count in (2, 1):
        call: dict[str, Any] = {"seed": [7, 8][:count], "options": options}
        prompt = prompts(family, 2) if count == 2 else one_prompt(family, 0)
        found = graphs.edit(others[:count], prompt, mask=moved[:count], **call)
        expected = eager.edit(others[:count], prompt, mask=moved[:count], **call)
        assert (found.report.engine, found.report.captured_batch) == ("graphs", 2)
        assert_close(family, found, expected)


def larger(captures: Any, key: Any) -> Any:
    """The first capture that has room for the request, however long it takes."""
    return next((known for known in captures._captures if known.serves(key)), None)


# --- NearMask


@pytest.mark.parametrize("family", KINDS)
def test_a_margin_that_covers_the_grid_changes_nothing(family: str) -> None:
    pipe, image, mask = shared_pipeline(family), images_of(family), corner(family)
    near, wide = (
        pipe.edit(image, one_prompt(family, 0), mask=mask, seed=3, method=method, options=options)
        for method, options in ((None, EditOptions(near_mask=False, from_stage=1)), ("nearmask:margin=9", EditOptions(from_stage=1)))
    )
    assert "NearMask" in wide.report.method and near.report.method == "dense"
    assert_same_bits(near, wide)


@pytest.mark.parametrize("family", KINDS)
def test_cells_that_the_mask_does_not_touch_hold_the_codes_of_the_image(family: str) -> None:
    pipe, image, mask = shared_pipeline(family), images_of(family), corner(family, 0.3)
    found = pipe.edit(image, one_prompt(family, 0), mask=mask, seed=3, method=NearMask(1, 0), options=EditOptions(from_stage=1))
    ran = [stage.tokens for stage in found.report.stages][1:]
    schedule = schedule_of(family)
    assert ran == [int(touched(mask[None, None], stage.size).sum()) for stage in schedule][1:]
    assert found.report.cost_share < 1
    with torch.inference_mode():
        hidden = filled(to_levels(image)[0], mask > 0)[None]
        source = pipe.tokenizer.encode(from_levels(hidden), schedule)
    for stage, ours, theirs in zip(schedule, found.codes, source, strict=True):
        away = ~touched(mask[None, None], stage.size).flatten(1)
        theirs = torch.nn.functional.one_hot(theirs, ours.shape[-1]).to(ours.dtype) if ours.is_floating_point() else theirs
        assert torch.equal(ours[away], theirs[away])


def square(share: float, side: int = 1024) -> Tensor:
    edge = round(side * share**0.5)
    mask, start = torch.zeros(1, 1, side, side), (side - edge) // 2
    mask[..., start : start + edge, start : start + edge] = 1
    return mask


def edit_of(mask: Tensor, schedule: Schedule, from_stage: int = 0) -> Edit:
    cells = tuple(touched(mask, stage.size) for stage in schedule)
    return Edit((), cells, cells[-1], torch.tensor([from_stage]))


def test_cells_near_a_mask_are_counted_as_by_hand() -> None:
    schedule = infinity_stages(1.0, 13)
    edit = edit_of(square(0.2), schedule)
    assert [int(edit.near(schedule[stage], 2).sum()) for stage in (10, 11, 12)] == [484, 676, 1156]
    assert [int(edit.near(schedule[stage], 0).sum()) for stage in (10, 11, 12)] == [18**2, 22**2, 30**2]
    assert edit_of(square(0.2), schedule, from_stage=11).near(schedule[10], 2).all()
    toy = edit_of((torch.arange(64) >= 32).float().expand(1, 1, 64, 64), Schedule([1, 2, 4]))
    assert toy.near(toy_stage := Schedule([1, 2, 4])[2], 1).view(4, 4)[0].tolist() == [False, True, True, True]
    assert int(toy.near(toy_stage, 1).sum()) == 12


def test_a_wider_margin_is_nearer_to_the_edit_of_all_cells() -> None:
    pipe = nextscale.load("nano", device="cpu")
    image = pipe("a red apple", seed=1, size=128).images[0]
    mask = Image.new("L", image.size)
    mask.paste(255, (20, 20, 70, 70))

    def edited(options: EditOptions = EditOptions(), margin: int | None = None) -> Output:  # noqa: B008
        return pipe.edit(image, "a green apple", mask=mask, seed=2, method=margin and NearMask(margin=margin), options=options)

    every = edited(EditOptions(near_mask=False))
    far, middle, near = (edited(margin=margin) for margin in (1, 2, 6))
    away = [float((one.pixels - every.pixels).abs().mean()) for one in (far, middle, near)]
    assert far.report.cost_share < middle.report.cost_share < near.report.cost_share < every.report.cost_share
    assert away[0] > away[2] and away[1] > away[2]


def test_near_mask_stands_aside_and_is_refused_by_name() -> None:
    pipe, image, mask, prompt = shared_pipeline("var"), images_of("var"), corner("var"), one_prompt("var", 0)
    found = pipe.edit(image, prompt, mask=mask, seed=1, method="sparsevar:keep=0.5")
    assert found.report.method == "SparseVAR(keep=0.5)" and str(found.report.selection_reason).startswith("without NearMask: ")
    with pytest.raises(SettingError, match="combined"):
        pipe.edit(image, prompt, mask=mask, seed=1, method="nearmask + sparsevar:keep=0.5")
    for method in ("dropguidance", "skip:last=1", "dropguidance + skip:stages=[2]"):
        combined = pipe.edit(image, prompt, mask=mask, seed=1, method=method)
        assert combined.report.method.startswith("NearMask + ")
        assert torch.equal(outside(combined.pixels, mask), outside(image, mask))
    with pytest.raises(SettingError, match=r"pipe\.edit"):
        pipe(prompt, seed=1, method="nearmask")
    quantized = nextscale.load("nano", device="cpu", quantize="int8")
    picture = Image.new("RGB", (128, 128), "white")
    report = quantized.edit(picture, "a red apple", mask=square(0.2, 128)[0], seed=1).report
    assert (report.quantize, report.method) == ("int8", "NearMask")


# --- the first stage that changes, and other rules


def test_the_first_stage_follows_from_the_mask() -> None:
    toy = Schedule([1, 2, 4])
    assert default_stage(torch.arange(64).expand(64, 64) >= 32, toy) == 2
    assert default_stage(torch.ones(64, 64), toy) == 0
    assert default_stage(torch.zeros(64, 64), toy) == 2
    schedule = infinity_stages(1.0, 13)
    found = [default_stage(square(share, 512)[0, 0] > 0, schedule) for share in (0.02, 0.05, 0.2, 0.4, 0.9)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


@pytest.mark.parametrize("turned", ["flip", "transpose"])
def test_a_mirrored_mask_has_the_mirrored_cells(turned: str) -> None:
    schedule = infinity_stages(1.0, 10)
    mask = torch.zeros(256, 256)
    mask[30:101, 17:202] = 1
    other = mask.flip(1) if turned == "flip" else mask.T
    assert default_stage(mask, schedule) == default_stage(other, schedule)
    ours, theirs = (edit_of(one[None, None].contiguous(), schedule) for one in (mask, other))
    for stage in schedule:
        cells = ours.near(stage, 1).view(stage.size)
        assert torch.equal(cells.flip(1) if turned == "flip" else cells.T, theirs.near(stage, 1).view(stage.size))


@pytest.mark.parametrize("family", KINDS)
def test_earlier_stages_keep_the_codes_of_the_image(family: str) -> None:
    pipe, image, schedule = shared_pipeline(family), images_of(family), schedule_of(family)
    found = pipe.edit(image, one_prompt(family, 0), seed=3, options=EditOptions(from_stage=len(schedule) - 1))
    source = pipe.tokenizer.encode(from_levels(to_levels(image)), schedule)
    assert same_codes(found.codes[:-1], source[:-1])
    if not found.codes[-1].is_floating_point():
        assert not torch.equal(found.codes[-1], source[-1])


@pytest.mark.parametrize("strength, stage", [(1.0, 0), (0.6, 1), (0.5, 2), (0.01, 3)])
def test_strength_skips_stages_as_diffusers_skips_steps(strength: float, stage: int) -> None:
    found = shared_pipeline("var").edit(images_of("var"), 3, seed=1, strength=strength).report.edit
    assert found is not None and found.from_stage == (stage,)


def test_the_notebooks_rule_through_revise_is_a_canvas_of_its_own() -> None:
    """VAR's notebook replaces the sampled codes outside the mask, at all stages: what it writes is what the canvas would hold."""
    pipe, image, schedule = shared_pipeline("var"), images_of("var"), schedule_of("var")
    source, mask = pipe.tokenizer.encode(image, schedule), corner("var")
    sampled: list[Tensor] = []

    def keep(stage: Stage, codes: Tensor) -> Tensor:
        sampled.append(codes)
        return torch.where(cells(stage), codes, source[stage.index])

    def cells(stage: Stage) -> Tensor:
        return touched(mask[None, None], stage.size).flatten(1)

    found = pipe(3, seed=5, revise=keep)
    with torch.inference_mode():
        canvas = pipe.tokenizer.canvas(schedule, 1)
        for stage, codes in zip(schedule, sampled, strict=True):
            ours, theirs = (canvas.grid(one, Tokens(stage)) for one in (codes, source[stage.index]))
            canvas.write(chosen(cells(stage).view(1, 1, *stage.size), ours, theirs), stage)
    assert torch.equal(found.latent, canvas.latent)


@pytest.mark.parametrize("family", CLASS_FAMILIES)
def test_class_models_edit_by_class_and_without_one(family: str) -> None:
    pipe, image, mask = shared_pipeline(family), images_of(family), corner(family)
    ours, theirs = (pipe.edit(image, label, mask=mask, seed=1, options=EditOptions(from_stage=0)) for label in (4, -1))
    assert not torch.equal(ours.latent, theirs.latent)


def test_previews_and_stages_are_pasted_too() -> None:
    for family in ("infinity", "flexvar"):
        pipe, image, mask, previews = shared_pipeline(family), images_of(family), corner(family), list[Preview]()
        found = pipe.edit(image, one_prompt(family, 0), mask=mask, seed=1, keep_stages=True, on_stage=previews.append)
        shown = [preview.images() for preview in previews]
        assert found.stages is not None and len(shown) == len(found.stages) == len(schedule_of(family))
        kept = (mask == 0).numpy()
        expected = np.asarray(to_pil(image)[0])[kept]
        for pictures in (*shown, *(found.stages.images(stage) for stage in range(len(shown))), found.stages.strip(0)):
            assert np.array_equal(np.asarray(pictures[0])[kept], expected)


# --- images and masks of all kinds


def test_an_expanded_image_is_painted_further() -> None:
    image = Image.new("RGB", (8, 8), "red")
    wide, mask = nextscale.expanded(image, left=4, bottom=2)
    assert wide.size == mask.size == (12, 10)
    assert wide.crop((4, 0, 12, 8)).tobytes() == image.tobytes()
    assert np.asarray(mask)[:8, 4:].max() == 0 and np.asarray(mask)[8:].min() == np.asarray(mask)[:, :4].min() == 255
    pipe = shared_pipeline("infinity")
    found = pipe.edit(wide.resize((24, 32)), one_prompt("infinity", 0), mask=mask.resize((24, 32), 0), seed=1)
    assert found.images[0].size == size_of("infinity")[::-1]


def test_alpha_is_read_only_where_that_is_said() -> None:
    pipe, image, size = shared_pipeline("infinity"), images_of("infinity"), size_of("infinity")[::-1]
    mask = Image.new("RGBA", size, (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 3, 3))
    with pytest.raises(SettingError, match="mask_from_alpha"):
        pipe.edit(image, one_prompt("infinity", 0), mask=mask)
    read = np.asarray(nextscale.mask_from_alpha(mask))
    assert (read[:3, :3] == 255).all() and read.sum() == 9 * 255
    with pytest.raises(SettingError, match="alpha"):
        nextscale.mask_from_alpha(Image.new("RGB", size))


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "I;16", "CMYK", "F"])
def test_images_of_all_modes_are_read(mode: str) -> None:
    image = Image.new("RGB", size_of("infinity")[::-1], "white")
    picture = Image.fromarray(np.full(size_of("infinity"), 65535, np.uint16)) if mode == "I;16" else image.convert(mode)
    with pytest.warns(UserWarning):
        found = shared_pipeline("infinity").edit(picture, one_prompt("infinity", 0), mask=torch.zeros(size_of("infinity")), seed=0)
    assert np.asarray(found.images[0]).min() == 255


def test_images_are_turned_as_their_camera_says() -> None:
    file, (height, width) = io.BytesIO(), size_of("infinity")
    picture = Image.new("RGB", (height, width), "white")  # lies on its side
    picture.paste("black", (0, 0, height, 2))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(file, "PNG", exif=exif)
    with pytest.warns(UserWarning):
        found = shared_pipeline("infinity").edit(Image.open(file), one_prompt("infinity", 0), mask=torch.zeros(size_of("infinity")), seed=0)
    assert np.asarray(found.images[0])[:, -2:].max() == 0 and np.asarray(found.images[0])[:, 0].min() == 255


def test_other_sizes_are_resized_and_cropped_a_little() -> None:
    def read(width: int, height: int, size: Any = None, schedules: Any = InfinitySchedules("0.06M", 8)) -> tuple[int, int]:  # noqa: B008
        inputs = read_edit(Image.new("RGB", (width, height)), None, None, EditOptions(), schedules, size, None, 8)
        assert inputs.size == inputs.levels.shape[2:] == tuple(8 * side for side in inputs.schedule.grid)
        return inputs.schedule.grid

    assert read(400, 300) == (27, 36)
    assert read(512, 512) == (64, 64)  # its own size
    assert read(520, 500, 256) == (32, 32)
    for width, height, size in ((400, 300, 128), (800, 100, None)):
        with pytest.raises(SizeError, match="cut off"):
            read(width, height, size)
    with pytest.raises(SizeError, match="cut off"):
        read(400, 300, None, SquareSchedules(((1, 2, 4),)))


BAD = [
    ({"mask": torch.full((8, 6), float("nan"))}, "mask"),
    ({"mask": torch.full((8, 6), 2.0)}, "mask"),
    ({"mask": torch.ones(5, 5)}, "mask"),
    ({"mask": torch.ones(2, 3, 8, 6)}, "mask"),
    ({"mask": [torch.ones(8, 6)] * 3, "image": torch.zeros(2, 3, 8, 6)}, "mask"),
    ({"mask": "mask.png"}, "mask"),
    ({"image": torch.full((1, 3, 8, 6), 3.0)}, "image"),
    ({"image": torch.zeros(1, 1, 8, 6)}, "image"),
    ({"image": "photo.png"}, "image"),
    ({"image": []}, "image"),
    ({"strength": 0}, "strength"),
    ({"strength": float("nan")}, "strength"),
    ({"strength": 0.5, "options": EditOptions(from_stage=1)}, "strength and from_stage"),
    ({"options": EditOptions(from_stage=4)}, "from_stage"),
    ({"options": EditOptions(padding_mask_crop=3)}, "padding_mask_crop"),
    ({"prefix_codes": ()}, "prefix_codes"),
    ({"revise": None}, "revise"),
]


@pytest.mark.parametrize("given, name", BAD, ids=[f"{number}-{name}" for number, (_, name) in enumerate(BAD)])
def test_what_does_not_fit_is_refused(given: dict[str, Any], name: str) -> None:
    given = {"image": torch.zeros(1, 3, 8, 6), "prompt": one_prompt("infinity", 0)} | given
    with pytest.raises(SettingError, match=name):
        shared_pipeline("infinity").edit(**given)


@pytest.mark.parametrize("given", [{"feather": -1}, {"grow": 1.5}, {"fill": "gray"}, {"paste": 1}, {"from_stage": True}])
def test_options_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(given))):
        EditOptions(**given)


def test_counts_of_images_and_prompts_have_to_fit() -> None:
    with pytest.raises(SettingError, match="image"):
        shared_pipeline("infinity").edit(images_of("infinity", 2), prompts("infinity", 3))
    with pytest.raises((SettingError, PromptError)):
        shared_pipeline("var").edit(images_of("var"), [])


def test_several_calls_are_no_edit() -> None:
    with pytest.raises(SettingError, match="single call"):
        shared_pipeline("var").edit(images_of("var"), 3, method=Strategy())
