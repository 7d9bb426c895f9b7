"""What the stages of a request share: the condition, the caches, and which rows still run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..cache import ComputedCells, LayerCache, StageMemory
from ..guidance import CfgBranches
from ..sampling import Rng
from ..stage import Rows
from .modulation import HeadModulation, Modulation
from .rope import Rope
from .text_context import TextContext


@dataclass(slots=True)
class Conditioning:
    """Everything that follows from the prompt or class, computed once per request."""

    start: Tensor  # [R, 1, C], the first stage's token before the level is added
    logit_scales: list[Tensor | None]  # per layer, [H, 1]
    modulation: list[Modulation] = field(default_factory=list)  # per layer; empty where blocks are not modulated
    head: HeadModulation | None = None
    prefix: Tensor | None = None  # [R, S, C], text tokens that stand before it, without the level too
    text: TextContext | None = None
    rope: Rope | None = None
    refiner: Conditioning | None = None  # of a second, smaller stack of blocks (STAR)

    def copy(self) -> Conditioning:
        """A condition with the same tensors; rows that leave the copy stay here."""
        return replace(self, refiner=None if self.refiner is None else self.refiner.copy())

    def keep_rows(self, rows: Rows) -> None:
        self.start = self.start[rows]
        self.modulation = [modulation.rows(rows) for modulation in self.modulation]
        self.head = None if self.head is None else self.head.rows(rows)
        self.prefix = None if self.prefix is None else self.prefix[rows]
        self.text = None if self.text is None else self.text.rows(rows)
        self.rope = None if self.rope is None else self.rope.rows(rows)
        if self.refiner is not None:
            self.refiner.keep_rows(rows)


@dataclass(slots=True)
class ForwardContext:
    """Everything that has one entry per running row: the conditional rows first, then the unconditional ones while they run."""

    batch: int
    cond: Conditioning
    cache: Sequence[LayerCache]
    memory: StageMemory
    cfg_branches: CfgBranches
    method_rng: Rng  # random numbers for methods
    computed: ComputedCells | None = None  # where the caller wants to see what was computed
    attention_mask: Tensor | None = None  # [1, 1, T, T], where several stages are read in one pass
    measured: dict[range, Any] = field(default_factory=dict)  # spans that find their number of tokens as they run, with that number
    captured: bool = False  # launches cost the host nothing
    data_dependent: bool = False  # the method may leave out tokens of one image and not of another

    def keep(self, cfg_branches: CfgBranches) -> None:
        """Drops the rows of the other cfg branch. Rows leave and never return; "both" keeps those that still run."""
        if cfg_branches in ("both", self.cfg_branches):
            return
        if self.cfg_branches != "both":
            raise ValueError(f"the {cfg_branches} rows do not run any more: only {self.cfg_branches} rows are left")
        self._keep_rows(slice(0, self.batch) if cfg_branches == "cond" else slice(self.batch, None))
        self.cfg_branches = cfg_branches

    def _keep_rows(self, rows: Rows) -> None:
        self.cond.keep_rows(rows)
        for cache in self.cache:
            cache.keep_rows(rows)
        self.memory.keep_rows(rows)
