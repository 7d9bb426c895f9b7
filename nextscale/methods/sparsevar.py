"""SparseVAR (arXiv 2507.20454): late stages leave out tokens of smooth regions, and a few anchors propagate to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import SettingError
from ..stage import Schedule, Stage, Tokens, topk_indices_sorted
from ..validation import (
    block_range,
    blocks_of,
    is_fraction,
    is_int,
    is_number,
    require,
    require_choice,
    require_flags,
    require_stages,
    sorted_pairs,
)
from .method import Method, MethodRun, Plans, Restored, RunSetup, StagePlan, TokenCounts
from .sparsevar_cells import (
    ROUNDING,
    Cells,
    GridMap,
    anchor_cells,
    anchor_count,
    best_anchor,
    covering_cells,
    feature_change,
    image_change,
    in_steps,
    largest,
    largest_cells,
    neighbor_similarity,
    share_above,
)
from .token_ops import marked_tokens, most_similar, pick, put_, require_own_text, with_counts

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel

Metric = Literal["mse", "logits", "image"]
Anchors = Literal["grid", "content"]
Shares = tuple[tuple[int, float], ...]


FIRST_SHARE = (
    3 / 8
)  # cells of the first reduced stage, of the last one's: index 10 of Infinity's schedules of 13 stages, where index 9 has 1/4
HART_SHARE = (27 / 64) ** 2
NANO = ("infinity", 8)
BLOCKS = {"infinity": (3 / 8, 4 / 8), "hart": (15 / 24, 16 / 24)}
OTHER_BLOCKS = (6 / 8, 7 / 8)  # ours: as measured on nano
"""First block and last + 1 across which change is measured, as shares of the depth: chunk 3 of 8 of Infinity."""
RELEASED_CANDIDATES = 4


def first_late(model: NextScaleModel, schedule: Schedule) -> int:
    """Returns the published first reduced stage: index 10 for Infinity and HART, and the same share of the last stage's cells elsewhere."""
    least = (HART_SHARE if model.family == "hart" else FIRST_SHARE) * schedule[-1].cells
    return next(stage.index for stage in schedule if stage.cells >= least)


