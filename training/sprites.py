"""Subjects cut from their white backgrounds, ready to be placed anywhere, and measurements of their colors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from .colors import Look, look
from .data import Pictures
from .records import Record

TOGETHER = 128  # pictures
COARSE = 128  # side on which the white background is followed from the frame inward
WHITE = 0.05  # distance of the darkest channel from white below which a pixel may be background
PALE = 0.2  # distance below which a subject's rim may be background
PALE_RIM = 0.12  # share of such a rim from which a subject stays on white
FLAT_GROUPS = ("Flags", "People & Body", "Smileys & Emotion")  # skin and flags keep their colors
PHOTO = "photo"
NAMED_CHROMA = 0.1  # of a subject below which people disagree about its color's name


def spread(mask: Tensor, pixels: int = 1) -> Tensor:
    """Grows a mask [B, 1, H, W] of zeros and ones."""
    return F.max_pool2d(mask, 2 * pixels + 1, 1, pixels)


def background(distance: Tensor) -> Tensor:
    """Marks what is white and connected to the frame, [B, 1, S, S]; `distance`: of every pixel from white."""
    side = distance.shape[-1]
    factor = max(1, side // COARSE)
    white = (F.max_pool2d(distance, factor) < WHITE).float()  # cells that are white as a whole, so that thin outlines hold
    reached = torch.zeros_like(white)
    reached[..., 0, :], reached[..., -1, :], reached[..., :, 0], reached[..., :, -1] = 1, 1, 1, 1
    reached = reached * white
    for step in range(4 * white.shape[-1]):
        grown = spread(reached) * white
        if step % 16 == 15 and torch.equal(grown, reached):
            break
        reached = grown
    fine, white = F.interpolate(reached, size=(side, side), mode="nearest"), (distance < WHITE).float()
    for _ in range(factor + 1):
        fine = spread(fine) * white
    return fine


def cut_out(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts icons [B, 3, S, S] in [0, 1] from white: their own colors, their opacity [B, 1, S, S], and the share of a pale rim [B]."""
    distance = (1 - images).amax(1, keepdim=True)
    outside = background(distance)
    rim = spread(outside, 2) * (1 - outside)
    strongest = F.max_pool2d(distance * (1 - outside), 5, 1, 2)  # color of the rim without the white behind it
    opacity = torch.where(rim > 0, (distance / strongest.clamp(min=WHITE)).clamp(0, 1), 1 - outside) * (1 - outside)
    colors = 1 - ((1 - images) / opacity.clamp(min=0.05)).clamp(0, 1)
    pale = ((strongest < PALE).float() * rim).sum((1, 2, 3)) / rim.sum((1, 2, 3)).clamp(min=1)
    return colors, opacity, pale


@dataclass(frozen=True)
class Facts:
    """Measurements of every subject, [N] each unless noted."""

    seen: Look
    box: Tensor  # [N, 4]: left, top, right, bottom, from -1 to 1
    cut: Tensor  # True if it can stand on any background
    photo: Tensor
    paintable: Tensor  # one hue rules, and another one makes sense
    word: Tensor  # place of the color's word in WORDS; -1 if several colors or none
    mirrors: Tensor

    def to(self, device: torch.device | str) -> Facts:
        seen = Look(**{field.name: getattr(self.seen, field.name).to(device) for field in fields(Look)})
        rest = {field.name: getattr(self, field.name).to(device) for field in fields(self) if field.name != "seen"}
        return Facts(seen, **rest)


class Sprites:
    """Pictures of some sides as colors and opacity, [N, 4, side, side] bytes, on one device; facts stay on the host."""

    def __init__(self, pictures: Mapping[int, Pictures], device: torch.device) -> None:
        self.device = device
        smallest = pictures[min(pictures)]
        self.records: Sequence[Record] = smallest.records
        photo = torch.tensor([record.style == PHOTO for record in self.records])
        self.pixels: dict[int, Tensor] = {}
        found: list[tuple[Tensor, ...]] = []
        for side, of_side in sorted(pictures.items()):
            self.pixels[side] = torch.empty(len(of_side), 4, side, side, dtype=torch.uint8, device=device)
            for part in torch.arange(len(of_side)).split(TOGETHER):
                images = of_side.pixels[part].to(device).float() / 255
                is_photo = photo[part].to(device)
                colors, opacity, pale = cut_out(images)
                whole = is_photo | (pale > PALE_RIM)
                rgba = torch.cat([images, torch.ones_like(opacity)], 1).where(whole[:, None, None, None], torch.cat([colors, opacity], 1))
                self.pixels[side][part.to(device)] = (rgba * 255).round().to(torch.uint8)
                if side == smallest.side:
                    inside = opacity.squeeze(1).maximum(is_photo[:, None, None].float())
                    found.append(
                        (~whole, box_of(inside), *vars(look(colors.where(~is_photo[:, None, None, None], images), inside)).values())
                    )
        cut, box, *seen = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
        about = Look(*seen)
        one_color = about.one_color & ~photo
        plain = torch.tensor([record.group not in FLAT_GROUPS for record in self.records])
        self.facts = Facts(
            about,
            box,
            cut,
            photo,
            one_color & plain,
            about.words().where(one_color & plain & (about.chroma >= NAMED_CHROMA), -1),
            torch.tensor([record.mirrored_alike for record in self.records]),
        )

    def __len__(self) -> int:
        return len(self.records)


def box_of(inside: Tensor) -> Tensor:
    """Left, top, right and bottom of masks [B, H, W] as [B, 4], from -1 to 1; the whole frame where a mask is empty."""
    edges = []
    for axis in (1, 2):
        there = inside.amax(axis) > 0.5  # [B, W], then [B, H]
        side = there.shape[1]
        first = there.float().argmax(1)
        last = side - 1 - there.flip(1).float().argmax(1)
        empty = ~there.any(1)
        edges += [(first * 2 / side - 1).where(~empty, -1), ((last + 1) * 2 / side - 1).where(~empty, 1)]
    left, right, top, bottom = edges
    return torch.stack([left, top, right, bottom], 1).float()
