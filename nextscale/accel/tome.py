"""ToMe (Bolya and Hoffman, 2023): alike tokens are merged before a branch of a block, and all of them take what the merged one got."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from ..errors import SettingError
from ..models.base import NextScaleModel
from ..models.env import Env
from ..models.macs import SublayerTokens
from ..stage import Schedule, Stage, Tokens
from .method import DENSE, Method, RunSetup, Span, StagePlan
from .select import Destinations, Merge, RunCells, block_count, is_index, is_share, merged_count, require_separate_branches

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.blocks import Block

SublayerName = Literal["attention", "cross_attention", "feed_forward"]
LAST_STAGES = 3


@dataclass(frozen=True)
class ToMe(Method):
    """Merges tokens for the time of a branch, as published for diffusion models. One token of every 2x2 block of the grid is a
    destination; of the others, those most like a destination (by the cosine of their residual streams at the start of the block) are
    averaged into it. Keys and values of the merged tokens enter the cache. Every block and every row merges anew.

    The knobs that matter:
    ratio: share of the tokens that is merged away. Destinations stay, so that more than 0.75 merges no more.
    stages: indices of the stages where tokens are merged; None is the last three.

    To tinker with:
    parts: the branches that run on merged tokens, of "attention", "cross_attention" (only models that have it) and "feed_forward".
    random: the destination of every block is drawn for every image and stage, rather than the one at the top left.
    """

    ratio: float = 0.5
    stages: tuple[int, ...] | None = None
    sublayers: tuple[SublayerName, ...] = ("attention", "feed_forward")
    random: bool = False

    def __post_init__(self) -> None:
        if not is_share(self.ratio):
            raise SettingError(f"ratio is a share of the tokens from 0 to 1; got {self.ratio!r}")
        if self.stages is not None:
            object.__setattr__(self, "stages", stage_indices(self.stages))
        object.__setattr__(self, "sublayers", sublayer_names(self.sublayers))

    def start(self, setup: RunSetup) -> Method:
        ran = RunCells(setup.batch) if setup.compute_mask else None
        plans = self._plans(setup.model, setup.schedule, ran)
        branches = sum(len(block.sublayers) for block in setup.model.stack)
        merged = len(self.sublayers) * len(setup.model.blocks)
        return _Run(plans, setup, self.random, ran, branches - merged, branches)

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        return self._plans(model, schedule)

    def _plans(self, model: NextScaleModel, schedule: Schedule, ran: RunCells | None = None) -> tuple[StagePlan, ...]:
        if "cross_attention" in self.sublayers and not all(block.has_text for block in model.stack):
            raise SettingError(f"ToMe: {type(model).__name__} has no cross_attention; parts are attention and feed_forward")
        stages = range(len(schedule))[-LAST_STAGES:] if self.stages is None else self.stages
        absent = [stage for stage in stages if stage >= len(schedule)]
        if absent:
            raise SettingError(f"ToMe: there is no stage {absent[0]}; this schedule has stages 0 to {len(schedule) - 1}")
        plans = [DENSE] * len(schedule)
        for stage in (schedule[index] for index in stages):
            key = f"tome {self.ratio} {'+'.join(self.sublayers)}"
            span = MergedBlocks(range(len(model.blocks)), key, self.ratio, self.sublayers, block_count(stage), ran)
            if self.sublayers and span.num_tokens(stage.cells) < stage.cells:
                require_separate_branches(model, "ToMe")
                plans[stage.index] = StagePlan(spans=(span,))
        return tuple(plans)


def stage_indices(stages: Sequence[int]) -> tuple[int, ...]:
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not all(is_index(stage) for stage in stages):
        raise SettingError(f"stages is a tuple of stage indices, 0 or more; got {stages!r}")
    return tuple(sorted({int(stage) for stage in stages}))


def sublayer_names(parts: Sequence[str] | str) -> tuple[str, ...]:
    """In the order in which a block runs them."""
    names = (parts,) if isinstance(parts, str) else parts
    if not isinstance(names, Sequence) or any(name not in get_args(SublayerName) for name in names):
        raise SettingError(f"parts is a tuple of {', '.join(get_args(SublayerName))}; got {parts!r}")
    return tuple(name for name in get_args(SublayerName) if name in names)


def sublayers_of(block: Block) -> tuple[str, ...]:
    """What the parts of a block are called."""
    return tuple(name for name in get_args(SublayerName) if name != "cross_attention" or block.has_text)


@dataclass(frozen=True)
class MergedBlocks(Span):
    """Runs some branches of its blocks on merged tokens."""

    layers: range
    key: Hashable
    ratio: float
    parts: tuple[SublayerName, ...]
    destinations: int  # of the whole stage
    ran: RunCells | None = field(default=None, compare=False, repr=False)
    priority: Tensor | None = field(default=None, compare=False, repr=False)  # [B, cells], lowest first; None: raster order

    def num_tokens(self, tokens: int) -> int:
        return merged_count(tokens, self.ratio, self.destinations)

    def sublayer_tokens(self, tokens: int) -> SublayerTokens:
        attention, text, feed_forward = (self.num_tokens(tokens) if name in self.parts else tokens for name in get_args(SublayerName))
        return SublayerTokens(attention, text, feed_forward)

    def own_macs(self, tokens: int, dim: int) -> int:
        """One product to compare tokens with destinations, and one for the means of every branch."""
        return len(self.layers) * (1 + len(self.parts)) * tokens * min(tokens, self.destinations) * dim

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        into = Destinations.lowest(tokens, self._priority(x.shape[0], tokens.stage, x.device))
        for block in blocks:
            merge = Merge.closest(x, tokens, into, self.ratio)
            for name, branch in zip(sublayers_of(block), block.sublayers, strict=True):
                merged = name in self.parts
                x = x + (merge.unmerge(branch(merge.merge(x), merge.tokens, env)) if merged else branch(x, tokens, env))
            if self.ran is not None:
                self.ran.add(merge.tokens, len(self.parts))
        return x

    def _priority(self, rows: int, stage: Stage, device: torch.device) -> Tensor:
        if self.priority is None:
            return torch.arange(stage.cells, device=device).expand(rows, -1)
        return self.priority.repeat(rows // self.priority.shape[0], 1)


@dataclass(frozen=True)
class _Run(Method):
    plans: tuple[StagePlan, ...]
    setup: RunSetup
    random: bool
    ran: RunCells | None
    untouched: int  # branches that run on all tokens
    branches: int

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        plan = self.plans[stage.index]
        if not self.random or not plan.spans:
            return plan
        noise = self.setup.rng.uniform((self.setup.batch, stage.cells), self.setup.model.device)
        priority = noise.argsort(dim=1).argsort(dim=1)  # a different number for every cell, even where the noise is equal
        return replace(plan, spans=tuple(replace(span, priority=priority) for span in plan.spans if isinstance(span, MergedBlocks)))

    def compute_mask(self, stage: Stage) -> Tensor | None:
        return None if self.ran is None else self.ran.share(stage, self.untouched, self.branches)
