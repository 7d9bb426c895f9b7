"""Measures the ranks of hidden states, and makes rank tables for StageVAR."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingError
from ..methods.combine import Combined
from ..methods.stagevar import ALPHA, StageVAR
from ..methods.stagevar_ranks import RankRow, RankTable, energy_ranks, group_layers, identity
from ..pipeline import Pipeline
from ..schedules import SizeLike
from ..stage import Schedule, Stage
from .probe import FeatureProbe


def energies(x: Tensor, centered: bool = False) -> Tensor:
    """Returns squared singular values of x [B, N, C], largest first, [B, min(N, C)], in float64 on the CPU.

    centered: without the mean of the tokens.

    They are eigenvalues of the products along the shorter side, which a GPU forms quickly; it is slow at decomposing many matrices.
    """
    x = x.double()
    x = x - x.mean(dim=1, keepdim=True) if centered else x
    products = x @ x.mT if x.shape[1] < x.shape[2] else x.mT @ x
    return torch.linalg.eigvalsh(products.cpu()).flip(1).clamp(min=0)


@dataclass
class RankWatcher:
    """Ranks of the inputs of some blocks, for a `FeatureProbe`."""

    layers: Sequence[int]
    alphas: Sequence[float]
    rows: int | None = None  # the first rows of the batch; None: all
    centered: bool = False
    found: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)  # (stage, block): [alphas, rows] of every request

    def watch(self, stage: Stage, layer: int, before: Tensor, after: Tensor) -> None:
        if layer in self.layers and self.rows != 0:
            spectrum = energies(before[: self.rows], self.centered)
            ranks = torch.stack([energy_ranks(spectrum, alpha) for alpha in self.alphas]).double()
            self.found.setdefault((stage.index, layer), []).append(ranks)


def measure_ranks(
    pipe: Pipeline,
    prompts: Iterable[Any],
    alphas: Sequence[float] = (ALPHA,),
    method: StageVAR | None = None,
    seed: int = 0,
    on_image: Callable[[], None] = lambda: None,
    size: SizeLike = None,
    centered: bool = False,
) -> dict[tuple[float, int], Tensor]:
    """Returns rank ratios [groups, images] by alpha and stage, of all stages without guidance.

    Generates one image per prompt at full rank, the i-th with seed + i, guidance off where `method` (StageVAR()) says, and without its
    skips. The paper took 553 prompts; the spread over prompts is a tenth of the mean. centered: of features without the mean of their
    tokens, as the published tables; False is equation 4.
    """
    method = StageVAR() if method is None else method
    schedule = pipe.settings.schedules.choose(size, None)
    measured = range(first := method.first_unguided(pipe.model, schedule), len(schedule))
    layers = tuple(blocks.start for blocks in group_layers(pipe.model, method.groups))
    watcher = RankWatcher(layers, alphas, centered=centered)
    dense = replace(method, guidance_off=first, alphas=(), ranks=None, as_released=False)
    probed = Combined((dense, FeatureProbe((watcher.watch,), layers, frozenset(measured))))
    for image, prompt in enumerate(prompts):
        pipe(prompt, seed=seed + image, method=probed, size=schedule)
        on_image()
    if not watcher.found:
        raise SettingError("prompts and stages without guidance must not be empty to measure ranks.")
    found: dict[tuple[float, int], Tensor] = {}
    for stage in measured:
        ranks = torch.stack([torch.cat(watcher.found[stage, layer], dim=1) for layer in layers], dim=1)  # [alphas, groups, images]
        largest = min(schedule[stage].cells, pipe.model.block_config.dim)
        found |= {(alpha, stage): ranks[number] / largest for number, alpha in enumerate(alphas)}
    return found


def measure_table(
    pipe: Pipeline,
    prompts: Sequence[Any],
    schedules: Sequence[Schedule],
    alphas: Sequence[float],
    seed: int = 0,
    on_image: Callable[[], None] = lambda: None,
    centered: bool = False,
) -> RankTable:
    """Returns a table for all stages of these schedules without guidance; stages with equally many cells share a row."""
    found: dict[tuple[float, int], list[Tensor]] = {}
    for schedule in schedules:
        ranks = measure_ranks(pipe, prompts, alphas, seed=seed, on_image=on_image, size=schedule, centered=centered)
        for (alpha, stage), ratios in ranks.items():
            found.setdefault((float(alpha), schedule[stage].cells), []).append(ratios)
    rows = []
    for (alpha, cells), parts in found.items():
        ratios = torch.cat(parts, dim=1)
        mean, deviation = (rounded(values) for values in (ratios.mean(dim=1), ratios.std(dim=1, correction=0)))
        rows.append(RankRow(alpha, cells, mean, deviation))
    return RankTable(*identity(pipe.model), tuple(sorted(rows)))


def rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values.tolist())
