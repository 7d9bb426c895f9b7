"""The optimizers and the weights that each trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from nextscale.errors import MissingExtra

from .run import set_learning_rate

BETAS = (0.9, 0.95)
MOMENTUM = 0.95


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
        """One step; returns the norm of the gradient before clipping."""
        norm = nn.utils.clip_grad_norm_([*self.matrices, *self.others], longest_gradient)
        for optimizer in self.all.values():
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm
