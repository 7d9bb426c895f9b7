"""SparseVAR as a caller asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ...checks import is_number, is_one_of, is_share, is_whole, require_flags
from ...errors import SettingError
from ...stage import Schedule, Stage
from ..frequency import anchor_count
from ..method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from ..select import require_own_text
from .run import SparseRun
from .settings import (
    CHOICES,
    Anchors,
    LeftOut,
    Metric,
    Resize,
    ScoredRows,
    Select,
    Shares,
    change_blocks,
    checked_blocks,
    checked_keep,
    first_stage,
)

if TYPE_CHECKING:
    from ...models.base import NextScaleModel


@dataclass(frozen=True)
class SparseVAR(Method):
    """Leaves low-frequency tokens out of late stages.

    Where some blocks change their input little, the image is smooth. From stage P on, tokens at such cells do not enter the network, except
    for anchors on a coarse grid. A token that was left out takes the logits of the anchor that it resembled most one stage earlier, and
    is sampled from them on its own; if it resembled none, nothing is added at its cell (FlexVAR: the previous estimate stays). What is left
    out once stays out. Every image of a batch keeps its own cells.

    The knobs that matter:
    tau: cells whose change is below tau times the largest of their image are left out. 0 leaves out nothing, 1 all but the largest. The
        paper gives results for 0.4 to 0.7 and studies everything else at 0.6, hence our default; Infinity bears 0.7, HART 0.5.
    first_stage: the paper's P, the index of the first reduced stage. None is the published one, 10 for Infinity and HART, which is where
        a stage has at least 3/8 of the last one's cells (HART: 18 %); the same share is ours for other schedules and families. Later is
        safer and slower.
    alpha: one anchor in every alpha x alpha cells, at its top left; None keeps no anchors. Small is safer and slower. In HART
        a cell takes its anchor's hidden state too, of which the diffusion makes a residual for the code that the cell itself has sampled.
        FlexVAR has nothing to copy: there alpha has no effect.

    keep: a budget, which takes the place of tau: the share of the cells besides the anchors that a reduced stage computes, those with the
        largest change (metric "logits": least like their neighbours). A number holds for all stages from `first_stage` on;
        {stage index: share} names the reduced stages, and stages between them are dense. All images keep equally many cells, known before,
        so that one graph is captured per stage and the host reads nothing. 0.25 computes about 30 % of the cells.
    anchors: "grid" is the paper's. "content" places as many where they resemble most of the cells that are left out, by the logits of the
        stage before, and lets every computed cell propagate: ours, and nearer to dense images at the same number of tokens
        (docs/methods.md).

    To tinker with:
    beta: the least cosine similarity to an anchor, from -1 (always copy) to 1.
    blocks: the paper's s: (first block, last block + 1), counted from 0, or a single block. The change is measured from the input of the
        first to the output of the last. None is (3/8, 4/8) of the depth for Infinity, (12, 16) of 32, as a third party's program reads
        the paper, and the published block 15 of 24 for HART. Depth does not determine which blocks are good, so it is nano's best, 6 of
        8, for nano, and as deep as that in families for which nothing is published (docs/methods.md).
    metric: "mse" is that change. "logits" leaves out cells whose logits of the stage before resemble their neighbours': more than tau times
        the largest similarity, so here 0 leaves out the most and 1 nothing. "image" compares the images decoded after the two stages
        before, which costs a decoding per stage; the paper takes tau from 0.04 to 0.3 for it. On nano "logits" stays nearest to dense
        images of all that keep as many tokens, and no block has to be known for it: 0.9 is mild, 0.7 bold.
    rows: which rows of a guided pair are scored. "cond": the conditional one, so that dropping the other cfg branch changes nothing;
        "uncond": the unconditional one, or the conditional one where that does not run or has left; "both": their mean, which on nano keeps
        as many cells and comes equally near. Both rows keep the same cells in any case.

    As a third party's program does it, where it differs from the paper:
    select: "threshold" compares the enlarged map with tau times its largest change. "share" counts the cells above tau times the largest
        change on the map of the stage before; the same share of the next stage's cells is kept, those with the largest enlarged change.
    resize: how the maps of changes and of logits are enlarged. With "nearest" a cell takes the values of the cell that covers it.
    left_out: the change at cells that did not run. "carried": that of the stage before; "zero": none.
    candidates: how many anchors a cell is compared with, those nearest on the grid; "all": every anchor of the image.
    edges: whether the last row and the last column have anchors too.

    Where the paper is silent or says two things, we decide. What is left out stays out, as its text says; its algorithm decides anew at
    every stage. So the largest change is that of the cells which are still there: what was left out keeps the map of the stage before,
    in which changes were larger, and would soon leave nothing else. Anchors inside such a region update their change; cells to which no
    anchor propagates keep their logits. The mask of what was left out is resized to the nearest cell, all else as `resize` says.
    Every anchor of the image may propagate to a cell, of equally similar ones the nearest does. "The 3x3 neighbours" are the up to eight
    cells around. Without anchors an image always keeps its most changed cell. Of the two decodings that "image" compares, one is the last
    stage's.

    Budgets are ours. What was left out stays out here too: a budget is at most that of the reduced stage before, unless a dense stage lies
    between, and the cells that are still there come first. Where resizing leaves fewer of them than the budget, the most changed of the
    others fill it up. An anchor counts as still there if it changes as much as the least changed cell of the budget.
    """

    tau: float = 0.6
    beta: float = 0.9
    alpha: int | None = 4
    first_stage: int | None = None
    blocks: tuple[int, int] | int | None = None
    metric: Metric = "mse"
    rows: ScoredRows = "cond"
    select: Select = "threshold"
    resize: Resize = "bilinear"
    left_out: LeftOut = "carried"
    candidates: Literal["all"] | int = "all"
    edges: bool = False
    keep: float | Mapping[int, float] | Shares | None = None
    anchors: Anchors = "grid"

    reduces_stages = True

    def __post_init__(self) -> None:
        if not is_share(self.tau):
            raise SettingError(f"tau is a share of the largest change, from 0 to 1; got {self.tau!r}")
        if not is_number(self.beta) or not -1 <= self.beta <= 1:
            raise SettingError(f"beta is a cosine similarity, from -1 (always copy from an anchor) to 1; got {self.beta!r}")
        if self.alpha is not None and not is_whole(self.alpha, 1):
            raise SettingError(f"alpha is a whole number of cells from 1, or None for no anchors; got {self.alpha!r}")
        for name, choices in CHOICES.items():
            if not is_one_of(getattr(self, name), choices):
                raise SettingError(f"{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.first_stage is not None and not is_whole(self.first_stage, self._earliest):
            why = f"with metric {self.metric} from {self._earliest}, since the stages before it are compared"
            raise SettingError(f"first_stage is a stage index, {why}; got {self.first_stage!r}")
        if not is_one_of(self.candidates, ["all"]) and not is_whole(self.candidates, 1):
            raise SettingError(f'candidates is a whole number of anchors from 1, or "all"; got {self.candidates!r}')
        require_flags(self, "edges")
        if self.anchors == "content" and (self.alpha is None or self.edges or self.candidates != "all"):
            raise SettingError(
                f"anchors=content takes as many anchors as a grid of spacing alpha has, and compares all of them; got alpha={self.alpha},"
                f" edges={self.edges}, candidates={self.candidates}: give an alpha, and leave the others out"
            )
        if self.metric != "mse" and (self.select, self.left_out) != ("threshold", "carried"):
            raise SettingError(
                f"select={self.select!r} and left_out={self.left_out!r} with metric {self.metric}: a share and zeros are of the mse's map;"
                " choose metric mse, or leave them out"
            )
        if self.blocks is not None:
            object.__setattr__(self, "blocks", checked_blocks(self.blocks))
        if self.keep is not None:
            self._check_budget()
            object.__setattr__(self, "keep", checked_keep(self.keep, self._earliest))

    def _check_budget(self) -> None:
        if self.select != "threshold":
            raise SettingError(f"keep={self.keep!r} and select={self.select!r} both say how many cells are kept: leave out one of them")
        if self.first_stage is not None and not is_share(self.keep):
            raise SettingError(
                f"first_stage={self.first_stage} and keep={self.keep!r} both name the first reduced stage: leave out first_stage"
            )

    @property
    def data_dependent(self) -> bool:
        return self.keep is None

    @property
    def _earliest(self) -> int:
        """The smallest `first_stage`: as many stages as the metric compares come before it."""
        return 2 if self.metric == "image" else 1

    def first_reduced(self, model: NextScaleModel, schedule: Schedule) -> int:
        """Index of the first stage that may leave out tokens."""
        if isinstance(self.keep, tuple):
            return self.keep[0][0]
        if self.first_stage is None:
            return first_stage(model, schedule, self._earliest)
        if self.first_stage >= len(schedule):
            choose = f"choose {self._earliest} to {len(schedule) - 1}"
            raise SettingError(f"first_stage={self.first_stage}, but there are {len(schedule)} stages: {choose}")
        return self.first_stage

    def budgets(self, model: NextScaleModel, schedule: Schedule) -> dict[int, int]:
        """The number of tokens, anchors included, of every stage that a budget reduces, by stage index."""
        if self.keep is None:
            return {}
        first, alpha = self.first_reduced(model, schedule), self.anchor_spacing(model)
        shares = dict.fromkeys(range(first, len(schedule)), self.keep) if isinstance(self.keep, float) else dict(self.keep)
        absent = [stage for stage in shares if stage >= len(schedule)]
        if absent:
            raise SettingError(f"keep names stage {absent[0]}, but there are {len(schedule)} stages: choose up to {len(schedule) - 1}")
        budgets, least = {}, 1.0
        for stage in schedule:
            least = min(least, shares[stage.index]) if stage.index in shares else 1.0  # a dense stage brings all cells back
            anchors = anchor_count(stage.size, alpha, self.edges) if alpha else 0
            computed = max(1, anchors + round(least * (stage.cells - anchors)))
            if computed < stage.cells:
                budgets[stage.index] = computed
        return budgets

    def tapped_blocks(self, model: NextScaleModel) -> range:
        """Indices of the blocks across which change is measured."""
        if self.blocks is None:
            return change_blocks(model)
        assert isinstance(self.blocks, tuple)
        depth = len(model.blocks)
        if self.blocks[1] > depth:
            raise SettingError(f"blocks={self.blocks}, but this model has {depth} blocks: choose a part of (0, {depth})")
        return range(*self.blocks)

    def anchor_spacing(self, model: NextScaleModel) -> int | None:
        """`alpha`, or None where a stage's codes replace earlier ones, so that a token left out simply keeps its estimate."""
        return None if model.replaces_codes else self.alpha

    def start(self, setup: RunSetup) -> MethodRun:
        require_own_text(setup.model, setup.batch, "SparseVAR keeps other tokens")
        self.check_together(setup.model, setup.schedule, setup.plans)
        return SparseRun(self, setup)

    def check_together(self, model: NextScaleModel, schedule: Schedule, plans: Plans) -> None:
        if self.keep is None or self.metric == "image":
            return
        first = self.first_reduced(model, schedule)
        for stage in self.budgets(model, schedule):
            if not plans[stage].skip and all(plan.skip for plan in plans[first - 1 : stage]):
                raise SettingError(
                    f"keep: stage {stage} chooses its cells by the stages before it, from {first - 1} on, and all of these are skipped:"
                    " skip others, or give a threshold tau instead"
                )

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        first, blocks, alpha = self.first_reduced(model, schedule), self.tapped_blocks(model), self.anchor_spacing(model)
        taps = tuple(sorted({blocks[0], blocks[-1]}))
        plans, budgets = [], self.budgets(model, schedule)
        for stage in schedule:
            tapped = self.metric == "mse" and first - 1 <= stage.index and not stage.last
            plan = StagePlan(taps=taps) if tapped else DENSE
            if stage.last and model.adds_residual and alpha is not None:
                plan = replace(plan, residual_tokens=stage.cells)  # anchors propagate to the others
            if self.keep is not None:
                plans.append(replace(plan, num_tokens=budgets.get(stage.index)))
                continue
            computed = _forecast_tokens(stage, alpha, self.edges, kept)
            plans.append(replace(plan, num_tokens=computed) if stage.index >= first and computed < stage.cells else plan)
        return tuple(plans)


def _forecast_tokens(stage: Stage, alpha: int | None, edges: bool, kept: float) -> int:
    """Tokens of a stage of which the share `kept` is computed, and the anchors in the rest: about (kept + (1 - kept) / alpha²) cells.

    A stage that may be reduced is forecast so however few its cells are, since a method that needs all of them conflicts with it.
    """
    anchors = anchor_count(stage.size, alpha, edges) if alpha else 0
    computed = math.ceil(kept * stage.cells + (1 - kept) * anchors)
    return max(1, min(computed, stage.cells - 1) if kept < 1 and anchors < stage.cells else computed)
