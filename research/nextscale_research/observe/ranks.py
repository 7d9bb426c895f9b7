"""Observation 4: the features of late stages have low rank (StageVAR, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nextscale.stage import Schedule

from .numbers import Curve, Rank

ALPHAS = (0.9, 0.96, 0.99)  # StageVAR's published setting is 0.96
MOST_LAYERS = 8  # StageVAR measures 8 groups of blocks
MOST_IMAGES = 8  # the decomposition is slow, and images differ little in their ranks


def spread_layers(depth: int) -> list[int]:
    """At most MOST_LAYERS blocks, evenly from the first on."""
    number = min(depth, MOST_LAYERS)
    return [index * depth // number for index in range(number)]


def summary(calls: Sequence[Tensor], layers: Sequence[int], schedule: Schedule, channels: int) -> Rank:
    whole = torch.cat(list(calls), dim=2)
    return Rank(
        whole.shape[2],
        list(layers),
        list(ALPHAS),
        [[Curve.of(block) for block in alpha] for alpha in whole],
        [min(stage.cells, channels) for stage in schedule],
    )
