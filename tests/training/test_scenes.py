"""Composed training pictures: colors have the right names, subjects are cut out and placed whole, captions say what is shown."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.schedules import INFINITY_SIZES
from training.colors import COLORS, WORDS, Look, Recoloring, look, to_oklab, to_rgb
from training.data import Pictures
from training.records import Record
from training.rules import looks, whole
from training.scenes import Mix, Scenes
from training.sheet import contact_sheet
from training.sprites import Sprites, cut_out
from training.tokenizer_settings import schedule_of
from training.wording import Wording, is_held, named

CPU = torch.device("cpu")
SIDE = 64
MIDDLE = slice(16, 48)
ALL = Mix(squares=1.0, plain=0.0, painted=1.0, named=1.0, backgrounds=1.0, pairs=0.5)


def rgb(word: str) -> Tensor:
    """A typical color of this name, [3, 1, 1] in [0, 1]."""
    color = COLORS[WORDS.index(word)]
    hue = torch.tensor(color.hue).deg2rad()
    lightness, chroma = sum(color.lightness) / 2, sum(color.chroma) / 2
    return to_rgb(torch.stack([torch.tensor(lightness), chroma * hue.cos(), chroma * hue.sin()])[None, :, None, None])[0]


def icon(word: str) -> Tensor:
    """A colored square with a dark outline and a white spot inside, on white, bytes."""
    image = torch.ones(3, SIDE, SIDE)
    image[:, MIDDLE, MIDDLE] = 0.1
    image[:, 17:47, 17:47] = rgb(word)
    image[:, 28:32, 28:32] = 1.0
    return (image * 255).round().to(torch.uint8)


def icons(words: Sequence[str], **more: str) -> Pictures:
    records = [
        Record(f"{i}.png", f"a flat icon of a kind{i}", style="flat", label=f"kind{i}", subject=f"a kind{i}", **more)
        for i in range(len(words))
    ]
    return Pictures(torch.stack([icon(word) for word in words]), records)


def scenes(mix: Mix = ALL, words: Sequence[str] = ("red", "blue", "green", "orange")) -> Scenes:
    return Scenes(Sprites({SIDE: icons(words)}, CPU), mix)


# --- colors


def test_oklab_is_the_published_one_and_goes_back() -> None:
    red = torch.tensor([1.0, 0.0, 0.0])[None, :, None, None]
    torch.testing.assert_close(to_oklab(red).flatten(), torch.tensor([0.6280, 0.2249, 0.1258]), atol=1e-3, rtol=0)
    image = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(to_rgb(to_oklab(image)), image, atol=1e-3, rtol=0)


def test_every_color_can_become_every_other() -> None:
    everywhere = torch.ones(1, 8, 8)
    for before in WORDS[:9]:  # those with a hue
        image = rgb(before).expand(1, 3, 8, 8)
        seen = look(image, everywhere)
        assert WORDS[int(seen.words())] == before
        for after in range(len(WORDS)):
            found = look(Recoloring.to_words(seen, torch.tensor([after]))(image), everywhere)
            assert int(found.words()) == after, f"{before} as {WORDS[after]} looks {WORDS[int(found.words())]}"
        kept = Recoloring.to_words(seen, torch.tensor([-1]))(image)
        torch.testing.assert_close(kept, image, atol=2e-2, rtol=0)


def test_recoloring_keeps_other_hues_and_the_shading() -> None:
    image = torch.cat([rgb("red").expand(3, 8, 8), 0.6 * rgb("red").expand(3, 8, 8), rgb("blue").expand(3, 8, 4)], dim=2)[None]
    seen = look(image, torch.ones(1, 8, 20))
    assert seen.share.item() > 0.7
    green = Recoloring.to_words(seen, torch.tensor([WORDS.index("green")]))(image)
    torch.testing.assert_close(green[..., 16:], image[..., 16:], atol=2e-2, rtol=0)
    bright, dark = (to_oklab(green)[0, 0, 0, place].item() for place in (2, 10))
    assert bright > dark + 0.1


# --- cutting out


def test_cut_out_keeps_white_inside_and_drops_white_outside() -> None:
    colors, opacity, pale = cut_out(icon("red")[None].float() / 255)
    assert opacity[0, 0, MIDDLE, MIDDLE].min() > 0.9 and opacity[0, 0, 30, 30] == 1.0  # the spot too
    opacity[0, 0, MIDDLE, MIDDLE] = 0
    assert opacity.max() == 0 and pale.item() < 0.1
    torch.testing.assert_close(colors[0, :, 40, 40], rgb("red").flatten(), atol=0.02, rtol=0)


def test_soft_edges_keep_their_color_on_any_background() -> None:
    image = torch.ones(1, 3, SIDE, SIDE)
    image[:, :, MIDDLE, MIDDLE] = rgb("blue")
    image[:, :, 15, MIDDLE] = (rgb("blue")[:, 0] + 1) / 2  # half covered
    colors, opacity, _ = cut_out(image)
    assert opacity[0, 0, 15, 30].item() == pytest.approx(0.5, abs=0.1)
    torch.testing.assert_close(colors[0, :, 15, 30], rgb("blue").flatten(), atol=0.06, rtol=0)


def test_pale_subjects_and_photos_stay_on_white() -> None:
    pictures = icons(["red", "red"])
    pictures.pixels[1] = 255
    pictures.pixels[1, :, MIDDLE, MIDDLE] = 235
    sprites = Sprites({SIDE: pictures}, CPU)
    assert sprites.facts.cut.tolist() == [True, False]
    assert Sprites({SIDE: Pictures(pictures.pixels[:1], [Record("0", "a photo", style="photo")])}, CPU).facts.photo.tolist() == [True]
    assert torch.equal(sprites.pixels[SIDE][1, :3], pictures.pixels[1])


def test_facts_of_sprites() -> None:
    facts = scenes().sprites.facts
    assert [WORDS[word] for word in facts.word.tolist()] == ["red", "blue", "green", "orange"]
    assert facts.paintable.all()
    torch.testing.assert_close(facts.box[0], torch.tensor([-0.5, -0.5, 0.5, 0.5]))
    assert not Sprites({SIDE: icons(["red"], group="People & Body")}, CPU).facts.paintable.any()


# --- scenes


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    it = scenes()
    first, again, other = (it.plan((64, 96), 12, seed) for seed in (1, 1, 2))
    assert first.captions == again.captions != other.captions
    assert torch.equal(it.draw(first), it.draw(again)) and it.draw(first).shape == (12, 3, 64, 96)


def test_plain_pictures_are_the_pictures_or_hardly_moved() -> None:
    it = scenes(Mix(plain=1.0))
    plan = it.plan((SIDE, SIDE), 40, 0)
    drawn = (it.draw(plan) + 1) / 2
    own = icons(["red", "blue", "green", "orange"]).pixels.float() / 255
    sprite, mirror = plan.layers[0].sprite, plan.layers[0].mirror
    expected = torch.where(mirror[:, None, None, None] < 0, own[sprite].flip(3), own[sprite])
    far = (drawn - expected).abs().amax((1, 2, 3))
    assert 8 <= (far < 0.02).sum() <= 32  # the others are shifted or zoomed
    assert all("background" not in caption for caption in plan.captions)


@pytest.mark.parametrize("template", [1.0, 0.333, 3.0, 1.5])
def test_subjects_are_whole_and_where_the_caption_says(template: float) -> None:
    it, schedule = scenes(Mix(plain=0.0, backgrounds=0.0, painted=0.0, pairs=0.5)), schedule_of(template, 128, 8)
    height, width = (8 * side for side in schedule.grid)
    plan = it.plan((height, width), 24, 3)
    drawn = it.draw(plan)
    there = (drawn < 0.9).any(1)  # [B, H, W]
    assert whole(drawn).all() and not whole(drawn[..., 20:]).all()
    assert not there[:, 0].any() and not there[:, -1].any() and not there[:, :, 0].any() and not there[:, :, -1].any()
    assert there.flatten(1).any(1).all()
    pairs = len(plan.layers[1].sprite)
    assert pairs == 12
    along = there.any(1) if width >= height else there.any(2)
    for row, caption in zip(along[:pairs], plan.captions, strict=False):
        half = len(row) // 2
        assert row[:half].any() and row[half:].any() and not row[half], caption
    assert all(caption.count("kind") == 2 for caption in plan.captions[:pairs])


def test_captions_name_the_colors_that_are_drawn() -> None:
    it = scenes(Mix(plain=0.0, painted=0.5, named=1.0, backgrounds=0.5, pairs=0.0))
    plan = it.plan((128, 128), 60, 5)
    checked = 0
    for image, caption, word in zip(it.draw(plan), plan.captions, plan.layers[0].word.tolist(), strict=True):
        found = WORDS[int(looks(image[None]).words())]
        said = caption.split(" background")[0].split(" kind")[0].split()[-1]
        if said not in WORDS:
            continue
        assert word == -1 or WORDS[word] == said
        checked += 1
        assert found == said, caption
    assert checked > 40


def test_held_pairs_are_never_drawn() -> None:
    held = [(label, word) for label in range(400) for word in WORDS if is_held(f"kind{label}", word)]
    assert 0.08 < len(held) / (400 * len(WORDS)) < 0.12
    it = scenes(Mix(plain=0.3, painted=1.0, pairs=0.5))
    for seed in range(20):
        plan = it.plan((64, 64), 16, seed)
        for layer in plan.layers:
            for sprite, word in zip(layer.sprite.tolist(), layer.word.tolist(), strict=True):
                assert word < 0 or not is_held(f"kind{sprite}", WORDS[word])


def test_photos_fill_every_canvas() -> None:
    pixels = torch.randint(0, 200, (2, 3, SIDE, SIDE), dtype=torch.uint8)
    it = Scenes(
        Sprites({SIDE: Pictures(pixels, [Record(f"{i}", "a photo of a hat", style="photo") for i in range(2)])}, CPU), Mix(pairs=0.9)
    )
    for size in ((64, 64), (32, 96), (96, 48)):
        plan = it.plan(size, 6, 0)
        assert it.draw(plan).amax(1).max() < 0.65  # no white anywhere
        assert set(plan.captions) == {"a photo of a hat"} and len(plan.layers) == 1


def test_a_mix_has_shares() -> None:
    with pytest.raises(SettingError, match=r"mix\.plain is a share, from 0 to 1; got 1\.5"):
        Mix(plain=1.5)


def test_a_contact_sheet_has_a_row_per_aspect_ratio() -> None:
    schedules = [schedule_of(template, 64, 8) for template in sorted(INFINITY_SIZES)[:3]]
    sheet = contact_sheet(scenes(), schedules, 8, 2, seed=0)
    assert sheet.width == 2 * (8 * schedules[0].grid[1] + 4)


# --- captions


def test_a_new_color_takes_the_place_of_the_old_one() -> None:
    chance = random.Random(0)
    assert named(Record("0", "", subject="a red apple"), "blue", chance) == "a blue apple"
    assert named(Record("0", "", subject="an apple"), "orange", chance) == "an orange apple"
    assert named(Record("0", "", subject="sunglasses"), "black", chance) == "black sunglasses"
    assert named(Record("0", "", subject="an orange"), "green", chance) == "a green orange"
    names = {named(Record("0", "", subject="a fox", alt="fox face"), None, chance) for _ in range(60)}
    assert names == {"a fox", "fox", "a fox face"}


def test_plain_captions_vary_in_wording_but_keep_the_subject() -> None:
    records = [
        Record("0", "a flat icon of a fox", style="flat", subject="a fox"),
        Record("1", "a fox emblem, flat", style="flat", subject="a fox emblem"),
        Record("2", "a photo of a shirt", style="photo", label="shirt", subject="a shirt", caption_color="a photo of a red shirt"),
    ]
    wording, chance = Wording(records), random.Random(0)
    assert wording.templates == {"flat": ["a flat icon of {}", "{}, flat"], "photo": ["a photo of {}"]}
    assert {wording.plain(records[0], chance) for _ in range(80)} == {
        "a flat icon of a fox",
        "a fox, flat",
        "a flat icon of fox",
        "fox, flat",
    }
    red = {wording.plain(records[2], chance) for _ in range(40)}
    assert ("a photo of a red shirt" in red) is not is_held("shirt", "red")


def test_looks_are_of_single_pictures() -> None:
    images = torch.stack([rgb("red").expand(3, 8, 8), rgb("blue").expand(3, 8, 8)])
    both, alone = look(images, torch.ones(2, 8, 8)), look(images[1:], torch.ones(1, 8, 8))
    assert all(torch.allclose(getattr(both, name)[1:], getattr(alone, name)) for name in Look.__dataclass_fields__)
