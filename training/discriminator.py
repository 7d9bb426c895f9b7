"""A classifier of patches, real or reconstructed (Isola et al., 2017), with the hinge loss."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 8
SLOPE = 0.2


class PatchDiscriminator(nn.Module):
    """Images [B, 3, H, W] to one score per patch, [B, 1, about H / 8, about W / 8]: high for real ones."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        widths = (channels, 2 * channels, 4 * channels)
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=2, padding=1), nn.LeakyReLU(SLOPE)]
        for inner, outer in pairwise(widths):
            layers += [nn.Conv2d(inner, outer, 4, stride=2, padding=1), nn.GroupNorm(GROUPS, outer), nn.LeakyReLU(SLOPE)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).float()


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Hinge loss of the scores of both; zero once real ones are above 1 and reconstructed ones below -1."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


def generator_loss(fake: Tensor) -> Tensor:
    """Low where reconstructions score high."""
    return -fake.mean()
