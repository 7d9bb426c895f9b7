"""Training pictures that are composed for every step: subjects recolored and placed whole, on canvases of any aspect ratio and color.

The host chooses the content and captions of a batch. The device draws it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import SettingError

from .colors import BLACK, COLORS, GRAY, WHITE, WORDS, Look, Recoloring, to_rgb
from .sprites import Sprites
from .wording import COLOR, Wording, is_held, named

MARGIN = 0.06  # from the frame to a subject, of half the shorter side
FADE = 0.4  # how far a photo is mirrored past its frame, of half its side; there it has faded into its blurred rim
BLURRED_CELLS = 5  # a side of a photo that is blurred
SHADES = {"": (0.0, 1.0), "light ": (0.16, 0.55), "dark ": (-0.2, 0.8)}  # change of lightness, factor of the chroma
PAIRED_WORDS = 8  # of a name, up to which captions have room for two
CLEAR = 50  # tries to find colors that differ


@dataclass(frozen=True)
class Mix:
    """Shares of kinds of training pictures, from 0 to 1."""

    squares: float = 0.4  # of the batches; others have one of the other aspect ratios
    plain: float = 0.5  # of the pictures on squares: as they are, or hardly moved
    painted: float = 0.6  # of the subjects with a single color that are composed: in another color
    named: float = 0.5  # of those that keep their color: the caption names it
    backgrounds: float = 0.4  # of composed pictures: a colored background
    pairs: float = 0.25  # of composed pictures: two subjects

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if not 0 <= share <= 1:
                raise SettingError(f"mix.{name} is a share, from 0 to 1; got {share!r}")


@dataclass(frozen=True)
class Layer:
    """Subjects, one per picture: numbers of sprites and where they are drawn, in halves of the canvas's shorter side."""

    sprite: Tensor  # [B]
    word: Tensor  # [B], place in WORDS of the new color; -1 keeps the colors
    center: Tensor  # [B, 2], x and y
    zoom: Tensor  # [B]
    turn: Tensor  # [B], radians
    mirror: Tensor  # [B], -1 or 1

    def to(self, device: torch.device) -> Layer:
        return Layer(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Plan:
    """A description of a batch of pictures; the second layer belongs to the first pictures."""

    size: tuple[int, int]  # height and width in pixels
    layers: tuple[Layer, ...]
    backdrop: Tensor  # [B, 2, 3], OKLab at the top and at the bottom
    captions: tuple[str, ...]


class Scenes:
    """Draws batches of composed pictures with their captions."""

    def __init__(self, sprites: Sprites, mix: Mix, compiled: bool = False) -> None:
        self.sprites, self.mix, self.wording = sprites, mix, Wording(sprites.records)
        facts = sprites.facts
        self._there = facts.to(sprites.device)
        # lists: planning asks for single ones thousands of times a second
        self._cut, self._paintable = facts.cut.tolist(), facts.paintable.tolist()
        self._word, self._looks, self._lightness = facts.word.tolist(), facts.seen.words().tolist(), facts.seen.lightness_of_all.tolist()
        short = torch.tensor([len(record.subject.split()) <= PAIRED_WORDS for record in sprites.records])
        self.paired = (facts.cut & short).nonzero().squeeze(1)
        styles = [record.style for record in sprites.records]
        self.of_style = {style: [index for index in self.paired.tolist() if styles[index] == style] for style in set(styles)}
        self.recolored: Callable[..., Tensor] = torch.compile(recolored, dynamic=True) if compiled else recolored

    def plan(self, size: tuple[int, int], count: int, seed: int) -> Plan:
        """Chooses the content of `count` pictures of a height and width. Equal seeds give equal content."""
        generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
        facts, mix, records = self.sprites.facts, self.mix, self.sprites.records
        square = size[0] == size[1]
        first = torch.randint(len(records), (count,), generator=generator)
        pairs = round(count * mix.pairs * (1 - mix.plain * square)) if len(self.paired) else 0
        if pairs:
            first[:pairs] = self.paired[torch.randint(len(self.paired), (pairs,), generator=generator)]
        plain = torch.rand(count, generator=generator) < mix.plain * square
        plain[:pairs] = False
        plain |= facts.photo[first]
        second = [self._other(index, chance) for index in first[:pairs].tolist()]
        captions, words, backdrops = [], torch.full((2, count), -1), torch.empty(count, 2, 3)
        stacked = size[0] > size[1]
        for place, index in enumerate(first.tolist()):
            shown = [index, second[place]] if place < pairs else [index]
            backdrops[place] = torch.tensor([1.0, 0.0, 0.0])
            if plain[place]:
                captions.append(self.wording.plain(records[index], chance))
                continue
            colors = [self._painted(one, chance) for one in shown]
            backdrop = ""
            if all(self._cut[one] for one in shown) and (chance.random() < mix.backgrounds or WHITE in colors):
                subject_lightness = [
                    sum(COLORS[color].lightness) / 2 if color >= 0 else self._lightness[one]
                    for color, one in zip(colors, shown, strict=True)
                ]
                taken = {color if color >= 0 else self._looks[one] for color, one in zip(colors, shown, strict=True)}
                backdrop, backdrops[place] = backdrop_of(taken, subject_lightness, chance)
            subjects = [self._subject(one, color, chance) for one, color in zip(shown, colors, strict=True)]
            captions.append(self.wording.composed(records[index].style, subjects, stacked, backdrop, chance))
            words[: len(colors), place] = torch.tensor(colors)
        layers = [self._placed(size, first, words[0], plain, pairs, 0, generator)]
        if pairs:
            layers.append(self._placed(size, torch.tensor(second), words[1, :pairs], plain[:pairs], pairs, 1, generator))
        return Plan(size, tuple(layers), backdrops, tuple(captions))

    def _other(self, index: int, chance: random.Random) -> int:
        """Another subject of the same style."""
        record = self.sprites.records[index]
        tries = [chance.choice(self.of_style[record.style]) for _ in range(3)]
        return next((one for one in tries if self.sprites.records[one].label != record.label), tries[-1])

    def _painted(self, index: int, chance: random.Random) -> int:
        """The place in WORDS of a subject's new color; -1 if it keeps its own."""
        label = self.sprites.records[index].label
        if not self._paintable[index] or chance.random() >= self.mix.painted:
            return -1
        free = [word for word in range(len(WORDS)) if word != self._word[index] and not is_held(label, WORDS[word])]
        free = free if self._cut[index] else [word for word in free if word != WHITE]
        return chance.choice(free)

    def _subject(self, index: int, color: int, chance: random.Random) -> str:
        record, own = self.sprites.records[index], self._word[index]
        if color < 0 and own >= 0 and chance.random() < self.mix.named:
            color = -1 if is_held(record.label, WORDS[own]) or COLOR.search(record.subject) else own
        return named(record, None if color < 0 else WORDS[color], chance)

    def _placed(
        self, size: tuple[int, int], sprite: Tensor, word: Tensor, plain: Tensor, pairs: int, part: int, generator: torch.Generator
    ) -> Layer:
        """Places subjects whole, inside the canvas or their half of it. Photos fill it or fade into their surroundings."""
        facts, count, short = self.sprites.facts, len(sprite), min(size)
        uniform = torch.rand(7, count, generator=generator)
        room = torch.tensor([size[1] / short, size[0] / short]).expand(count, 2).clone()  # half the canvas
        middle = torch.zeros(count, 2)
        axis = 0 if size[1] >= size[0] else 1
        room[:pairs, axis] /= 2
        middle[:pairs, axis] = (2 * part - 1) * room[:pairs, axis]
        box = facts.box[sprite]
        half, center = (box[:, 2:] - box[:, :2]) / 2, (box[:, 2:] + box[:, :2]) / 2
        turn = torch.where(uniform[0] < 0.4, (2 * uniform[1] - 1) * 0.25, 0.0)
        turn = turn.where(facts.mirrors[sprite], 0.0)
        mirror = torch.where(facts.mirrors[sprite] & (uniform[2] < 0.5), -1.0, 1.0)
        cosine, sine = turn.cos().abs(), turn.sin().abs()
        extent = torch.stack([half[:, 0] * cosine + half[:, 1] * sine, half[:, 0] * sine + half[:, 1] * cosine], 1)
        share = 0.6 + 0.3 * uniform[3]
        share[:pairs] = 0.75 + 0.15 * uniform[3, :pairs]
        zoom = share * room.amin(1) / extent.amax(1)
        zoom = zoom.minimum(((room - MARGIN).clamp(min=0.2) / extent).amin(1))
        free = (room - MARGIN - extent * zoom[:, None]).clamp(min=0)
        where = middle + free * 0.7 * (2 * uniform[4:6].T - 1)
        zoom, where = self._left_alone(
            size, plain & ~facts.photo[sprite], zoom, where, center * torch.stack([mirror, torch.ones(count)], 1), uniform
        )
        longest = max(size) / short
        slack = 1 + 0.1 * uniform[3]
        photo_zoom = slack if longest == 1 else longest ** (0.35 * uniform[3])
        photo = facts.photo[sprite]
        zoom, turn = photo_zoom.where(photo, zoom), turn.where(~photo & ~plain, 0.0)
        drift = (slack - 1)[:, None] * (2 * uniform[4:6].T - 1) if longest == 1 else torch.zeros(count, 2)
        # photos are placed by the middle of their frame, everything else by that of its box
        offset = center * torch.stack([mirror, torch.ones(count)], 1) * zoom[:, None]
        where = (drift + offset).where(photo[:, None], where)
        return Layer(sprite, word, where, zoom, turn, mirror)

    @staticmethod
    def _left_alone(
        size: tuple[int, int], plain: Tensor, zoom: Tensor, where: Tensor, own: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pictures as they are, half of them a little zoomed and shifted by whole pixels."""
        moved = uniform[6] < 0.5
        step = 2 / min(size)
        zoomed = torch.where(moved, 1 + 0.08 * (2 * uniform[3] - 1), 1.0)
        shift = ((2 * uniform[4:6].T - 1) * 0.1 / step).round() * step
        return zoomed.where(plain, zoom), (own * zoomed[:, None] + shift.where(moved[:, None], 0.0)).where(plain[:, None], where)

    def draw(self, plan: Plan) -> Tensor:
        """Pictures [B, 3, H, W] in [-1, 1] of a plan, float32, on the device of the sprites."""
        device, (height, width) = self.sprites.device, plan.size
        side = min(self.sprites.pixels, key=lambda side: abs(math.log(side / min(plan.size))))
        down = (torch.arange(height, device=device) + 0.5) / height
        ends = plan.backdrop.to(device, non_blocking=True)
        rows = torch.lerp(ends[:, 0, :, None], ends[:, 1, :, None], down)  # [B, 3, H]
        canvas = to_rgb(rows[..., None]).expand(-1, -1, -1, width).clone()
        for layer in (layer.to(device) for layer in plan.layers):
            count = len(layer.sprite)
            rgba = self.sprites.pixels[side][layer.sprite].float() / 255
            grid = self._grid(layer, plan.size)
            premultiplied = torch.cat([rgba[:, :3] * rgba[:, 3:], rgba[:, 3:]], 1)
            sampled = F.grid_sample(premultiplied, grid, padding_mode="reflection", align_corners=False)
            colors = (sampled[:, :3] / sampled[:, 3:].clamp(min=1e-3)).clamp(0, 1)
            colors = self.recolored(colors, *self._recoloring(layer))
            beyond = (grid.abs().amax(3) - 1)[:, None]  # how far outside the sprite a pixel is
            opacity = sampled[:, 3:] * (beyond <= 0)
            if height != width:
                photo = self._there.photo[layer.sprite][:, None, None, None]
                small = F.interpolate(rgba[:, :3], size=(BLURRED_CELLS, BLURRED_CELLS), mode="area")
                blurred = F.grid_sample(small, grid, padding_mode="border", align_corners=False)
                colors = torch.lerp(colors, blurred, (beyond / FADE).clamp(0, 1) * photo)
                opacity = opacity.maximum(photo.float())
            canvas[:count] = torch.lerp(canvas[:count], colors, opacity)
        return canvas * 2 - 1

    def _recoloring(self, layer: Layer) -> tuple[Tensor, ...]:
        seen = Look(**{name: values[layer.sprite] for name, values in vars(self._there.seen).items()})
        return tuple(vars(Recoloring.to_words(seen, layer.word)).values())

    def _grid(self, layer: Layer, size: tuple[int, int]) -> Tensor:
        """Returns the place in its sprite of every pixel of the canvas, [B, H, W, 2]. No products of matrices, which may run in TF32."""
        box = self._there.box[layer.sprite]
        middle = ((box[:, 2:] + box[:, :2]) / 2)[:, :, None, None]  # [B, 2, 1, 1]
        down, across = (((2 * torch.arange(side, device=box.device) + 1) - side) / min(size) for side in size)
        x, y = across - layer.center[:, :1, None], down[:, None] - layer.center[:, 1:, None]  # [B, 1, W] and [B, H, 1]
        cosine, sine = ((part / layer.zoom)[:, None, None] for part in (layer.turn.cos(), layer.turn.sin()))
        mirror = layer.mirror[:, None, None]
        return torch.stack([mirror * (cosine * x + sine * y) + middle[:, 0], cosine * y - sine * x + middle[:, 1]], 3)


def recolored(rgb: Tensor, source: Tensor, target: Tensor, chroma: Tensor, lightness: Tensor, everywhere: Tensor) -> Tensor:
    return Recoloring(source, target, chroma, lightness, everywhere)(rgb)


def backdrop_of(taken: set[int], subjects: Sequence[float], chance: random.Random) -> tuple[str, Tensor]:
    """Words of a background and its OKLab colors at the top and the bottom, which differ from the colors and lightness of the subjects."""
    for _ in range(CLEAR):
        word, shade = chance.randrange(WHITE), chance.choice(tuple(SHADES))
        if word in taken or (shade and word in (BLACK, GRAY)):
            continue
        color, (shift, factor) = COLORS[word], SHADES[shade]
        lightness = min(0.95, max(0.12, chance.uniform(*color.lightness) + shift))
        chroma, hue = chance.uniform(*color.chroma) * factor, torch.tensor(color.hue).deg2rad()
        if min(abs(lightness - one) for one in subjects) < 0.12 and chroma < 0.12:
            continue
        step = chance.choice((0.0, 0.0, 0.06, -0.06))
        ends = torch.tensor(
            [[lightness + step, chroma * hue.cos(), chroma * hue.sin()], [lightness - step, chroma * hue.cos(), chroma * hue.sin()]]
        )
        return f"{shade}{WORDS[word]}", ends
    return "", torch.tensor([[1.0, 0.0, 0.0]]).expand(2, 3)