@dataclass(frozen=True)
class SparseVAR(Method):
    """Leaves low-frequency tokens out of late stages.

    Where some blocks change their input little, the image is smooth. From a late stage on, tokens at such cells do not enter the network,
    except for anchors on a coarse grid. A token that was left out takes the logits of the anchor that it resembled most one stage earlier
    and is sampled from them separately; if it resembled none, nothing is added at its cell. A cell that was left out stays out, and every
    image of a batch keeps its own cells. docs/methods/sparsevar.md lists choices that the paper leaves open.

    tau: cells whose change is below tau times the largest of their image are left out: 0 leaves out none, 1 all but the largest. The
        paper gives results for 0.4 to 0.7.
    keep: a budget instead of tau: the share of the cells besides the anchors that a reduced stage computes, those with the largest
        change. A number holds for all stages from `first_stage` on; {stage index: share} names the reduced stages. All images then keep
        equally many cells, a number known in advance. 0.25 computes about 30 % of the cells.
    first_stage: index of the first reduced stage. None is the published one, 10 for Infinity and HART, and the same share of the last
        stage's cells for other schedules and families. Later is safer and slower.
    alpha: one anchor in every alpha x alpha cells, at its top left; None: no anchors. Small is safer and slower. No effect on FlexVAR.
    anchors: "grid" is the paper's. "content" places as many where they resemble most of the cells that are left out, by the logits of the
        stage before, and lets every computed cell propagate: nearer to dense images at the same number of tokens.
    metric: "mse" is the change described above. "logits" leaves out cells whose logits of the stage before resemble their neighbors': more
        than tau times the largest similarity, so that 0 leaves out the most and 1 none; on nano it stays nearest to dense images (0.9 is
        mild, 0.7 bold). "image" compares the images decoded after the two stages before; the paper takes tau from 0.04 to 0.3 for it.
    beta: smallest cosine similarity to an anchor, from -1 (always copy) to 1.
    blocks: (first block, last block + 1), or a single block, across which "mse" is measured. None: (12, 16) of 32 for Infinity, block 15 of
        24 for HART (the paper's 16th, counted from 1; 16 if it counts as P does), 6 of 8 for nano, its best, and as deep in other families.
    as_released: chooses cells as a third party's program does. Both rows of a guided pair are scored. As many cells stay as changed by
        more than tau times the largest at the stage before, counted before enlarging; maps are enlarged to the covering cell; cells that
        did not run have no change; each cell is compared with the 4 nearest anchors; the last row and column have anchors too.
    """

    tau: float = 0.6
    beta: float = 0.9
    alpha: int | None = 4
    first_stage: int | None = None
    blocks: tuple[int, int] | int | None = None
    metric: Metric = "mse"
    keep: float | Mapping[int, float] | Shares | None = None
    anchors: Anchors = "grid"
    as_released: bool = False

    exclusive = frozenset({"tokens"})

    def __post_init__(self) -> None:
        require(is_fraction(self.tau), "tau", "a number from 0 to 1", self.tau)
        require(is_number(self.beta) and -1 <= self.beta <= 1, "beta", "a number from -1 to 1", self.beta)
        require(self.alpha is None or is_int(self.alpha, 1), "alpha", "an integer from 1, or None for no anchors", self.alpha)
        require_choice("metric", self.metric, get_args(Metric))
        require_choice("anchors", self.anchors, get_args(Anchors))
        require_flags(self, "as_released")
        expected = f"a stage index from {self._earliest}, since metric {self.metric} compares the stages before it"
        require(self.first_stage is None or is_int(self.first_stage, self._earliest), "first_stage", expected, self.first_stage)
        require(self.anchors == "grid" or self.alpha is not None, "alpha", 'an integer with anchors="content"', self.alpha)
        if self.as_released and (self.metric, self.anchors, self.keep) != ("mse", "grid", None):
            raise SettingError("as_released fixes metric, anchors and keep: leave them out, or as_released.")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", block_range("blocks", self.blocks))
        if is_fraction(self.keep):
            object.__setattr__(self, "keep", float(self.keep))  # type: ignore[arg-type]
        elif self.keep is not None:
            expected = "a number from 0 to 1"
            keep = sorted_pairs("keep", self.keep, expected, is_fraction, least=self._earliest)
            require(keep, "keep", f"{expected}, or {{stage index: number}}", self.keep)
            if self.first_stage is not None:
                raise SettingError(f"keep={self.keep!r} names the first reduced stage: leave out first_stage.")
            object.__setattr__(self, "keep", keep)

    @property
    def data_dependent(self) -> bool:
        return self.keep is None

    @property
    def _earliest(self) -> int:
        """The smallest `first_stage`: the metric compares as many stages before it."""
        return 2 if self.metric == "image" else 1

    def first_reduced(self, model: NextScaleModel, schedule: Schedule) -> int:
        if isinstance(self.keep, tuple):
            return self.keep[0][0]
        if self.first_stage is not None:
            require_stages("first_stage", [self.first_stage], len(schedule))
            return self.first_stage
        return max(self._earliest, first_late(model, schedule))

    def budgets(self, model: NextScaleModel, schedule: Schedule) -> dict[int, int]:
        """Returns the number of tokens, anchors included, of every stage that a budget reduces, by stage index."""
        if self.keep is None:
            return {}
        first = self.first_reduced(model, schedule)
        shares = dict.fromkeys(range(first, len(schedule)), self.keep) if isinstance(self.keep, float) else dict(self.keep)
        require_stages("keep", shares, len(schedule))
        budgets, least = {}, 1.0
        for stage in schedule:
            least = min(least, shares[stage.index]) if stage.index in shares else 1.0  # a dense stage brings all cells back
            anchors = self.anchor_count(model, stage)
            computed = max(1, anchors + round(least * (stage.cells - anchors)))
            if computed < stage.cells:
                budgets[stage.index] = computed
        return budgets

    def observed_blocks(self, model: NextScaleModel) -> range:
        """Returns the blocks across which change is measured."""
        depth = len(model.blocks)
        if self.blocks is not None:
            return blocks_of("blocks", self.blocks, depth)  # type: ignore[arg-type]
        shares = OTHER_BLOCKS if (model.family, depth) == NANO else BLOCKS.get(model.family, OTHER_BLOCKS)
        first, stop = (math.floor(share * depth) for share in shares)
        return range(first, max(first + 1, stop))

    def anchor_spacing(self, model: NextScaleModel) -> int | None:
        """Returns `alpha`, or None if a stage's codes replace earlier ones (FlexVAR), so that a token left out keeps its estimate."""
        return None if model.replaces_codes else self.alpha

    def anchor_count(self, model: NextScaleModel, stage: Stage) -> int:
        alpha = self.anchor_spacing(model)
        return anchor_count(stage.size, alpha, self.as_released) if alpha else 0

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        first, blocks, tokens = self.first_reduced(model, schedule), self.observed_blocks(model), self.budgets(model, schedule)
        if self.keep is None:
            tokens = {stage.index: self._expected_tokens(model, stage, kept) for stage in schedule.stages[first:]}
        observed = tuple(sorted({blocks[0], blocks[-1]})) if self.metric == "mse" else ()
        propagates = model.adds_residual and self.anchor_spacing(model) is not None
        return tuple(
            StagePlan(
                observed=observed if first - 1 <= stage.index and not stage.last else (),
                num_tokens=tokens.get(stage.index),  # all cells, too: spans that need every cell are refused before anything runs
                propagates=stage.cells if stage.last and propagates else None,
            )
            for stage in schedule
        )

    def _expected_tokens(self, model: NextScaleModel, stage: Stage, kept: float) -> int:
        """Returns the tokens of a stage that computes the share `kept`. At most all but one: methods that need all cells are refused."""
        anchors = self.anchor_count(model, stage)
        most = stage.cells - (kept < 1 and anchors < stage.cells)
        return max(1, min(math.ceil(kept * stage.cells + (1 - kept) * anchors), most))

    def start(self, setup: RunSetup) -> MethodRun:
        require_own_text(setup.model, setup.batch, "SparseVAR keeps other tokens")
        run = SparseRun(self, setup)
        for stage in run.budgets if self.metric != "image" else ():
            if not setup.plans[stage].skip and all(plan.skip for plan in setup.plans[run.first - 1 : stage]):
                raise SettingError(f"keep must be left out where all stages from {run.first - 1} to {stage - 1} are skipped: give tau.")
        return run


