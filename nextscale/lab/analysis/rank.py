"""Observation 4: the features of late stages have low rank (StageVAR, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...accel.stagevar.lowrank import energy_ranks
from ...stage import Schedule, Stage
from .numbers import Curve, Rank

ALPHAS = (0.9, 0.96, 0.99)  # StageVAR's published setting is 0.96
MOST_LAYERS = 8  # StageVAR measures 8 groups of blocks
MOST_IMAGES = 8  # the decomposition is slow, and images differ little in their ranks


def energies(x: Tensor) -> Tensor:
    """Squared singular values of the mean-centred x [B, N, C], largest first, [B, min(N, C)], in float64 on the CPU.

    From the products along the shorter side, which a GPU forms at once; it is slow at decomposing many matrices.
    """
    centred = (x - x.mean(dim=1, keepdim=True, dtype=torch.float32)).double()
    products = centred @ centred.mT if x.shape[1] < x.shape[2] else centred.mT @ centred
    return torch.linalg.eigvalsh(products.cpu()).flip(1).clamp(min=0)


def spread_layers(depth: int) -> list[int]:
    """At most MOST_LAYERS blocks, evenly from the first on."""
    number = min(depth, MOST_LAYERS)
    return [index * depth // number for index in range(number)]


@dataclass
class RankRecord:
    """Watches one call: ranks of the inputs of some blocks, of the first images only."""

    layers: Sequence[int]
    images: int
    found: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (stage, block): [alphas, images]

    def watch(self, stage: Stage, layer: int, before: Tensor, after: Tensor) -> None:
        if self.images and layer in self.layers:
            spectrum = energies(before[: self.images])
            self.found[stage.index, layer] = torch.stack([energy_ranks(spectrum, alpha) for alpha in ALPHAS]).double()

    def ranks(self, schedule: Schedule) -> Tensor:
        """[alphas, blocks, images, stages]."""
        return torch.stack(
            [torch.stack([self.found[stage.index, layer] for stage in schedule], dim=-1) for layer in self.layers],
            dim=1,
        )


def summary(calls: Sequence[Tensor], layers: Sequence[int], schedule: Schedule, channels: int) -> Rank:
    whole = torch.cat(list(calls), dim=2)
    return Rank(
        whole.shape[2],
        list(layers),
        list(ALPHAS),
        [[Curve.of(block) for block in alpha] for alpha in whole],
        [min(stage.cells, channels) for stage in schedule],
    )
