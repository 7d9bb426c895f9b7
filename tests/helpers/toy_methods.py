"""Small methods that tests of other methods combine them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nextscale.canvas import Canvas
from nextscale.guidance import CfgBranches
from nextscale.methods.method import Method, MethodRun, Plans, RunSetup, Span, StagePlan, TokenCounts
from nextscale.methods.sparsevar import SparseRun, SparseVAR
from nextscale.methods.sparsevar_cells import Cells
from nextscale.methods.stagevar import representatives
from nextscale.models import NextScaleModel
from nextscale.models.blocks import Block
from nextscale.models.context import ForwardContext
from nextscale.stage import Schedule, Stage, Tokens
from tests.helpers import tiny

STAGES = {family: len(tiny.schedule_of(family)) for family in tiny.FAMILIES}


@dataclass(frozen=True)
class RunBlocks(Span):
    """A span that runs its blocks as generation would."""

    layers: range
    key: str = "identity"

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        for block in blocks:
            x = block(x, tokens, ctx)
        return x


# --- plans


@dataclass(frozen=True)
class Planned(Method):
    """Calls a function of the stage, and keeps the planned number of first tokens."""

    of_stage: Callable[[Stage], StagePlan]

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return tuple(self.of_stage(stage) for stage in schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        return PlannedRun(self)


@dataclass(frozen=True)
class PlannedRun(MethodRun):
    method: Planned

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        num_tokens = self.method.of_stage(tokens.stage).num_tokens
        return tokens if num_tokens is None else first_tokens(x, tokens, num_tokens)


def first_tokens(x: Tensor, tokens: Tokens, num_tokens: int) -> Tokens:
    selection = torch.arange(num_tokens).expand(x.shape[0], -1)
    return tokens.take(selection, None if tokens.count is None else tokens.count.clamp(max=num_tokens))


def keeping(branches: CfgBranches, first: int) -> Planned:
    """Returns a method that keeps only these CFG rows from stage `first` on."""
    return Planned(lambda stage: StagePlan(cfg_branches=branches if stage.index >= first else "both"))


def one_from(family: str, first: int) -> list[float]:
    """Returns guidance up to stage `first`, and none from there on."""
    return [2.5 if stage < first else 1.0 for stage in range(STAGES[family])]


# --- reduced stages


@dataclass(frozen=True)
class KeepShare(Method):
    """Keeps a share of each image's tokens from a stage on, chosen by a score that is the same for all images. No forecast says so."""

    shares: tuple[float, ...]
    from_stage: int = 1
    exclusive = frozenset({"tokens"})

    def start(self, setup: RunSetup) -> MethodRun:
        return KeepShareRun(self)


@dataclass(frozen=True)
class KeepShareRun(MethodRun):
    method: KeepShare

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        return tokens if tokens.stage.index < self.method.from_stage else top_tokens(x, tokens, self.method.shares)


def counts_of(shares: Sequence[float], stage: Stage) -> list[int]:
    """Returns the number of tokens that each image keeps at a stage."""
    return [max(1, round(share * stage.cells)) for share in shares]


def top_tokens(x: Tensor, tokens: Tokens, shares: Sequence[float]) -> Tokens:
    """Selects a share of each image's tokens by a score that depends only on the stage, padded if shares differ."""
    cells = tokens.stage.cells
    score = torch.rand(cells, generator=torch.Generator().manual_seed(cells)).expand(x.shape[0], -1)
    counts = counts_of(shares, tokens.stage)
    keep: int | Tensor = counts[0]
    if len(set(counts)) > 1:
        keep = torch.tensor(counts).repeat(x.shape[0] // len(counts))
    return tokens.top(score, keep, max(counts))[1]


# --- hooks as generation calls them


def counted(run: MethodRun, stage: Stage, canvas: Canvas | None = None) -> TokenCounts | None:
    """Returns the counts of a stage as read by the host."""
    counts = run.count(stage, canvas)  # type: ignore[arg-type]
    numbers = None if counts is None else counts.tolist()
    return None if numbers is None else TokenCounts(min(numbers), max(numbers), sum(numbers))


def entered(run: MethodRun, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
    """Returns the padded rows that enter the first block, and their tokens."""
    kept = run.select_tokens(x, tokens)
    if kept.index is None:
        return x, kept
    kept = kept.repeat(x.shape[0] // kept.index.shape[0])
    return kept.gather(x), kept


# --- skipped stages


@dataclass(frozen=True)
class SkipUnannounced(Method):
    """Skips a stage that its forecast does not skip."""

    stage: int

    def start(self, setup: RunSetup) -> MethodRun:
        return SkipUnannouncedRun(self.stage)


@dataclass(frozen=True)
class SkipUnannouncedRun(MethodRun):
    stage: int

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        return replace(planned, skip=True) if stage.index == self.stage else planned


# --- choices that rounding may turn


class HeldRepresentatives:
    """Records the tokens that represent StageVAR's rows in one call, and repeats them for some of its images in other calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
        self.batch = batch
        self.recorded: list[Tensor] = []  # per group of blocks: [branches * batch, rank]
        self.waiting: list[Tensor] | None = None  # None while it records
        monkeypatch.setattr("nextscale.methods.stagevar.representatives", self.choose)

    def choose(self, weight: Tensor, noise: Tensor, rank: int, count: Tensor | None = None) -> Tensor:
        if self.waiting is None:
            self.recorded.append(representatives(weight, noise, rank, count))
            return self.recorded[-1]
        return self.waiting.pop(0)

    def repeat_for(self, images: list[int]) -> None:
        """Makes the next call generate these images of the recorded batch."""
        assert self.recorded and not self.waiting
        by_branch = [chosen.unflatten(0, (-1, self.batch)) for chosen in self.recorded]
        self.waiting = [chosen[:, images].flatten(0, 1) for chosen in by_branch]


@dataclass(frozen=True)
class PlantedCounts(SparseVAR):
    """SparseVAR whose images keep shares of the cells that are spread evenly from 0.2 to 1, whatever the images show."""

    def start(self, setup: RunSetup) -> MethodRun:
        return PlantedRun(self, setup)


class PlantedRun(SparseRun):
    settings: PlantedCounts

    def choose_cells(self, stage: Stage, canvas: Canvas) -> Cells | None:
        if stage.index < self.first:
            return None
        device = canvas.latent.device
        order = torch.arange(stage.cells, device=device) * 40503 % 65521  # scattered, and made on the device: this is captured
        if self.alpha is not None:
            order = order.index_fill(0, self.grid_anchors(stage, device), -1)
        counts = (torch.linspace(0.2, 1, self.setup.batch, device=device) * stage.cells).round().long().clamp(min=1)
        kept = order.argsort(stable=True).argsort() < counts[:, None]  # [B, cells]
        return Cells(~kept, kept)
