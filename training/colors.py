"""Colors with a name: which one an image shows, and recoloring that keeps the shading.

All of it happens in OKLab (Ottosson, 2020), where hues turn without a change of lightness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COLORFUL = 0.06  # chroma above which a pixel has a hue
BINS = 72  # of the histogram of hues, 5 degrees each
HALF_WINDOW = 5  # bins on each side of the peak: 27 degrees
DOMINANT = 0.8  # share of the colorful weight in that window
TURNED, LEFT = 30, 50  # degrees from the dominant hue up to which a pixel turns fully, and from which it stays as it is
BROWN_LIGHTNESS, BROWN_CHROMA = 0.64, 0.15  # below both, orange and red-orange are called brown
PALE_RED = (0.74, 0.14)  # lightness above and chroma below which red is called pink
COLORED_SHARE = 0.25  # of the pixels of a subject, below which it is black, gray or white
DARK, BRIGHT = 0.5, 0.84  # lightness below which a subject without color is black, and above which it is white


@dataclass(frozen=True)
class Color:
    """A color word and what recoloring makes of a subject: hue in degrees, and the ranges of its mean lightness and chroma."""

    word: str
    hue: float
    lightness: tuple[float, float]
    chroma: tuple[float, float]


COLORS = (
    Color("red", 29, (0.52, 0.63), (0.17, 0.23)),
    Color("orange", 60, (0.70, 0.77), (0.15, 0.19)),
    Color("yellow", 100, (0.84, 0.90), (0.15, 0.19)),
    Color("green", 142, (0.54, 0.74), (0.13, 0.21)),
    Color("teal", 190, (0.55, 0.72), (0.09, 0.13)),
    Color("blue", 258, (0.46, 0.64), (0.14, 0.21)),
    Color("purple", 305, (0.44, 0.62), (0.14, 0.21)),
    Color("pink", 355, (0.68, 0.80), (0.12, 0.18)),
    Color("brown", 52, (0.38, 0.50), (0.07, 0.10)),
    Color("black", 0, (0.20, 0.32), (0.0, 0.004)),
    Color("gray", 0, (0.55, 0.68), (0.0, 0.004)),
    Color("white", 0, (0.90, 0.96), (0.0, 0.004)),
)
WORDS = tuple(color.word for color in COLORS)
BROWN, BLACK, GRAY, WHITE = map(WORDS.index, ("brown", "black", "gray", "white"))
RED, ORANGE, PINK = map(WORDS.index, ("red", "orange", "pink"))
HUES = tuple(color.hue for color in COLORS[:BROWN])  # of the words that a hue alone decides

TO_CONE = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def mixed(channels: Tensor, matrix: tuple[tuple[float, ...], ...]) -> Tensor:
    """Multiplies the channels of [B, 3, H, W] by a matrix, in full precision: a product would run in TF32 while a model trains."""
    x, y, z = channels.unbind(1)
    return torch.stack([row[0] * x + row[1] * y + row[2] * z for row in matrix], 1)


def inverse(matrix: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, torch.tensor(matrix, dtype=torch.float64).inverse().tolist()))


FROM_CONE, FROM_LAB = inverse(TO_CONE), inverse(TO_LAB)


def to_oklab(rgb: Tensor) -> Tensor:
    """Converts sRGB in [0, 1], [B, 3, H, W], to lightness, a and b."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb.clamp(min=0) + 0.055) / 1.055) ** 2.4)
    return mixed(mixed(linear, TO_CONE).clamp(min=1e-9) ** (1 / 3), TO_LAB)


def to_rgb(lab: Tensor) -> Tensor:
    """Converts lightness, a and b to sRGB, clamped to [0, 1]."""
    linear = mixed(mixed(lab, FROM_LAB) ** 3, FROM_CONE).clamp(0, 1)
    return torch.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear.clamp(min=1e-9) ** (1 / 2.4) - 0.055)


@dataclass(frozen=True)
class Look:
    """Colors of some images, one number per image; hues in degrees. Lightness and chroma are means over the dominant hue."""

    hue: Tensor
    share: Tensor  # of the colorful weight near the dominant hue
    colored: Tensor  # share of the pixels that are colorful
    lightness: Tensor
    chroma: Tensor
    lightness_of_all: Tensor

    @property
    def one_color(self) -> Tensor:
        """True where a single hue rules and recoloring it changes the color of the whole subject."""
        return (self.share >= DOMINANT) & (self.colored >= 0.5) & (self.chroma >= 0.08)

    def words(self) -> Tensor:
        """The places in WORDS of the words that fit best."""
        hues = torch.tensor(HUES, device=self.hue.device)
        word = hue_distance(self.hue[:, None], hues).argmin(dim=1)
        warm = (word == ORANGE) | ((word == RED) & (self.hue > 36)) | ((self.hue > 60) & (self.hue < 90))
        brown = warm & (self.lightness < BROWN_LIGHTNESS) & (self.chroma < BROWN_CHROMA)
        pale = (word == RED) & (self.lightness > PALE_RED[0]) & (self.chroma < PALE_RED[1])
        word = word.where(~pale, PINK).where(~brown, BROWN)
        gray = torch.where(self.lightness_of_all < DARK, BLACK, torch.where(self.lightness_of_all > BRIGHT, WHITE, GRAY))
        return word.where(self.colored >= COLORED_SHARE, gray)


