"""A request in the middle of its capture."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from torch import Tensor

from ..canvas import Canvas
from ..methods.method import MethodRun
from ..models.context import ForwardContext


@dataclass(eq=False)
class State:
    """Everything that changes from stage to stage."""

    canvas: Canvas
    ctx: ForwardContext
    run: MethodRun

    def fork(self) -> State:
        """The same tensors in objects of its own, so that a stage can be captured several times from here."""
        ctx = replace(self.ctx, cond=self.ctx.cond.copy(), cache=[copy.copy(cache) for cache in self.ctx.cache])
        ctx.memory = self.ctx.memory.copy()
        return State(copy.copy(self.canvas), ctx, self.run.fork())

    def state_tensors(self) -> list[Tensor]:
        """What later stages read and what depends on how many tokens were run. Keys and values lie in memory that all forks share."""
        lengths = [cache.lengths for cache in self.ctx.cache if cache.lengths is not None]
        return [self.canvas.latent, *self.run.state_tensors(), *lengths]
