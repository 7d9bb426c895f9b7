"""Feed-forward sublayers, computed in chunks to limit the memory of hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from .quantization import AnyLinear, Int8Linear, input_scale_of

CHUNK_TOKENS = 8192  # the last stage of one image of 1024 x 1024 pixels with CFG


def in_chunks(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a token-wise function to tokens [R, N, C] in chunks of at most CHUNK_TOKENS."""
    if torch.is_grad_enabled() or x.shape[0] * x.shape[1] <= CHUNK_TOKENS:
        return run(x)
    first, *others = x.flatten(0, 1).split(CHUNK_TOKENS)
    done = run(first)
    out = done.new_empty(x.shape[0] * x.shape[1], done.shape[-1])
    targets = out.split(CHUNK_TOKENS)
    targets[0].copy_(done)
    del done  # frees its memory before the next chunk
    for chunk, target in zip(others, targets[1:], strict=True):
        target.copy_(run(chunk))
    return out.view(*x.shape[:2], -1)


def linear_gelu(x: Tensor, linear: AnyLinear) -> Tensor:
    """Returns gelu(linear(x)) with the tanh approximation. Hidden states are the largest tensors of a stage, so the activation is fused
    with the matrix multiplication on a GPU, and applied in place elsewhere unless gradients are enabled."""
    if torch.is_grad_enabled():
        return F.gelu(linear(x), approximate="tanh")
    weight = dense_weight(linear, x)
    if x.is_cuda and weight is not None and linear.bias is not None:
        flat = torch._addmm_activation(linear.bias, x.flatten(0, -2), weight.t(), use_gelu=True)
        return flat.view(*x.shape[:-1], weight.shape[0])
    return torch._C._nn.gelu_(linear(x), approximate="tanh")  # type: ignore[attr-defined]


def dense_weight(linear: AnyLinear, x: Tensor) -> Tensor | None:
    """Returns the weights for a matrix multiplication in the dtype of x; None if the layer does not have them in this form."""
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
        """Scale of e4m3 inputs; None if inputs have the model's dtype."""
        return input_scale_of(self.fc1)

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self.run, x)

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
        """Scale of e4m3 inputs; None if inputs have the model's dtype."""
        return input_scale_of(self.gate_up)

    def forward(self, x: Tensor) -> Tensor:
        return in_chunks(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        scale = input_scale_of(self.down)
        if scale is not None and kernels.available(x):
            return self.down(kernels.silu_to_e4m3(self.gate_up(x), scale))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate = F.silu(gate)
        return self.down(gate * up if torch.is_grad_enabled() else gate.mul_(up))
