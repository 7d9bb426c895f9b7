"""Observation 2: blocks differ in where they act, and some act where the image has detail (SparseVAR, observation 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.methods.sparsevar_cells import GridMap, feature_change
from nextscale.methods.token_ops import distance_from_mean
from nextscale.stage import Schedule, Stage, Tokens

from .detail import local_detail, rank_correlation
from .numbers import Blocks, Curve

MEASURES = ("correlation", "foresight", "distance", "strength")


class BlockMaps(NamedTuple):
    """Maps of one block at one stage."""

    change: Tensor  # [B, cells], how far it moves each token
    distance: Tensor  # [B, cells], how far each token is from the mean before it
    strength: Tensor  # [B], mean squared change against the mean square of its input


@dataclass
class BlockWatcher:
    """Notes the maps of all blocks and stages of one request, for a `FeatureProbe`."""

    images: int
    maps: dict[tuple[int, int], BlockMaps] = field(default_factory=dict)  # (stage, block)

    def watch(self, stage: Stage, layer: int, before: Tensor, after: Tensor) -> None:
        before, after = before[: self.images], after[: self.images]  # the rows with the prompt
        change = feature_change(before, after)
        strength = change.mean(dim=1) / before.float().square().mean(dim=(1, 2))
        self.maps[stage.index, layer] = BlockMaps(change, distance_from_mean(before, Tokens(stage)), strength)


def block_relations(watched: BlockWatcher, schedule: Schedule, final: Tensor, image_changes: Sequence[Tensor]) -> dict[str, Tensor]:
    """Measures how far the maps of a request agree with its images [B, 3, H, W]: by measure, [B, blocks, stages].

    image_changes: per stage, how much it changed every cell of the last grid.
    """
    blocks = range(max(layer for _, layer in watched.maps) + 1)
    stages = []
    for stage in schedule:
        detail = local_detail(final, stage.size)
        moved = F.interpolate(image_changes[stage.index].unflatten(1, schedule.grid)[:, None], size=stage.size, mode="area").flatten(1)
        rows: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
        for layer in blocks:
            maps = watched.maps[stage.index, layer]
            rows["correlation"].append(rank_correlation(maps.change, detail))
            rows["foresight"].append(foresight(watched, schedule, stage, layer, moved))
            rows["distance"].append(rank_correlation(maps.distance, detail))
            rows["strength"].append(maps.strength.double())
        stages.append({name: torch.stack(several, dim=1) for name, several in rows.items()})  # [B, blocks]
    return {name: torch.stack([stage[name] for stage in stages], dim=2).cpu() for name in MEASURES}


def foresight(watched: BlockWatcher, schedule: Schedule, stage: Stage, layer: int, moved: Tensor) -> Tensor:
    """Returns the rank correlation of the block's change one stage earlier with the change of the stage, [B]."""
    if stage.index == 0:
        return torch.full(moved.shape[:1], torch.nan, dtype=torch.double, device=moved.device)
    earlier = schedule[stage.index - 1]
    grid = GridMap(watched.maps[earlier.index, layer].change[..., None], earlier.size)
    return rank_correlation(grid.at(stage.size)[..., 0], moved)


def summary(calls: Sequence[dict[str, Tensor]]) -> Blocks:
    """Means over the images of all requests."""
    whole = {name: torch.cat([call[name] for call in calls]) for name in MEASURES}  # [images, blocks, stages]
    return Blocks(**{name: [Curve.of(block) for block in values.unbind(dim=1)] for name, values in whole.items()})
