"""Rules without a network that tell the color of a subject, and whether it is whole. They hold for one subject on a plain background.

The second one agrees with the eye on pictures of the first edition of nano; it was written for icons, not for photographs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .colors import Look, look

FOREIGN = 90 / 255  # sum over red, green and blue by which a pixel differs from the background
STRIP = 64  # the shorter side is this many times as long as an edge strip is wide
TOUCHED = 0.12  # share of foreign pixels in a strip from which the subject touches the frame
LEAST_SUBJECT = 0.01  # share of the picture that is not background, below which nothing is shown


def foreign(images: Tensor) -> Tensor:
    """Marks the foreground of images [B, 3, H, W] in [0, 1]: [B, H, W]. The background is interpolated between the four corners."""
    corner = max(1, min(images.shape[2:]) // 32)
    rows, columns = (slice(0, corner), slice(-corner, None)), (slice(0, corner), slice(-corner, None))
    patches = [images[:, :, row, column].flatten(2).median(2).values for row in rows for column in columns]
    background = F.interpolate(torch.stack(patches, 2).unflatten(2, (2, 2)), size=images.shape[2:], mode="bilinear", align_corners=True)
    return (images - background).abs().sum(1) > FOREIGN


def looks(images: Tensor) -> Look:
    """The colors of the subjects of images [B, 3, H, W] in [-1, 1]."""
    unit = ((images.float() + 1) / 2).clamp(0, 1)
    return look(unit, foreign(unit).float())


def whole(images: Tensor) -> Tensor:
    """True [B] where images [B, 3, H, W] in [-1, 1] show a subject that touches no side of the frame."""
    unit = ((images.float() + 1) / 2).clamp(0, 1)
    width = max(1, min(images.shape[2:]) // STRIP)
    corners = torch.stack([unit[:, :, row, column] for row in (0, -1) for column in (0, -1)], 2).median(2).values
    other = ((unit - corners[:, :, None, None]).abs().sum(1) > FOREIGN).float()
    strips = (other[:, :width], other[:, -width:], other[:, :, :width], other[:, :, -width:])
    untouched = torch.stack([strip.mean((1, 2)) <= TOUCHED for strip in strips]).all(0)
    return untouched & (other.mean((1, 2)) >= LEAST_SUBJECT)