def hue_distance(a: Tensor, b: Tensor | float) -> Tensor:
    """Degrees between hues, 0 to 180."""
    return ((a - b + 180) % 360 - 180).abs()


def look(rgb: Tensor, inside: Tensor) -> Look:
    """Measures images [B, 3, H, W] in [0, 1] where `inside` [B, H, W], from 0 to 1, marks the subject."""
    lightness, a, b = to_oklab(rgb).unbind(1)
    chroma, hue = torch.hypot(a, b), torch.atan2(b, a).rad2deg() % 360
    colorful = inside * (chroma > COLORFUL)
    weight = colorful * chroma
    bins = (hue * BINS / 360).long().clamp(max=BINS - 1)
    histogram = torch.zeros(len(rgb), BINS, device=rgb.device).scatter_add_(1, bins.flatten(1), weight.flatten(1))
    offsets = torch.arange(-HALF_WINDOW, HALF_WINDOW + 1, device=rgb.device)
    windows = histogram[:, (torch.arange(BINS, device=rgb.device)[:, None] + offsets) % BINS].sum(2)
    found, peak = windows.max(dim=1)
    centers = (peak.float() + 0.5) * 360 / BINS
    near = weight * (hue_distance(hue, centers[:, None, None]) <= TURNED)
    mass = near.sum((1, 2)).clamp(min=1e-6)
    angle = (hue - centers[:, None, None]).deg2rad()  # the mean hue within the window, finer than a bin
    mean_angle = torch.atan2((near * angle.sin()).sum((1, 2)), (near * angle.cos()).sum((1, 2)).clamp(min=1e-6))
    pixels = inside.sum((1, 2)).clamp(min=1e-6)
    return Look(
        hue=(centers + mean_angle.rad2deg()) % 360,
        share=found / weight.sum((1, 2)).clamp(min=1e-6),
        colored=colorful.sum((1, 2)) / pixels,
        lightness=(near * lightness).sum((1, 2)) / mass,
        chroma=(near * chroma).sum((1, 2)) / mass,
        lightness_of_all=(inside * lightness).sum((1, 2)) / pixels,
    )


@dataclass(frozen=True)
class Recoloring:
    """Changes of color, [B] each: from a hue to a hue in degrees, factor of the chroma, change of the lightness."""

    source: Tensor
    target: Tensor
    chroma: Tensor
    lightness: Tensor
    everywhere: Tensor  # True for black, gray and white, which leave no hue

    @classmethod
    def to_words(cls, seen: Look, words: Tensor) -> Recoloring:
        """Recolors to the places `words` in WORDS; a place of -1 leaves the image as it is."""
        known = words >= 0
        table = torch.tensor([(color.hue, *color.lightness, *color.chroma) for color in COLORS], device=words.device)
        hue, darkest, brightest, palest, richest = table[words.clamp(min=0)].unbind(1)
        wanted_lightness = seen.lightness.clamp(min=darkest, max=brightest)
        wanted_chroma = seen.chroma.clamp(min=palest, max=richest)
        return cls(
            seen.hue,
            hue.where(known, seen.hue),
            (wanted_chroma / seen.chroma.clamp(min=1e-3)).clamp(max=2.5).where(known, 1.0),
            (wanted_lightness - seen.lightness).where(known, 0.0),
            words >= BLACK,
        )

    def __call__(self, rgb: Tensor) -> Tensor:
        """Recolors images [B, 3, H, W] in [0, 1]; hues far from the source stay, and the change between them is gradual."""
        lab = to_oklab(rgb)
        source, target, factor, shift = (value[:, None, None] for value in (self.source, self.target, self.chroma, self.lightness))
        lightness, a, b = lab.unbind(1)
        distance = hue_distance(torch.atan2(b, a).rad2deg(), source)
        turned = ((LEFT - distance) / (LEFT - TURNED)).clamp(0, 1)
        turned = turned.maximum(self.everywhere[:, None, None].float())
        angle = ((target - source) * (math.pi / 180)).expand_as(a)
        cosine, sine = angle.cos() * factor, angle.sin() * factor
        chroma = torch.hypot(a, b)
        colored = (
            (chroma / COLORFUL).clamp(max=1).maximum(self.everywhere[:, None, None].float())
        )  # highlights and outlines keep their lightness
        changed = torch.stack(
            [lightness + shift * colored * (1 - lightness.clamp(0, 1) ** 16), a * cosine - b * sine, a * sine + b * cosine], dim=1
        )
        return to_rgb(fitted(torch.lerp(lab, changed, turned[:, None])))


def fitted(lab: Tensor, steps: int = 5) -> Tensor:
    """Lowers the chroma of colors that a screen cannot show, instead of clipping channels, which would turn the hue."""
    low, high = torch.zeros_like(lab[:, :1]), torch.ones_like(lab[:, :1])
    lightness, color = lab[:, :1].clamp(0, 1), lab[:, 1:]
    for step in range(steps + 1):
        share = high if step == 0 else (low + high) / 2
        linear = mixed(mixed(torch.cat([lightness, color * share], 1), FROM_LAB) ** 3, FROM_CONE)
        inside = ((linear > -0.002) & (linear < 1.002)).all(1, keepdim=True)
        low, high = share.where(inside, low), high.where(inside, share)
    return torch.cat([lightness, color * low], 1)
