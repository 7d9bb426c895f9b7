"""The feed-forward sublayer of a block, in pieces that bound what it holds on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .linear import Linear, tile_of

PIECE = 8192  # tokens that a feed-forward takes at a time, as many as the last stage of one guided image of 1024 x 1024 pixels has


def in_pieces(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run` of tokens [R, N, C], which treats each by itself, for at most PIECE of them at a time."""
    if torch.is_grad_enabled() or x.shape[0] * x.shape[1] <= PIECE:
        return run(x)
    tokens = x.flatten(0, 1)
    out = torch.empty_like(tokens)
    for piece, target in zip(tokens.split(PIECE), out.split(PIECE), strict=True):
        target.copy_(run(piece))
    return out.view_as(x)


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """gelu(linear(x)), by its tanh formula. Hidden states are the largest tensors of a stage: on a GPU the product's own kernel applies it
    before it writes them, elsewhere it is applied in place, except where gradients are wanted."""
    if torch.is_grad_enabled():
        return F.gelu(linear(x), approximate="tanh")
    if (tile := tile_of(x, linear)) is not None:
        return kernels.linear_few_rows(x, linear.weight, linear.bias, tile, gelu=True)
    if x.is_cuda and linear.bias is not None and x.dtype == linear.weight.dtype:
        flat = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True)
        return flat.view(*x.shape[:-1], linear.out_features)
    return torch._C._nn.gelu_(linear(x), approximate="tanh")  # type: ignore[attr-defined]


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        return self.fc2(linear_gelu(x, self.fc1))


class GatedFeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_up = Linear(dim, 2 * hidden_dim, bias=False)
        self.down = Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        opened = F.silu(gate)
        return self.down(opened * up if torch.is_grad_enabled() else opened.mul_(up))
