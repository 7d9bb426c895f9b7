"""The feed-forward sublayer of a block, in pieces that bound what it holds on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .quantization import AnyLinear, Int8Linear, input_scale_of

PIECE = 8192  # tokens that a feed-forward takes at a time, as many as the last stage of one guided image of 1024 x 1024 pixels has


def in_pieces(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run` of tokens [R, N, C], which treats each by itself, for at most PIECE of them at a time."""
    if torch.is_grad_enabled() or x.shape[0] * x.shape[1] <= PIECE:
        return run(x)
    first, *others = x.flatten(0, 1).split(PIECE)
    done = run(first)
    out = done.new_empty(x.shape[0] * x.shape[1], done.shape[-1])
    places = out.split(PIECE)
    places[0].copy_(done)
    del done  # as large as what the next piece holds
    for piece, target in zip(others, places[1:], strict=True):
        target.copy_(run(piece))
    return out.view(*x.shape[:2], -1)


def linear_gelu(x: Tensor, linear: AnyLinear) -> Tensor:
    """gelu(linear(x)), by its tanh formula. Hidden states are the largest tensors of a stage: on a GPU the product's own kernel applies it
    before it writes them, elsewhere it is applied in place, except where gradients are wanted."""
    if torch.is_grad_enabled():
        return F.gelu(linear(x), approximate="tanh")
    weight = dense_weight(linear, x)
    if x.is_cuda and weight is not None and linear.bias is not None:
        flat = torch._addmm_activation(linear.bias, x.flatten(0, -2), weight.t(), use_gelu=True)
        return flat.view(*x.shape[:-1], weight.shape[0])
    return torch._C._nn.gelu_(linear(x), approximate="tanh")  # type: ignore[attr-defined]


def dense_weight(linear: AnyLinear, x: Tensor) -> Tensor | None:
    """The weights that torch multiplies such an input by; None where they are read in another form."""
    if isinstance(linear, Int8Linear):
        return None if linear.reads_codes(x) else linear.restored_weight(x.dtype)
    return linear.weight if isinstance(linear, nn.Linear) and x.dtype == linear.weight.dtype else None


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    @property
    def input_scale(self) -> float | None:
        """The scale at which it takes tokens as e4m3; None: as they are."""
        return input_scale_of(self.fc1)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        scale = input_scale_of(self.fc2)
        if scale is not None and kernels.available(x):
            return self.fc2(kernels.gelu_to_e4m3(self.fc1(x), scale))
        return self.fc2(linear_gelu(x, self.fc1))


class GatedFeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    @property
    def input_scale(self) -> float | None:
        """The scale at which it takes tokens as e4m3; None: as they are."""
        return input_scale_of(self.gate_up)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        scale = input_scale_of(self.down)
        if scale is not None and kernels.available(x):
            return self.down(kernels.silu_to_e4m3(self.gate_up(x), scale))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        opened = F.silu(gate)
        return self.down(opened * up if torch.is_grad_enabled() else opened.mul_(up))