# --- one request


@dataclass(eq=False)
class SparseRun(MethodRun):
    """One request of SparseVAR. Changes, exclusion mask and logits of the last stage choose the cells of the next one."""

    settings: SparseVAR
    setup: RunSetup
    change: GridMap | None = None  # across the observed blocks, [B, cells, 1]
    excluded: GridMap | None = None  # 1 where cells were left out at the last stage that ran, [B, cells, 1]
    logits: GridMap | None = None  # of the last stage that ran, for every cell
    image: Tensor | None = None  # decoded before the last stage that ran
    entered: Tensor | None = None  # input of the first observed block, until the last one has run
    cells: Cells | None = None  # of the stage that runs; None: all cells
    room: TokenCounts | None = None  # tokens of the stage that runs: as read by the host, or a bucket
    first: int = field(init=False)
    blocks: range = field(init=False)
    alpha: int | None = field(init=False)
    budgets: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        model, schedule = self.setup.model, self.setup.schedule
        self.first, self.blocks = self.settings.first_reduced(model, schedule), self.settings.observed_blocks(model)
        self.alpha, self.budgets = self.settings.anchor_spacing(model), self.settings.budgets(model, schedule)

    def state(self) -> list[Tensor]:
        return [grid.values for grid in (self.change, self.excluded, self.logits) if grid is not None]

    # --- which cells are computed

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        self.cells = self.choose_cells(stage, canvas)
        return None if self.cells is None or self.settings.keep is not None else self.cells.kept.sum(dim=1)

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        self.room = counts
        if self.settings.keep is not None:
            budget = self.budgets.get(stage.index, stage.cells)
            self.room = TokenCounts(budget, budget, budget * self.setup.batch)
            return planned
        return with_counts(planned, stage, counts)

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        if self.cells is None:
            if self.settings.keep is not None:
                self.excluded = None  # all cells are computed, and there again
            return tokens
        self.excluded = GridMap(self.cells.excluded[..., None].float(), tokens.stage.size)
        reduces = self.room is not None and self.room.fewest < tokens.stage.cells
        return self.kept_tokens(tokens.stage) if reduces else tokens

    def kept_tokens(self, stage: Stage) -> Tokens:
        assert self.cells is not None and self.room is not None
        return marked_tokens(stage, self.cells.kept, self.room)

    def choose_cells(self, stage: Stage, canvas: Canvas) -> Cells | None:
        """Returns the cells that the stage computes; None for all cells, or while nothing is known about them."""
        detail, budget = self.detail(stage, canvas), self.budgets.get(stage.index)
        if detail is None or (self.settings.keep is not None and budget is None):
            return None
        mode: Any = "nearest" if self.settings.as_released else "nearest-exact"
        left_out = torch.zeros_like(detail, dtype=torch.bool)
        if self.excluded is not None:
            left_out = self.excluded.at(stage.size, mode)[..., 0] > 0.5
        if budget is not None:
            return self.within_budget(in_steps(detail), left_out, budget, stage)
        excluded = self.below_threshold(detail, left_out, stage) | left_out
        if self.alpha is None:
            most = detail.masked_fill(left_out, -torch.inf).argmax(dim=1, keepdim=True)
            kept = ~excluded.scatter_(1, most, False)
        elif self.by_content:
            kept = ~excluded | self.covering(stage, ~excluded)
        else:
            kept = (~excluded).index_fill_(1, self.grid_anchors(stage, detail.device), True)
        return Cells(excluded, kept)

    def below_threshold(self, detail: Tensor, left_out: Tensor, stage: Stage) -> Tensor:
        tau = float(self.settings.tau)
        if self.settings.metric == "logits":
            return -detail > tau * largest(-detail, left_out)
        if not self.settings.as_released:
            return detail < tau * largest(detail, left_out)
        assert self.change is not None
        change = self.change.values[..., 0]
        return ~largest_cells(detail, (share_above(change, tau, largest(change)) * stage.cells).long())

    def within_budget(self, detail: Tensor, left_out: Tensor, budget: int, stage: Stage) -> Cells:
        """Returns equally many cells of every image: those still there first, and of these and of the others the most changed first."""
        anchors = torch.zeros_like(left_out)
        spare = budget
        if self.alpha is not None:
            spare -= anchor_count(stage.size, self.alpha)
            if not self.by_content:
                anchors.index_fill_(1, self.grid_anchors(stage, detail.device), True)
        order = detail.argsort(dim=1, descending=True, stable=True)  # of equals the first
        last = (left_out + 2 * anchors.int()).gather(1, order).argsort(dim=1, stable=True)  # anchors are kept besides
        chosen = torch.zeros_like(left_out).scatter_(1, order.gather(1, last[:, :spare]), True)
        if self.by_content:
            # Where too few cells are worth an anchor, as few blocks are left out, the most changed of the others fill the budget up.
            score = detail.masked_fill(self.covering(stage, chosen), torch.inf).masked_fill(chosen, -torch.inf)
            anchors.scatter_(1, topk_indices_sorted(score, budget - spare), True)
        least = detail.masked_fill(~chosen, torch.inf).amin(dim=1, keepdim=True)
        excluded = torch.where(anchors, left_out | (detail < least), ~chosen)
        return Cells(excluded, chosen | anchors)

    @property
    def by_content(self) -> bool:
        """True if anchors are placed by content: as soon as there are logits to compare."""
        return self.settings.anchors == "content" and self.alpha is not None and self.logits is not None

    def covering(self, stage: Stage, computed: Tensor) -> Tensor:
        """Marks the anchors [B, cells] among the cells that are not computed, as many as the grid has."""
        assert self.logits is not None and self.alpha is not None
        return covering_cells(self.resized(self.logits, stage), computed, anchor_count(stage.size, self.alpha), stage.size)

    def grid_anchors(self, stage: Stage, device: torch.device) -> Tensor:
        assert self.alpha is not None
        return anchor_cells(stage.size, self.alpha, device, self.settings.as_released)

    def resized(self, grid: GridMap, stage: Stage) -> Tensor:
        return grid.at(stage.size, "nearest" if self.settings.as_released else "bilinear")

    def detail(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """Returns how much detail every cell has, [B, cells]; None while nothing is known."""
        metric = self.settings.metric
        if metric == "image" and stage.index >= self.first - 1:
            before, self.image = self.image, canvas.decode()
            return None if before is None else image_change(before, self.image, stage.size)
        if stage.index < self.first:
            return None
        if metric == "logits":
            return None if self.logits is None else -neighbor_similarity(self.resized(self.logits, stage), stage.size)
        return None if self.change is None else self.resized(self.change, stage)[..., 0]

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        if self.settings.metric != "mse" or tokens.stage.index < self.first - 1:
            return
        if layer == self.blocks[0]:
            self.entered = before
        if layer == self.blocks[-1] and self.entered is not None:
            rows, batch = tokens.unpack(feature_change(self.entered, after)), self.setup.batch
            self.entered = None
            score = rows.unflatten(0, (-1, batch)).mean(dim=0) if self.settings.as_released else rows[:batch]
            self.update_change(*tokens.on_grid(score[..., None]))

    def update_change(self, change: Tensor, tokens: Tokens) -> None:
        """Updates the map where tokens were computed."""
        earlier = change if self.change is None else self.resized(self.change, tokens.stage)
        earlier = torch.zeros_like(earlier) if self.settings.as_released else earlier
        self.change = GridMap(tokens.rows(slice(0, self.setup.batch)).scatter(change, earlier), tokens.stage.size)

    # --- outputs of excluded cells

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        stage, values, source = tokens.stage, logits.flatten(2), None
        if (self.alpha is None and self.settings.metric != "logits") or stage.index < self.first - 1:
            return Restored(logits, tokens)
        if tokens.index is None:
            self.logits = GridMap(values, stage.size)
        elif self.logits is None:  # where the stage before was skipped, with metric "image": all cells are kept, in a bucket's tokens
            self.logits = GridMap(put_(values.new_zeros(len(values), stage.cells, values.shape[2]), tokens.index, values), stage.size)
        else:
            expected = self.resized(self.logits, stage)
            if self.alpha is not None:
                tokens, source = self.sources(expected, stage)
                values = pick(values, source)
            if not stage.last and tokens.index is not None:
                # Written in place: such maps are large, 64 MiB an image for 64x64 cells of 4096 codes.
                self.logits = GridMap(put_(expected, tokens.index, values), stage.size)
        return Restored(values.unflatten(2, logits.shape[2:]), tokens, source)

    def sources(self, expected: Tensor, stage: Stage) -> tuple[Tokens, Tensor]:
        """Returns the tokens that are computed or resemble an anchor, and the position of each one's source among the computed ones.

        Cells are matched by the logits expected at them and at the anchors.
        """
        assert self.cells is not None and self.room is not None
        kept = self.cells.kept
        place = (kept.cumsum(dim=1) - 1).clamp(max=self.room.most - 1)  # of a kept cell among all kept ones
        if self.by_content:
            computed = self.kept_tokens(stage).index
            assert computed is not None
            similarity, source = most_similar(expected, computed)
        else:
            nearest = RELEASED_CANDIDATES if self.settings.as_released else None
            similarity, anchor = best_anchor(expected, self.grid_anchors(stage, expected.device), stage.size, nearest)
            source = place.gather(1, anchor)
        known = kept | (similarity >= self.settings.beta - ROUNDING)
        cells, tokens = Tokens(stage).top(known.float(), known.sum(dim=1), stage.cells)
        return tokens, torch.where(kept, place, source).gather(1, cells)
