"""Finds the blocks that predict best which cells the next stage changes, where SparseVAR measures change. One dense run answers for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..eval.probe import FeatureProbe
from ..methods.sparsevar_cells import GridMap, feature_change, image_change
from ..output import Preview
from ..pipeline import Pipeline
from ..stage import Schedule, Stage

TOP = 0.4  # of the cells

Foresight = Mapping[tuple[int, int], float]
"""First block and last block + 1 to a share."""


def block_groups(depth: int) -> list[tuple[int, int]]:
    """Returns single blocks, at most sixteen of them, and eighths and quarters of the depth."""
    step = -(-depth // 16)
    groups = {(block, block + 1) for block in range(0, depth, step)}
    for parts in (8, 4):
        size = max(1, depth // parts)
        groups |= {(first, first + size) for first in range(0, depth - size + 1, size)}
    return sorted(groups)


@torch.inference_mode()
def foresight(pipeline: Pipeline, schedule: Schedule, prompts: Sequence[Any], seeds: Sequence[int], late: int) -> Foresight:
    """Returns the share of the images' change in the late stages that falls where a group of blocks changed most one stage earlier.

    These places are the 40 % of the cells with the largest change. Mean over images and stages; chance is 0.4.
    """
    shown: dict[int, Tensor] = {}
    entered: dict[int, Tensor] = {}  # block to its input
    changes: dict[tuple[int, tuple[int, int]], GridMap] = {}  # (stage, group) to [B, cells, 1]
    groups = block_groups(len(pipeline.model.blocks))
    first = max(0, len(schedule) - late - 1)

    def keep(preview: Preview) -> None:
        if preview.done.stage.index >= first:
            shown[preview.done.stage.index] = preview.tokenizer.decode(preview.latent).float()

    def watch(stage: Stage, layer: int, before: Tensor, after: Tensor) -> None:
        entered[layer] = before[: len(prompts)].clone()
        for group in (group for group in groups if group[1] == layer + 1):
            change = feature_change(entered[group[0]], after[: len(prompts)])  # of the conditional rows
            changes[stage.index, group] = GridMap(change[..., None], stage.size)

    probe = FeatureProbe((watch,), stages=frozenset(range(first, len(schedule) - 1)))
    pipeline(list(prompts), seed=list(seeds), size=schedule, method=probe, on_stage=keep)
    found: dict[tuple[int, int], list[float]] = {}
    for (index, group), change in changes.items():
        stage = schedule[index + 1]
        moved = image_change(shown[index], shown[stage.index], stage.size)
        found.setdefault(group, []).append(captured(change.at(stage.size)[..., 0], moved))
    return {group: sum(shares) / len(shares) for group, shares in sorted(found.items())}


def captured(score: Tensor, moved: Tensor) -> float:
    """Returns the share of `moved` [B, cells] at the cells with the largest score, mean of all images."""
    best = score.topk(max(1, round(TOP * score.shape[1])), dim=1).indices
    return float((moved.gather(1, best).sum(dim=1) / moved.sum(dim=1).clamp(min=1e-12)).mean())
