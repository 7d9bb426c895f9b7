"""Per-request state of the backbones: the condition, the caches and the CFG branches that still run."""

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
    """Tensors derived from the prompts and the schedule, computed once per request."""

    start: Tensor  # [R, 1, C], first token of the first stage, without the level embedding
    logit_scales: list[Tensor | None]  # per layer, [H, 1]
    modulation: list[Modulation] = field(default_factory=list)  # per layer; empty if blocks are not modulated
    head: HeadModulation | None = None
    prefix: Tensor | None = None  # [R, S, C], text tokens before `start`, without the level embedding
    text: TextContext | None = None
    rope: Rope | None = None
    refiner: Conditioning | None = None  # for STAR's second stack of blocks

    def copy(self) -> Conditioning:
        """Returns a copy that shares the tensors; dropping rows of the copy does not affect the original."""
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
    """Per-row state of a forward pass: conditional rows first, then unconditional rows while they run."""

    batch: int
    cond: Conditioning
    cache: Sequence[LayerCache]
    memory: StageMemory
    cfg_branches: CfgBranches
    method_rng: Rng  # random numbers of methods, not shared with sampling
    computed: ComputedCells | None = None  # records computed cells if the caller requested compute masks
    attention_mask: Tensor | None = None  # [1, 1, T, T], if several stages run in one pass
    measured: dict[range, Any] = field(default_factory=dict)  # token counts of spans that choose them at run time
    captured: bool = False  # True inside CUDA graph capture
    data_dependent: bool = False  # the method may select different numbers of tokens per image

    def keep(self, cfg_branches: CfgBranches) -> None:
        """Keeps the rows of `cfg_branches` and drops the others for the rest of the request; "both" changes nothing."""
        if cfg_branches in ("both", self.cfg_branches):
            return
        if self.cfg_branches != "both":
            raise ValueError(f"cfg_branches must be {self.cfg_branches!r}, since the other rows were dropped; got {cfg_branches!r}.")
        self._keep_rows(slice(0, self.batch) if cfg_branches == "cond" else slice(self.batch, None))
        self.cfg_branches = cfg_branches

    def _keep_rows(self, rows: Rows) -> None:
        self.cond.keep_rows(rows)
        for cache in self.cache:
            cache.keep_rows(rows)
        self.memory.keep_rows(rows)
