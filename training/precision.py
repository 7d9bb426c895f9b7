"""Float32 weights behind a network that computes in half precision."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class MasterWeights(Generic[M]):
    """`module` is what is optimised and saved, in float32; `working` is its copy in another type, which computes the gradients.

    Parameters whose name starts with one of `float32` keep full precision in the copy as well, as they do in generation.
    """

    def __init__(self, module: M, dtype: torch.dtype, float32: tuple[str, ...] = ()) -> None:
        self.module = module.float()
        self.working = copy.deepcopy(module)
        for name, parameter in self.working.named_parameters():
            parameter.data = parameter.data if name.startswith(float32) else parameter.data.to(dtype)
        self._ours: list[Tensor] = list(self.module.parameters())
        self._theirs: list[Tensor] = list(self.working.parameters())

    def take_gradients(self) -> None:
        """Moves gradients from the copy to the weights."""
        for ours, theirs in zip(self._ours, self._theirs, strict=True):
            ours.grad = None if theirs.grad is None else theirs.grad.float()
            theirs.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the weights to the copy."""
        torch._foreach_copy_(self._theirs, self._ours)
