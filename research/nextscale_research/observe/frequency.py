"""Observation 1: late stages change mostly fine detail (SparseVAR, observation 1; FastVAR, observation 2; StageVAR, figure 1c).

Images are decoded after every stage. Where: the change of every cell of the last token map by a stage, against the detail of the
image there. How finely: the power spectrum of the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.methods.sparsevar_cells import image_change

from .detail import LEVELS, extreme_quarters, local_detail, luminance, rank_correlation
from .numbers import Curve, Frequency, plain

EDGES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)  # cycles per pixel: octaves


@dataclass(frozen=True)
class Changes:
    """Changes of every stage in the images of one request; the fields are as in `numbers.Frequency`."""

    smooth: Tensor  # [B, stages]
    detailed: Tensor  # [B, stages]
    correlation: Tensor  # [B, stages]
    foreseen: Tensor  # [B, stages]
    power: Tensor  # [B, stages, bands]
    image_power: Tensor  # [B, bands]


def band_power(gray: Tensor) -> Tensor:
    """Mean square of images [B, H, W] by band of frequency: [B, bands].

    A Hann window is applied, as an image does not continue at its opposite edge; the mean belongs to the coarsest band.
    """
    height, width = gray.shape[1:]
    window = torch.outer(torch.hann_window(height, device=gray.device), torch.hann_window(width, device=gray.device))
    window = window / window.square().mean().sqrt()
    power = torch.fft.fft2(gray * window).abs().square() / (height * width) ** 2
    down, right = torch.fft.fftfreq(height, device=gray.device), torch.fft.fftfreq(width, device=gray.device)
    frequency = (down[:, None].square() + right.square()).sqrt()
    band = torch.bucketize(frequency, torch.tensor(EDGES, device=gray.device), right=True)
    return power.flatten(1) @ F.one_hot(band.flatten(), len(EDGES) + 1).float()


def stage_changes(images: Iterable[Tensor], final: Tensor, grid: tuple[int, int]) -> tuple[Changes, list[Tensor]]:
    """Compares the images after each stage, [B, 3, H, W] in [-1, 1]; smaller ones are enlarged (FlexVAR's grow with the stage).

    Also returns the change of every cell of `grid` by each stage, in levels, [B, cells]; zeros for stage 0.
    """
    final = final.clamp(-1, 1)
    detail = local_detail(final, grid)
    nothing = torch.full((final.shape[0],), torch.nan, device=final.device)
    columns: list[tuple[Tensor, ...]] = []
    powers, maps = [], []
    before: Tensor | None = None
    for image in images:
        after = image.clamp(-1, 1)
        if after.shape != final.shape:
            after = F.interpolate(after, size=final.shape[2:], mode="bilinear")
        if before is None:
            columns.append((nothing,) * 4)
            powers.append(nothing[:, None].expand(-1, len(EDGES) + 1))
            maps.append(torch.zeros_like(detail))
        else:
            change = image_change(before, after, grid) * LEVELS
            correlations = (rank_correlation(change, detail), rank_correlation(change, local_detail(before, grid)))
            columns.append((*extreme_quarters(detail, change), *correlations))
            powers.append(band_power(luminance(after) - luminance(before)))
            maps.append(change)
        before = after
    smooth, detailed, correlation, foreseen = (torch.stack(column, dim=1).cpu() for column in zip(*columns, strict=True))
    gray = luminance(final)
    whole = band_power(gray - gray.mean(dim=(1, 2), keepdim=True))  # most of an image's power is its brightness, which says nothing
    return Changes(smooth, detailed, correlation, foreseen, torch.stack(powers, dim=1).cpu(), whole.cpu()), maps


def summary(calls: Sequence[Changes]) -> Frequency:
    """Means over the images of all requests."""

    def curve(name: str) -> Curve:
        return Curve.of(torch.cat([getattr(call, name) for call in calls]))

    power = torch.cat([call.power for call in calls]).mean(dim=0)
    image_power = torch.cat([call.image_power for call in calls]).mean(dim=0)
    return Frequency(
        curve("smooth"),
        curve("detailed"),
        curve("correlation"),
        curve("foreseen"),
        list(EDGES),
        [plain(stage) for stage in power],
        plain(image_power),
    )
