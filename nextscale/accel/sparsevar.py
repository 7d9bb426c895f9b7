"""SparseVAR (arXiv 2507.20454): from a late stage on, tokens of smooth regions are left out, and a few anchors propagate to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from ..checks import is_share, is_whole
from ..errors import SettingError
from ..stage import Schedule, Stage, Tokens
from .frequency import (
    ROUNDING,
    GridMap,
    ResizeMode,
    anchor_cells,
    anchor_count,
    best_anchor,
    feature_change,
    high_similarity,
    image_change,
    largest,
    largest_cells,
    low_change,
    neighbour_similarity,
    share_above,
)
from .method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from .select import pick, put_, require_own_text

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel

Metric = Literal["mse", "logits", "image"]
ScoredRows = Literal["cond", "uncond", "both"]
Resize = Literal["bilinear", "nearest"]
LeftOut = Literal["carried", "zero"]
Select = Literal["threshold", "share"]
Shares = tuple[tuple[int, float], ...]
CHOICES: Mapping[str, tuple[str, ...]] = {
    "metric": get_args(Metric),
    "rows": get_args(ScoredRows),
    "resize": get_args(Resize),
    "left_out": get_args(LeftOut),
    "select": get_args(Select),
}

PUBLISHED_START = 10
PUBLISHED_BLOCK: Mapping[str, float] = {"infinity": 3 / 32, "hart": 16 / 24}  # of the depth: Infinity-2B, HART-0.7B
OTHER_BLOCK = PUBLISHED_BLOCK["infinity"]  # ours


@dataclass(frozen=True)
class SparseVAR(Method):
    """Leaves low-frequency tokens out of late stages.

    Where one block changes its input little, the image is smooth. From stage P on, tokens at such cells do not enter the network, except
    for anchors on a coarse grid. A token that was left out takes the logits of the anchor that it resembled most one stage earlier, and
    is sampled from them on its own; if it resembled none, nothing is added at its cell (FlexVAR: the previous estimate stays). What is left
    out once stays out. Every image of a batch keeps its own cells.

    The knobs that matter:
    tau: cells whose change is below tau times the largest of their image are left out. 0 leaves out nothing, 1 all but the largest. The
        paper gives results for 0.4 to 0.7 and studies everything else at 0.6, hence our default; Infinity bears 0.7, HART 0.5.
    from_stage: the paper's P, counted from 1: stages before it are dense. None is the published 10 (of 13 and 14), or with at most ten
        stages the last two (ours). Later is safer and slower.
    alpha: one anchor in every alpha x alpha cells, at its top left; None keeps no anchors. Small is safer and slower. HART needs them,
        since its last stage's residual is copied along with the logits. FlexVAR has nothing to copy: there alpha has no effect.

    keep: a budget, which takes the place of tau: the share of the cells besides the anchors that a reduced stage computes, those with the
        largest change (metric "logits": least like their neighbours). A number holds for all stages from `from_stage` on; {stage index from
        0: share} names the reduced stages itself, and stages between them are dense. All images keep equally many cells, known beforehand,
        so that one graph is captured per stage and the host reads nothing. 0.25 computes about 30 % of the cells.

    To tinker with:
    beta: the least cosine similarity to an anchor, from -1 (always copy) to 1.
    block: the paper's s, counted from 1: the block whose change is measured. None is the published one, 3 for Infinity-2B and 16 for
        HART-0.7B, scaled to other depths; other families take Infinity's share of the depth (ours). Depth does not determine which block is
        good: of nano's eight, 1 is careful, 2 to 4 choose wrong cells, 5 to 8 are usable (docs/methods.md, `nextscale observe`).
    metric: "mse" is that change. "logits" leaves out cells whose logits of the stage before resemble their neighbours': more than tau times
        the largest similarity, so here 0 leaves out the most and 1 nothing. "image" compares the images decoded after the two stages
        before, which costs a decoding per stage; the paper takes tau from 0.04 to 0.3 for it. On nano "logits" stays nearest to dense
        images of all that keep as many tokens, and no block has to be known for it: 0.9 is mild, 0.7 bold.
    rows: which rows of a guided pair are scored. "cond": the conditional one, so that dropping the other cfg branch changes nothing;
        "uncond": the unconditional one, or the conditional one where that does not run or has left; "both": their mean, which on nano keeps
        as many cells and comes equally near. Both rows keep the same cells in any case.

    As a third party's program does it, where it differs from the paper:
    blocks: the first block and the last block + 1, counted from 0: the change is measured from the input of the first to the output of the
        last. (12, 16) is the program's for Infinity-2B. None is the single `block`; give one of the two.
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
    from_stage: int | None = None
    block: int | None = None
    metric: Metric = "mse"
    rows: ScoredRows = "cond"
    blocks: tuple[int, int] | None = None
    select: Select = "threshold"
    resize: Resize = "bilinear"
    left_out: LeftOut = "carried"
    candidates: Literal["all"] | int = "all"
    edges: bool = False
    keep: float | Mapping[int, float] | Shares | None = None

    reduces_stages = True

    def __post_init__(self) -> None:
        if not is_share(self.tau):
            raise SettingError(f"tau is a share of the largest change, from 0 to 1; got {self.tau!r}")
        if not isinstance(self.beta, Real) or not -1 <= self.beta <= 1:
            raise SettingError(f"beta is a cosine similarity, from -1 (always copy from an anchor) to 1; got {self.beta!r}")
        if self.alpha is not None and not is_whole(self.alpha, 1):
            raise SettingError(f"alpha is a whole number of cells from 1, or None for no anchors; got {self.alpha!r}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise SettingError(f"{name} is one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.from_stage is not None and not is_whole(self.from_stage, self._earliest):
            why = f"with metric {self.metric} at least {self._earliest}, since the stages before it are compared"
            raise SettingError(f"from_stage is a stage number, counted from 1, {why}; got {self.from_stage!r}")
        if self.block is not None and not is_whole(self.block, 1):
            raise SettingError(f"block is a block number, counted from 1, or None for the published one; got {self.block!r}")
        if self.candidates != "all" and not is_whole(self.candidates, 1):
            raise SettingError(f'candidates is a whole number of anchors from 1, or "all"; got {self.candidates!r}')
        if not isinstance(self.edges, bool):
            raise SettingError(f"edges is True or False; got {self.edges!r}")
        if self.metric != "mse" and (self.select, self.left_out) != ("threshold", "carried"):
            raise SettingError(
                f"select={self.select!r} and left_out={self.left_out!r} with metric {self.metric}: a share and zeros are of the mse's map;"
                " choose metric mse, or leave them out"
            )
        if self.blocks is not None:
            object.__setattr__(self, "blocks", self._checked_blocks(self.blocks))
        if self.keep is not None:
            object.__setattr__(self, "keep", self._checked_keep(self.keep))

    def _checked_blocks(self, blocks: Sequence[int]) -> tuple[int, int]:
        pair = tuple(blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else ()
        if len(pair) != 2 or not all(is_whole(block) for block in pair) or pair[0] >= pair[1]:
            raise SettingError(f"blocks is (first block, last block + 1), counted from 0, such as (12, 16); got {blocks!r}")
        if self.block is not None:
            raise SettingError(f"block={self.block} and blocks={pair} both say where change is measured: leave out one of them")
        return int(pair[0]), int(pair[1])

    def _checked_keep(self, keep: object) -> float | Shares:
        """The share of every reduced stage, or pairs of stage index and share in order."""
        if self.select != "threshold":
            raise SettingError(f"keep={keep!r} and select={self.select!r} both say how many cells are kept: leave out one of them")
        if is_share(keep):
            return float(keep)  # type: ignore[arg-type]
        least = self._earliest - 1
        expected = f"keep is a share from 0 to 1, or {{stage index: share}} with indices from {least}"
        try:
            pairs = [(stage, share) for stage, share in (keep.items() if isinstance(keep, Mapping) else keep)]  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise SettingError(f"{expected}; got {keep!r}") from None
        stages = {stage for stage, share in pairs if is_whole(stage, least) and is_share(share)}
        if not pairs or len(stages) < len(pairs):
            raise SettingError(f"{expected}, each once; got {keep!r}")
        if self.from_stage is not None:
            raise SettingError(f"from_stage={self.from_stage} and keep={keep!r} both name the first reduced stage: leave out from_stage")
        return tuple(sorted((int(stage), float(share)) for stage, share in pairs))

    @property
    def data_dependent(self) -> bool:
        return self.keep is None

    @property
    def _earliest(self) -> int:
        """The smallest `from_stage`: as many stages as the metric compares come before it."""
        return 3 if self.metric == "image" else 2

    def first_reduced(self, schedule: Schedule) -> int:
        """Index of the first stage that may leave out tokens."""
        stages = len(schedule)
        if isinstance(self.keep, tuple):
            return self.keep[0][0]
        if self.from_stage is None:
            start = PUBLISHED_START if stages > PUBLISHED_START else max(self._earliest, stages - 1)
        elif self.from_stage > stages:
            raise SettingError(f"from_stage={self.from_stage}, but there are {stages} stages: choose {self._earliest} to {stages}")
        else:
            start = self.from_stage
        return start - 1

    def budgets(self, model: NextScaleModel, schedule: Schedule) -> dict[int, int]:
        """The number of tokens, anchors included, of every stage that a budget reduces, by stage index."""
        if self.keep is None:
            return {}
        first, alpha = self.first_reduced(schedule), self.anchor_spacing(model)
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

    def tapped_layer(self, model: NextScaleModel) -> int:
        """Index of the block whose change is measured."""
        depth = len(model.blocks)
        if self.block is None:
            return max(1, round(PUBLISHED_BLOCK.get(model.family, OTHER_BLOCK) * depth)) - 1
        if self.block > depth:
            raise SettingError(f"block={self.block}, but this model has {depth} blocks: choose 1 to {depth}")
        return self.block - 1

    def tapped_blocks(self, model: NextScaleModel) -> range:
        """Indices of the blocks across which change is measured."""
        depth = len(model.blocks)
        if self.blocks is None:
            layer = self.tapped_layer(model)
            return range(layer, layer + 1)
        if self.blocks[1] > depth:
            raise SettingError(f"blocks={self.blocks}, but this model has {depth} blocks: choose a part of (0, {depth})")
        return range(*self.blocks)

    def anchor_spacing(self, model: NextScaleModel) -> int | None:
        """`alpha`, or None where a stage's codes replace earlier ones, so that a token left out simply keeps its estimate."""
        return None if model.replaces_codes else self.alpha

    def start(self, setup: RunSetup) -> MethodRun:
        require_own_text(setup.model, setup.batch, "SparseVAR keeps other tokens")
        run = SparseRun(self, setup)
        for stage in run.budgets if self.metric != "image" else ():
            if not setup.plans[stage].skip and all(plan.skip for plan in setup.plans[run.first - 1 : stage]):
                raise SettingError(
                    f"keep: stage {stage} chooses its cells by the stages before it, from {run.first - 1} on, and all of these are skipped:"
                    " skip others, or give a threshold tau instead"
                )
        return run

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        first, blocks, alpha = self.first_reduced(schedule), self.tapped_blocks(model), self.anchor_spacing(model)
        taps = tuple(sorted({blocks[0], blocks[-1]}))
        plans, budgets = [], self.budgets(model, schedule)
        for stage in schedule:
            tapped = self.metric == "mse" and first - 1 <= stage.index and not stage.last
            plan = StagePlan(taps=taps) if tapped else DENSE
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


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which cells of a stage enter the network."""

    excluded: Tensor  # [B, cells], of low frequency; anchors among them are kept all the same
    kept: Tensor  # [B, cells]
    counts: Tensor  # [B], of kept cells
    fewest: int = 0  # the smallest count
    num_tokens: int = 0  # the largest count, or a bucket size above it

    @property
    def reduces(self) -> bool:
        """Whether any image leaves out a cell."""
        return self.fewest < self.kept.shape[1]

    def tokens(self, stage: Stage) -> Tokens:
        """The kept tokens of every image, in raster order."""
        keep: int | Tensor = self.num_tokens
        if self.fewest < self.num_tokens:  # images keep different numbers of tokens
            # Bucket sizes that are too small are captured too, from images that need more, and never replayed.
            keep = self.counts.clamp(max=self.num_tokens)
        _, tokens = Tokens(stage).top(self.kept.float(), keep, self.num_tokens)
        return tokens


@dataclass(frozen=True, slots=True)
class AnchorMap:
    """The computed token from which each token of a stage takes its output."""

    tokens: Tokens  # those that were computed and those that an anchor propagates to
    source: Tensor  # [B, cells], the position of each token's source among the computed ones

    def propagate(self, values: Tensor) -> Tensor:
        """Values [B, N, ...] of the computed tokens at all tokens that have a source, [B, cells, ...]."""
        return pick(values.flatten(2), self.source).unflatten(2, values.shape[2:])


@dataclass(eq=False)
class SparseRun(MethodRun):
    """One request of SparseVAR. Its changes, exclusion mask and logits of the last stage choose the cells of the next one."""

    settings: SparseVAR
    setup: RunSetup
    change: GridMap | None = None  # across the tapped blocks, [B, cells, 1]
    entered: Tensor | None = None  # the input of the first tapped block, until the last one has run
    excluded: GridMap | None = None  # 1 where cells were excluded at the last stage that ran, [B, cells, 1]
    logits: GridMap | None = None  # of the last stage that ran, for every cell
    image: Tensor | None = None  # decoded before the last stage that ran
    choice: _Choice | None = None  # of the stage that runs; None: all cells
    anchor_map: AnchorMap | None = None  # of the stage that runs, once its logits are restored
    first: int = field(init=False)
    blocks: range = field(init=False)
    alpha: int | None = field(init=False)
    budgets: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.settings.first_reduced(self.setup.schedule)
        self.blocks = self.settings.tapped_blocks(self.setup.model)
        self.alpha = self.settings.anchor_spacing(self.setup.model)
        self.budgets = self.settings.budgets(self.setup.model, self.setup.schedule)

    # --- which tokens are computed

    def count_tokens(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        if self.settings.keep is not None:
            return None  # known beforehand
        self.anchor_map = None
        self.choice = self._choose(stage, canvas)
        return None if self.choice is None else self.choice.counts

    def set_counts(self, fewest: int, num_tokens: int) -> None:
        assert self.choice is not None
        self.choice = replace(self.choice, fewest=fewest, num_tokens=num_tokens)

    def plan(self, planned: StagePlan, stage: Stage, canvas: Canvas) -> StagePlan:
        if self.settings.keep is not None:
            self.anchor_map = None
            self.choice = self._choose_budget(stage, canvas)
            return planned
        return replace(planned, num_tokens=self.choice.num_tokens if self.choice is not None and self.choice.reduces else None)

    def state_tensors(self) -> list[Tensor]:
        return [grid.values for grid in (self.change, self.excluded, self.logits) if grid is not None]

    def _choose(self, stage: Stage, canvas: Canvas) -> _Choice | None:
        """Which cells the stage computes; None as long as nothing is known about them."""
        left_out = self._left_out(stage)
        detail = self._detail(stage, canvas)
        if detail is None:
            return None
        excluded = self._low(detail, stage, left_out)
        before = torch.zeros_like(excluded) if left_out is None else left_out
        excluded = excluded | before
        if self.alpha is None:
            most = detail.masked_fill(before, -torch.inf).argmax(dim=1, keepdim=True)
            kept = ~excluded.scatter_(1, most, False)
        else:
            kept = (~excluded).index_fill_(1, self._anchors(stage, self.alpha, excluded.device), True)
        return _Choice(excluded, kept, kept.sum(dim=1))

    def _choose_budget(self, stage: Stage, canvas: Canvas) -> _Choice | None:
        """Which cells the stage computes, as many as its budget says in every image; None: all."""
        detail, num_tokens = self._detail(stage, canvas), self.budgets.get(stage.index)
        if detail is None or num_tokens is None:
            return None
        before = self._left_out(stage)
        before = torch.zeros_like(detail, dtype=torch.bool) if before is None else before
        anchors = torch.zeros_like(before)
        spare = num_tokens
        if self.alpha is not None:
            spare -= anchor_count(stage.size, self.alpha, self.settings.edges)
            anchors.index_fill_(1, self._anchors(stage, self.alpha, detail.device), True)
        order = detail.argsort(dim=1, descending=True, stable=True)  # of equals the first
        last = (before + 2 * anchors.int()).gather(1, order).argsort(dim=1, stable=True)  # anchors are kept besides
        best = order.gather(1, last[:, :spare])
        chosen = torch.zeros_like(before).scatter_(1, best, True)
        least = detail.masked_fill(~chosen, torch.inf).amin(dim=1, keepdim=True)
        excluded = torch.where(anchors, before | (detail < least), ~chosen)
        return _Choice(excluded, chosen | anchors, chosen.new_full((len(chosen),), num_tokens, dtype=torch.int64), num_tokens, num_tokens)

    def _left_out(self, stage: Stage) -> Tensor | None:
        """Which cells lie where the last stage that ran has excluded some, [B, cells]."""
        mode: ResizeMode = "nearest" if self.settings.resize == "nearest" else "nearest-exact"
        return None if self.excluded is None else self.excluded.at(stage.size, mode)[..., 0] > 0.5

    def _anchors(self, stage: Stage, alpha: int, device: torch.device) -> Tensor:
        return anchor_cells(stage.size, alpha, device, self.settings.edges)

    def _detail(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """How much detail every cell has, [B, cells]; None as long as nothing is known."""
        metric = self.settings.metric
        if metric == "image" and stage.index >= self.first - 1:
            before, self.image = self.image, canvas.decode()
            return None if before is None else image_change(before, self.image, stage.size)
        if stage.index < self.first:
            return None
        if metric == "logits":
            return None if self.logits is None else -neighbour_similarity(self.logits.at(stage.size, self.settings.resize), stage.size)
        return None if self.change is None else self.change.at(stage.size, self.settings.resize)[..., 0]

    def _low(self, detail: Tensor, stage: Stage, left_out: Tensor | None) -> Tensor:
        """Which cells have little detail, [B, cells]."""
        tau = self.settings.tau
        if self.settings.metric == "logits":
            return high_similarity(-detail, tau, left_out)
        if self.settings.select == "threshold":
            return low_change(detail, tau, left_out)
        return ~largest_cells(detail, (self._share_above() * stage.cells).long())

    def _share_above(self) -> Tensor:
        """The share of all cells above the threshold at the stage before, [B]. Changes that were carried there do not count."""
        assert self.change is not None
        change = self.change.values[..., 0]
        if self.settings.left_out == "carried" and self.excluded is not None:
            change = change.masked_fill(self.excluded.values[..., 0] > 0.5, 0)
        return share_above(change, self.settings.tau, largest(change, None))

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        if self.choice is None:
            if self.settings.keep is not None:
                self.excluded = None  # all cells are computed, and there again
            return x, tokens
        self.excluded = GridMap(self.choice.excluded[..., None].float(), tokens.stage.size)
        if not self.choice.reduces:
            return x, tokens
        kept = self.choice.tokens(tokens.stage).repeat(x.shape[0] // self.setup.batch)  # both rows of a guided pair keep the same cells
        return kept.gather(x), kept

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        if self.settings.metric != "mse" or tokens.stage.index < self.first - 1:
            return
        if layer == self.blocks[0]:
            self.entered = before
        if layer == self.blocks[-1] and self.entered is not None:
            before, self.entered = self.entered, None
            self._take_change(before, after, tokens)

    def _take_change(self, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        """Updates the map where tokens were computed."""
        size = tokens.stage.size
        change, tokens = tokens.on_grid(self._of_images(feature_change(before, after))[..., None])
        earlier = change if self.change is None else self.change.at(size, self.settings.resize)
        if self.settings.left_out == "zero":
            earlier = torch.zeros_like(earlier)
        self.change = GridMap(tokens.rows(slice(0, self.setup.batch)).scatter(change, earlier), size)

    def _of_images(self, rows: Tensor) -> Tensor:
        """Scores [R, N] of the rows that run, of both cfg branches or one, as scores [B, N] of the images."""
        batch = self.setup.batch
        if self.settings.rows == "both":
            return rows.unflatten(0, (-1, batch)).mean(dim=0)
        return rows[:batch] if self.settings.rows == "cond" else rows[-batch:]

    # --- what the tokens that were left out take

    def restore(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        stage = tokens.stage
        compared = self.alpha is not None or self.settings.metric == "logits"
        if not compared or stage.index < self.first - 1:
            return out, tokens
        if tokens.index is None:
            self.logits = GridMap(out.flatten(2), stage.size)
        elif self.logits is not None:
            expected = self.logits.at(stage.size, self.settings.resize)
            if self.alpha is not None:
                self.anchor_map = self._anchor_map(expected, self.alpha, stage)
                out, tokens = self.anchor_map.propagate(out), self.anchor_map.tokens
            if not stage.last and tokens.index is not None:
                # Written in place: such maps are large, 64 MiB an image for 64x64 cells of 4096 codes.
                self.logits = GridMap(put_(expected, tokens.index, out.flatten(2)), stage.size)
        return out, tokens

    def _anchor_map(self, expected: Tensor, alpha: int, stage: Stage) -> AnchorMap:
        """Matches every cell that was left out with the anchor most similar to it, by the logits expected at both."""
        assert self.choice is not None
        kept = self.choice.kept
        nearest = None if self.settings.candidates == "all" else self.settings.candidates
        similarity, anchor = best_anchor(expected, self._anchors(stage, alpha, kept.device), stage.size, nearest)
        source = torch.where(kept, torch.arange(stage.cells, device=kept.device), anchor)
        known = kept | (similarity >= self.settings.beta - ROUNDING)
        cells, tokens = Tokens(stage).top(known.float(), known.sum(dim=1), stage.cells)
        place = (kept.cumsum(dim=1) - 1).clamp(max=self.choice.num_tokens - 1)  # of a kept cell among all kept ones
        return AnchorMap(tokens, place.gather(1, source.gather(1, cells)))

    def restore_residual(self, residual: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        return (residual, tokens) if self.anchor_map is None else (self.anchor_map.propagate(residual), self.anchor_map.tokens)
