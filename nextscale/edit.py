"""Editing: a canvas that keeps an image outside a mask, and the paste of the result into that image. The same for all canvases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .canvas import Canvas
from .io import to_levels
from .stage import Stage, Tokens


class Box(NamedTuple):
    """A rectangle of pixels; `bottom` and `right` are the first ones behind it."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def size(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left


@dataclass(frozen=True, eq=False)
class Paste:
    """Pastes generated pixels into the edited images. Pixels of weight 0 keep their 8-bit levels."""

    levels: Tensor  # [B, 3, H, W], uint8
    weight: Tensor  # [B, 1, H, W], from 0 (the image) to 1 (the generated pixels)
    boxes: tuple[Box, ...]  # where the generated pixels of each image belong

    @classmethod
    def joined(cls, several: Sequence[Paste]) -> Paste:
        levels, weight = (torch.cat([getattr(one, name) for one in several]) for name in ("levels", "weight"))
        return cls(levels, weight, tuple(box for one in several for box in one.boxes))

    def to(self, device: torch.device) -> Paste:
        return Paste(self.levels.to(device), self.weight.to(device), self.boxes)

    def __call__(self, pixels: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Returns pixels [B, 3, H, W] in [-1, 1]. rows: the images that `pixels` [B, 3, h, w] stand for; None: all of them."""
        rows = range(len(self.boxes)) if rows is None else rows
        return torch.stack([self._paste(one, row) for one, row in zip(pixels, rows, strict=True)])

    def _paste(self, pixels: Tensor, row: int) -> Tensor:
        box, levels, weight = self.boxes[row], self.levels[row].float(), self.weight[row]
        if pixels.shape[1:] != box.size:
            pixels = F.interpolate(pixels[None], size=box.size, mode="bicubic", antialias=True)[0]
        inside = slice(box.top, box.bottom), slice(box.left, box.right)
        own = levels.clone()
        own[:, *inside] = to_levels(pixels).float()
        mixed = (levels + weight * (own - levels)).round() + 0.5  # the middle of a level, which `to_levels` returns exactly
        mixed = (mixed / 127.5 - 1).clamp(max=1)
        mixed[:, *inside] = pixels.where(weight[:, *inside] == 1, mixed[:, *inside])
        return mixed


@dataclass(frozen=True, eq=False)
class Edit:
    """Codes of images, and the cells of them that are generated. Every tensor has one entry per image."""

    codes: tuple[Tensor, ...]  # of each stage, [B, cells, ...]
    cells: tuple[Tensor, ...]  # [B, 1, h, w] of each stage: True where the mask touches the cell
    gate: Tensor  # the same on the latent's last grid
    from_stage: Tensor  # [B], the first stage that changes an image
    features: tuple[Tensor, ...] = ()  # [B, Z, H, W], the continuous latent, where a model adds a residual to its codes (HART)
    paste: Paste | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.codes, *self.cells, self.gate, self.from_stage, *self.features

    def clone(self) -> Edit:
        """Returns a copy in memory of its own, for captured graphs to read."""
        codes, cells, features = (tuple(one.clone() for one in several) for several in (self.codes, self.cells, self.features))
        return Edit(codes, cells, self.gate.clone(), self.from_stage.clone(), features)

    def repeat(self, images: int) -> Edit:
        """Returns a single image's edit for several images."""
        codes, cells, features = (tuple(repeated(one, images) for one in several) for several in (self.codes, self.cells, self.features))
        paste = self.paste
        if paste is not None:
            paste = Paste(repeated(paste.levels, images), repeated(paste.weight, images), paste.boxes * images)
        return Edit(codes, cells, repeated(self.gate, images), repeated(self.from_stage, images), features, paste)

    def changed(self, stage: Stage, size: torch.Size | None = None) -> Tensor:
        """Returns True where the latent of this size, or the stage's grid, changes at a stage: [B, 1, h, w]."""
        cells = self.cells[stage.index]
        fits = size is None or cells.shape[2:] == size
        return (cells if fits else self.gate) & (self.from_stage <= stage.index).view(-1, 1, 1, 1)

    def near(self, stage: Stage, margin: int) -> Tensor:
        """Marks cells at most `margin` from the mask, [B, cells]; all cells of an image that does not change at this stage."""
        near = F.max_pool2d(self.cells[stage.index].float(), 2 * margin + 1, stride=1, padding=margin) > 0
        return (near | (self.from_stage > stage.index).view(-1, 1, 1, 1)).flatten(1)

    def written(self, codes: Tensor, tokens: Tokens) -> Tensor:
        """Returns the codes of all cells of a stage as they are on the canvas; a token that another method left out has zeros."""
        stage, source = tokens.stage, self.codes[tokens.stage.index]
        codes = tokens.move(codes, Tokens(stage))
        if codes.is_floating_point():
            source = F.one_hot(source, codes.shape[-1]).to(codes.dtype)
        changed = self.changed(stage).flatten(1)
        return codes.where(changed.view(*changed.shape, *[1] * (codes.ndim - 2)), source)


def repeated(values: Tensor, images: int) -> Tensor:
    return values.expand(images, *values.shape[1:])


def touched(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Marks the cells of a grid that a mask [B, 1, H, W] touches, [B, 1, h, w]."""
    return F.adaptive_max_pool2d(mask.float(), size) > 0


class EditCanvas(Canvas):
    """A model's canvas on which the image stays as it is outside the mask, exactly."""

    def __init__(self, canvas: Canvas, edit: Edit) -> None:
        self._canvas, self.edit = canvas, edit

    def __copy__(self) -> EditCanvas:
        return EditCanvas(copy.copy(self._canvas), self.edit)

    @property
    def latent(self) -> Tensor:  # type: ignore[override]
        return self._canvas.latent

    @latent.setter
    def latent(self, latent: Tensor) -> None:
        self._canvas.latent = latent

    def input(self, stage: Stage) -> Tensor | None:
        return self._canvas.input(stage)

    def vectors(self, codes: Tensor) -> Tensor:
        return self._canvas.vectors(codes)

    def grid(self, codes: Tensor, tokens: Tokens) -> Tensor:
        """The given codes where the mask touches a cell, and the image's codes elsewhere.

        A cell beside the mask has neighbors that are upsampled from it: with sampled codes there edits of nano are further from the image
        (22.4 against 22.6 dB).
        """
        stage = tokens.stage
        return chosen(self.edit.cells[stage.index], self._canvas.grid(codes, tokens), self._image(stage))

    def write(self, grid: Tensor, stage: Stage) -> None:
        self._change(stage, lambda: self._canvas.write(grid, stage))

    def add_residual(self, values: Tensor, tokens: Tokens) -> None:
        self._canvas.add_residual(values, tokens)
        self._keep(tokens.stage, *self.edit.features)

    def skip(self, stage: Stage) -> None:
        self._change(stage, lambda: self._canvas.skip(stage))

    def decode(self) -> Tensor:
        return self._canvas.decode()

    def _image(self, stage: Stage) -> Tensor:
        return self._canvas.grid(self.edit.codes[stage.index], Tokens(stage))

    def _change(self, stage: Stage, change: Callable[[], None]) -> None:
        """Changes the canvas inside the mask; outside of it the image's own codes are written."""
        before = self.latent
        self._canvas.write(self._image(stage), stage)
        kept, self.latent = self.latent, before
        change()
        self._keep(stage, *(self.edit.features if stage.last and self.edit.features else (kept,)))

    def _keep(self, stage: Stage, image: Tensor) -> None:
        self.latent = chosen(self.edit.changed(stage, self.latent.shape[2:]), self.latent, image)


def chosen(mask: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """Returns `values` where the mask is True, in their memory format: convolutions round differently in another."""
    return torch.where(mask, values, others, out=torch.empty_like(values))
