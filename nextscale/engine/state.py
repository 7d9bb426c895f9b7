"""A request in the middle of its capture."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from torch import Tensor

from ..methods.method import MethodRun
from ..cache import DenseLayerCache
from ..canvas import Canvas
from ..models.context import Env


@dataclass(eq=False)
class State:
    """Everything that changes from stage to stage."""

    canvas: Canvas
    env: Env
    run: MethodRun

    def fork(self) -> State:
        """The same tensors in objects of its own, so that a stage can be captured several times from here."""
        env = replace(self.env, cond=self.env.cond.copy(), cache=[copy.copy(cache) for cache in self.env.cache])
        env.memory = self.env.memory.copy()
        return State(copy.copy(self.canvas), env, self.run.fork())

    def state_tensors(self) -> list[Tensor]:
        """What later stages read and what depends on how many tokens were run. Keys and values lie in memory that all forks share."""
        lengths = [cache.lengths for cache in self.env.cache if isinstance(cache, DenseLayerCache) and cache.lengths is not None]
        return [self.canvas.latent, *self.run.state_tensors(), *lengths]
