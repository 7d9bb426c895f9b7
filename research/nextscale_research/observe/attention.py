"""Where attention looks: how much of it goes to the tokens of each earlier stage, and which cells of its own stage receive most."""

from __future__ import annotations

from collections.abc import Callable
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

    def watch(self, stage: Stage, layer: int, before: Tensor, after: Tensor) -> None:
        found = self.calls.taken()
        if stage.index == 0:  # a single token; some models attend to the text before the first block
            mass = torch.ones(1)
        else:
            queries, keys, scale = found[0]  # the block's own attention; attention to the text comes after it
            mass = received_mass(queries[0], keys[0], scale)[-stage.start - stage.cells :]  # some have the text before the image's tokens
        sizes = [one.cells for one in self.schedule.stages[: stage.index + 1]]
        shares = torch.stack([part.sum() for part in mass.split(sizes)]) / mass.sum()
        self.shares.setdefault(stage.index, []).append(F.pad(shares, (0, len(self.schedule) - len(sizes))).cpu())
        self.received.setdefault(stage.index, []).append(mass[-stage.cells :].cpu())

    def share_matrix(self) -> Tensor:
        """[stages, stages]: of the attention of a stage's tokens, the share that goes to each stage's."""
        return torch.stack([torch.stack(self.shares[stage.index]).mean(dim=0) for stage in self.schedule])

    def received_maps(self) -> list[Tensor]:
        """Attention that the cells of each stage get, [cells], mean over blocks."""
        return [torch.stack(self.received[stage.index]).mean(dim=0) for stage in self.schedule]


def received_mass(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention that each key [H, T, D] gets from all queries [H, N, D], mean over heads: [T]."""
    total = torch.zeros(keys.shape[1], dtype=torch.float32, device=keys.device)
    for part in queries.float().split(QUERIES_AT_A_TIME, dim=1):
        total += (part @ keys.float().mT * scale).softmax(dim=-1).mean(dim=0).sum(dim=0)
    return total
