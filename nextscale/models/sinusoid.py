"""A number as a vector: sinusoids of many wavelengths through a small network."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAVES = 256
LONGEST = 10000.0


def sinusoids(numbers: Tensor) -> Tensor:
    """Numbers [N] to [N, 256], float32: cosines, then sines."""
    half = WAVES // 2
    speeds = torch.exp(-math.log(LONGEST) * torch.arange(half, device=numbers.device).float() / half)
    angles = numbers.float()[:, None] * speeds
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SinusoidEmbedding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WAVES, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, numbers: Tensor) -> Tensor:
        """Embeds numbers [N] as [N, dim]."""
        return self.fc2(F.silu(self.fc1(sinusoids(numbers).to(self.fc1.weight.dtype))))
