"""Attention by stage and by place: how much goes to each earlier stage, to cells nearby, and which cells of its own stage get most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nextscale.stage import Schedule, Stage

QUERIES_AT_A_TIME = 512


class CalledAttention(TorchFunctionMode):
    """Keeps the queries and keys of the attention calls since `taken` was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Tensor, Tensor, float]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            scale = (kwargs or {}).get("scale")
            self._calls.append((args[0], args[1], args[0].shape[-1] ** -0.5 if scale is None else scale))
        return func(*args, **(kwargs or {}))

    def taken(self) -> list[tuple[Tensor, Tensor, float]]:
        calls, self._calls = self._calls, []
        return calls


@dataclass
class AttentionWatcher:
    """Collects, for a `FeatureProbe` of all blocks inside `calls`, where the first image's row with the prompt attends, mean over heads."""

    calls: CalledAttention
    schedule: Schedule
    shares: dict[int, list[Tensor]] = field(
        default_factory=dict
    )  # by stage, one per block: [stages], shares of the attention to image tokens
    received: dict[int, list[Tensor]] = field(default_factory=dict)  # by stage, one per block: [cells], attention that its own cells get
    near: dict[int, list[Tensor]] = field(default_factory=dict)  # as `shares`, of cells nearby: shares of the attention to that stage

    def watch(self, stage: Stage, layer: int, before: Tensor, after: Tensor) -> None:
        found = self.calls.taken()
        stages = self.schedule.stages[: stage.index + 1]
        sizes = [one.cells for one in stages]
        if stage.index == 0:  # a single token; some models attend to the text before the first block
            mass, near = torch.ones(1), torch.ones(1)
        else:
            queries, keys, scale = found[0]  # the block's own attention; attention to the text comes after it
            mass, near = torch.zeros(sum(sizes), device=keys.device), torch.zeros(len(stages), device=keys.device)
            for places, weights in attended(queries[0], keys[0], scale):
                weights = weights[:, -sum(sizes) :]  # some have the text before the image's tokens
                mass += weights.sum(dim=0)
                parts = zip(stages, weights.split(sizes, dim=1), strict=True)
                near += torch.stack([part[nearby(stage, one, places.to(part.device))].sum() for one, part in parts])
        totals = torch.stack([part.sum() for part in mass.split(sizes)])
        for kept, values in ((self.shares, totals / mass.sum()), (self.near, near / totals)):
            kept.setdefault(stage.index, []).append(F.pad(values, (0, len(self.schedule) - len(sizes))).cpu())
        self.received.setdefault(stage.index, []).append(mass[-stage.cells :].cpu())

    def share_matrix(self) -> Tensor:
        """Returns [stages, stages]: the share of the attention of a stage's tokens that goes to each stage's."""
        return torch.stack([torch.stack(self.shares[stage.index]).mean(dim=0) for stage in self.schedule])

    def near_matrix(self) -> Tensor:
        """Returns [stages, stages]: the share of the attention to a stage that goes to the 3 x 3 cells around the same place."""
        return torch.stack([torch.stack(self.near[stage.index]).mean(dim=0) for stage in self.schedule])

    def chance_matrix(self) -> Tensor:
        """Returns `near_matrix` of attention that is spread evenly over each stage."""
        found = torch.zeros(len(self.schedule), len(self.schedule))
        for stage in self.schedule:
            for one in self.schedule.stages[: stage.index + 1]:
                found[stage.index, one.index] = nearby(stage, one, torch.arange(stage.cells)).float().mean()
        return found

    def received_maps(self) -> list[Tensor]:
        """Attention that the cells of each stage get, [cells], mean over blocks."""
        return [torch.stack(self.received[stage.index]).mean(dim=0) for stage in self.schedule]


def attended(queries: Tensor, keys: Tensor, scale: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields numbers of queries [n] and their attention [n, T], mean over heads, of queries [H, N, D] and keys [H, T, D]."""
    for places in torch.arange(queries.shape[1]).split(QUERIES_AT_A_TIME):
        part = queries[:, places[0] : places[-1] + 1].float()
        yield places, (part @ keys.float().mT * scale).softmax(dim=-1).mean(dim=0)


def nearby(stage: Stage, earlier: Stage, places: Tensor) -> Tensor:
    """Marks the 3 x 3 cells of `earlier` around the one that covers the middle of each of these cells [n] of `stage`: [n, cells]."""
    (height, width), (rows, columns) = stage.size, earlier.size
    row, column = (2 * (places // width) + 1) * rows // (2 * height), (2 * (places % width) + 1) * columns // (2 * width)
    cells = torch.arange(earlier.cells, device=places.device)
    return ((row[:, None] - cells // columns).abs() <= 1) & ((column[:, None] - cells % columns).abs() <= 1)
