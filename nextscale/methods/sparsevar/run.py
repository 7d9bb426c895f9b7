"""One request of SparseVAR: which cells every stage computes, and what the others take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...stage import Stage, Tokens, topk_indices_sorted
from ..frequency import (
    ROUNDING,
    GridMap,
    ResizeMode,
    anchor_cells,
    anchor_count,
    best_anchor,
    feature_change,
    high_similarity,
    image_change,
    in_steps,
    largest,
    largest_cells,
    low_change,
    neighbour_similarity,
    share_above,
)
from ..method import MethodRun, Restored, RunSetup, StagePlan, TokenCounts
from ..token_ops import most_similar, pick, put_
from .anchors import covering_cells
from .choice import Choice

if TYPE_CHECKING:
    from ...canvas import Canvas
    from .method import SparseVAR


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
    choice: Choice | None = None  # of the stage that runs; None: all cells
    first: int = field(init=False)
    blocks: range = field(init=False)
    alpha: int | None = field(init=False)
    budgets: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.settings.first_reduced(self.setup.model, self.setup.schedule)
        self.blocks = self.settings.tapped_blocks(self.setup.model)
        self.alpha = self.settings.anchor_spacing(self.setup.model)
        self.budgets = self.settings.budgets(self.setup.model, self.setup.schedule)

    # --- which tokens are computed

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        budget = self.settings.keep is not None
        self.choice = self._choose_budget(stage, canvas) if budget else self._choose(stage, canvas)
        return None if self.choice is None or budget else self.choice.counts

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        if self.settings.keep is not None:
            return planned
        if self.choice is None or counts is None:
            return replace(planned, num_tokens=None)
        self.choice = replace(self.choice, known=counts)
        return replace(planned, num_tokens=counts.most if self.choice.reduces else None)

    def state(self) -> list[Tensor]:
        return [grid.values for grid in (self.change, self.excluded, self.logits) if grid is not None]

    def _choose(self, stage: Stage, canvas: Canvas) -> Choice | None:
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
        elif self.by_content:
            kept = ~excluded | self._covering(stage, ~excluded, self.alpha)
        else:
            kept = (~excluded).index_fill_(1, self._anchors(stage, self.alpha, excluded.device), True)
        return Choice(excluded, kept, kept.sum(dim=1))

    def _choose_budget(self, stage: Stage, canvas: Canvas) -> Choice | None:
        """Which cells the stage computes, as many as its budget says in every image; None: all."""
        detail, num_tokens = self._detail(stage, canvas), self.budgets.get(stage.index)
        if detail is None or num_tokens is None:
            return None
        detail, before = in_steps(detail), self._left_out(stage)
        before = torch.zeros_like(detail, dtype=torch.bool) if before is None else before
        anchors = torch.zeros_like(before)
        spare = num_tokens
        if self.alpha is not None:
            spare -= anchor_count(stage.size, self.alpha, self.settings.edges)
            if not self.by_content:
                anchors.index_fill_(1, self._anchors(stage, self.alpha, detail.device), True)
        order = detail.argsort(dim=1, descending=True, stable=True)  # of equals the first
        last = (before + 2 * anchors.int()).gather(1, order).argsort(dim=1, stable=True)  # anchors are kept besides
        best = order.gather(1, last[:, :spare])
        chosen = torch.zeros_like(before).scatter_(1, best, True)
        if self.by_content and self.alpha is not None:
            # Where too few cells are worth an anchor, as few blocks are left out, the most changed of the others fill the budget up.
            score = detail.masked_fill(self._covering(stage, chosen, self.alpha), torch.inf).masked_fill(chosen, -torch.inf)
            anchors.scatter_(1, topk_indices_sorted(score, num_tokens - spare), True)
        least = detail.masked_fill(~chosen, torch.inf).amin(dim=1, keepdim=True)
        excluded = torch.where(anchors, before | (detail < least), ~chosen)
        every_image = TokenCounts(num_tokens, num_tokens, len(chosen) * num_tokens)
        return Choice(excluded, chosen | anchors, chosen.new_full((len(chosen),), num_tokens, dtype=torch.int64), every_image)

    @property
    def by_content(self) -> bool:
        """Whether anchors are placed by content: as soon as there are logits to compare."""
        return self.settings.anchors == "content" and self.alpha is not None and self.logits is not None

    def _covering(self, stage: Stage, computed: Tensor, alpha: int) -> Tensor:
        """Marks the anchors [B, cells] among the cells that are not computed, as many as the grid has."""
        assert self.logits is not None
        count = anchor_count(stage.size, alpha, self.settings.edges)
        return covering_cells(self.logits.at(stage.size, self.settings.resize), computed, count, stage.size)

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
        tau = float(self.settings.tau)
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
        return share_above(change, float(self.settings.tau), largest(change, None))

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        if self.choice is None:
            if self.settings.keep is not None:
                self.excluded = None  # all cells are computed, and there again
            return tokens
        self.excluded = GridMap(self.choice.excluded[..., None].float(), tokens.stage.size)
        return self.choice.tokens(tokens.stage) if self.choice.reduces else tokens

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
        rows = tokens.unpack(feature_change(before, after))
        change, tokens = tokens.on_grid(self._of_images(rows)[..., None])
        earlier = change if self.change is None else self.change.at(size, self.settings.resize)
        if self.settings.left_out == "zero":
            earlier = torch.zeros_like(earlier)
        self.change = GridMap(tokens.rows(slice(0, self.setup.batch)).scatter(change, earlier), size)

    def go_on_from(self, other: SparseRun) -> None:
        """Takes what another run of the same images has seen."""
        self.change, self.logits = other.change, other.logits

    def _of_images(self, rows: Tensor) -> Tensor:
        """Scores [R, N] of the rows that run, of both cfg branches or one, as scores [B, N] of the images."""
        batch = self.setup.batch
        if self.settings.rows == "both":
            return rows.unflatten(0, (-1, batch)).mean(dim=0)
        return rows[:batch] if self.settings.rows == "cond" else rows[-batch:]

    # --- what the tokens that were left out take

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        out, source, stage = logits, None, tokens.stage
        compared = self.alpha is not None or self.settings.metric == "logits"
        if not compared or stage.index < self.first - 1:
            return Restored(out, tokens)
        if tokens.index is None:
            self.logits = GridMap(out.flatten(2), stage.size)
        elif self.logits is None:  # where the stage before was skipped, with metric "image": all cells are kept, in a bucket's tokens
            known = out.flatten(2)
            self.logits = GridMap(put_(known.new_zeros(len(known), stage.cells, known.shape[2]), tokens.index, known), stage.size)
        else:
            expected = self.logits.at(stage.size, self.settings.resize)
            if self.alpha is not None:
                tokens, source = self._sources(expected, self.alpha, stage)
                out = pick(out.flatten(2), source).unflatten(2, out.shape[2:])
            if not stage.last and tokens.index is not None:
                # Written in place: such maps are large, 64 MiB an image for 64x64 cells of 4096 codes.
                self.logits = GridMap(put_(expected, tokens.index, out.flatten(2)), stage.size)
        return Restored(out, tokens, source)

    def _sources(self, expected: Tensor, alpha: int, stage: Stage) -> tuple[Tokens, Tensor]:
        """Returns the computed tokens and those that an anchor propagates to, and the computed token [B, cells] that each takes.

        A cell that was left out takes the anchor most similar to it, by the logits expected at both.
        """
        assert self.choice is not None
        kept = self.choice.kept
        place = (kept.cumsum(dim=1) - 1).clamp(max=self.choice.num_tokens - 1)  # of a kept cell among all kept ones
        if self.by_content:
            computed = self.choice.tokens(stage).index
            assert computed is not None
            similarity, source = most_similar(expected, computed)
        else:
            nearest = None if self.settings.candidates == "all" else self.settings.candidates
            similarity, anchor = best_anchor(expected, self._anchors(stage, alpha, kept.device), stage.size, nearest)
            source = place.gather(1, anchor)
        known = kept | (similarity >= self.settings.beta - ROUNDING)
        cells, tokens = Tokens(stage).top(known.float(), known.sum(dim=1), stage.cells)
        return tokens, torch.where(kept, place, source).gather(1, cells)
