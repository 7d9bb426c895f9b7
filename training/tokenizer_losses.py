"""Losses of the tokenizer besides distances of images: multi-scale quantization, commitment, entropy, and a classifier of patches.

Notation: z the encoder's map [B, bits, h, w]; the stages of a schedule quantise what is left of it, one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.stage import Schedule, Tokens
from nextscale.tokenizers import InfinityTokenizer

GROUPS, SLOPE = 8, 0.2  # of the classifier
LEAST_PROBABILITY = 1e-6  # of a bit in a batch, for the logarithm


@dataclass(frozen=True)
class Quantised:
    """An encoder's map after multi-scale quantisation."""

    latent: Tensor  # [B, bits, h, w]: the sum of all stages, without gradient
    rests: tuple[Tensor, ...]  # what each stage quantises, [B, bits, its height, its width], with the gradient of z


def quantise(tokenizer: InfinityTokenizer, z: Tensor, schedule: Schedule) -> Quantised:
    """Quantises as `Tokenizer.encode` does, on the same canvas, and keeps what each stage was given."""
    canvas = tokenizer.canvas(schedule, z.shape[0])
    rests = []
    for stage in schedule:
        rests.append(F.interpolate(z - canvas.latent, size=tokenizer.map_size(stage), mode="area"))
        canvas.add(tokenizer.nearest(rests[-1].detach(), stage), Tokens(stage))
    return Quantised(canvas.latent, tuple(rests))


def straight_through(z: Tensor, latent: Tensor) -> Tensor:
    """The latent's values with the gradient of z."""
    return z + (latent - z).detach()


def commitment(z: Tensor, latent: Tensor) -> Tensor:
    """Keeps z near what the bits can express."""
    return F.mse_loss(z, latent.detach())


def entropy_penalty(rests: tuple[Tensor, ...], scale: float, diversity: float) -> Tensor:
    """Low where every bit is certain by itself and undecided over the batch; in nats per bit, the mean of the stages.

    A bit is one with probability sigmoid(scale * sqrt(bits) * u) for the value u that it quantises: sigmoid(scale) at the size of a
    code. `diversity` weighs the second half; with 1 the lowest possible value is -log 2.
    """
    penalties = []
    for rest in rests:
        logits = scale * math.sqrt(rest.shape[1]) * rest
        probability = logits.sigmoid()
        own = F.softplus(logits) - logits * probability  # the entropy of each bit, exact at both ends
        usual = probability.mean((0, 2, 3)).clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)  # [bits]
        penalties.append(own.mean() - diversity * (torch.special.entr(usual) + torch.special.entr(1 - usual)).mean())
    return torch.stack(penalties).mean()


class PatchDiscriminator(nn.Module):
    """Classifier of patches (Isola et al., 2017): images [B, 3, H, W] to scores [B, 1, about H / 8, about W / 8], high for real ones."""

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
