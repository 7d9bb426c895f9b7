"""DISTS (Ding et al., 2020): how different two images are in structure and texture to VGG16.

torchmetrics has it too, and a test compares them; there it needs torchvision and its download of VGG16, here one file that is read safely.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.checkpoints import Layout, load_weights
from nextscale.errors import SizeError

from .files import DISTS, metric_file

CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # VGG16's convolutions, pooled between the groups
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STABLE = 1e-6
SMALLEST_SIDE = 16  # of an image from which every pooling leaves something


class Dists(nn.Module):
    """Distances of pairs of images."""

    kernel: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: tuple[tuple[int, ...], ...] = CHANNELS) -> None:
        super().__init__()
        dims = [3, *(dim for group in channels for dim in group)]
        self.features = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(dims))
        self.groups = [len(group) for group in channels]
        self.taps = [3, *(group[-1] for group in channels)]
        self.alpha, self.beta = (nn.Parameter(torch.zeros(1, sum(self.taps), 1, 1)) for _ in range(2))
        hanning = torch.tensor([0.5, 1.0, 0.5])
        self.register_buffer("kernel", (hanning[:, None] * hanning / 4)[None, None], persistent=False)
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)

    @classmethod
    def load(cls, given: Path | None = None, device: torch.device | str = "cpu") -> Dists:
        """`given` is the file of the weights or its folder, see `metric_file`."""
        network = cls()
        load_weights(network, metric_file(DISTS, given), Layout())
        return network.to(device)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances [B] of images [B, 3, H, W] in [-1, 1]."""
        if a.shape != b.shape or a.ndim != 4 or a.shape[1] != 3 or min(a.shape[2:]) < SMALLEST_SIDE:
            raise SizeError(
                f"DISTS compares images [B, 3, H, W] of equal shape and at least {SMALLEST_SIDE} pixels a side; "
                f"got {list(a.shape)} and {list(b.shape)}"
            )
        total = self.alpha.sum() + self.beta.sum()
        alphas, betas = ((weights / total).view(-1).split(self.taps) for weights in (self.alpha, self.beta))
        likeness = a.new_zeros(len(a), dtype=torch.float32)
        for x, y, alpha, beta in zip(self.maps(a), self.maps(b), alphas, betas, strict=True):
            mean_x, mean_y = x.mean((2, 3)), y.mean((2, 3))  # [B, C]
            spread = x.var((2, 3), correction=0) + y.var((2, 3), correction=0)
            shared = (x * y).mean((2, 3)) - mean_x * mean_y
            texture = (2 * mean_x * mean_y + STABLE) / (mean_x**2 + mean_y**2 + STABLE)
            structure = (2 * shared + STABLE) / (spread + STABLE)
            likeness = likeness + texture @ alpha + structure @ beta
        return 1 - likeness

    def maps(self, images: Tensor) -> list[Tensor]:
        """The image in [0, 1] and the features of every group, each [B, C, h, w]."""
        unit = (images.float() + 1) / 2
        x, found, layers = (unit - self.mean) / self.deviation, [unit], iter(self.features)
        for number, group in enumerate(self.groups):
            if number:
                x = self._pooled(x)
            for _ in range(group):
                x = F.relu(next(layers)(x))
            found.append(x)
        return found

    def _pooled(self, x: Tensor) -> Tensor:
        """Root of the weighted mean of squares, at half the resolution."""
        kernel = self.kernel.expand(x.shape[1], 1, 3, 3)
        return (F.conv2d(x**2, kernel, stride=2, padding=1, groups=x.shape[1]) + 1e-12).sqrt()
