"""Optimizers, and float32 master weights of a network that computes in half precision."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from nextscale.errors import MissingExtra

from .run import set_learning_rate

BETAS = (0.9, 0.95)
MOMENTUM = 0.95

M = TypeVar("M", bound=nn.Module)


class Optimizers:
    """Muon for the matrices inside the blocks, AdamW for everything else.

    Muon orthogonalises each update, which needs fewer steps than AdamW for the same loss; its rate is scaled so that both take the
    same one.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], weight_decay: float) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise MissingExtra(f"training needs torch.optim.Muon, which torch has from 2.9 on; this is {torch.__version__}: update torch")
        self.matrices, self.others = list(matrices), list(others)
        self.all: Mapping[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(self.matrices, weight_decay=weight_decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"),
            "adamw": torch.optim.AdamW(self.others, betas=BETAS, weight_decay=0.0, fused=self.others[0].is_cuda),
        }

    def step(self, rate: float, longest_gradient: float) -> Tensor:
        """Makes one step. Returns the norm of the gradient before clipping."""
        norm = nn.utils.clip_grad_norm_([*self.matrices, *self.others], longest_gradient)
        for optimizer in self.all.values():
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm


class MasterWeights(Generic[M]):
    """Float32 weights (`module`), which are optimized and saved, and a copy in another dtype (`working`), which computes gradients.

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
        """Moves gradients from the working copy to the weights."""
        for ours, theirs in zip(self._ours, self._theirs, strict=True):
            ours.grad = None if theirs.grad is None else theirs.grad.float()
            theirs.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the weights to the working copy."""
        torch._foreach_copy_(self._theirs, self._ours)
