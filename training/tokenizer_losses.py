"""Losses of the tokenizer besides distances of images: multi-scale quantization, commitment, entropy, and a classifier of patches.

Notation: z the encoder's map [B, bits, h, w]; the stages of a schedule quantize what is left of it, one after the other.
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
class Quantized:
    """Feature map of an encoder after multi-scale quantization."""

    latent: Tensor  # [B, bits, h, w]: the sum of all stages, without gradient
    rests: tuple[Tensor, ...]  # what each stage quantizes, [B, bits, its height, its width], with the gradient of z


def quantize(tokenizer: InfinityTokenizer, z: Tensor, schedule: Schedule) -> Quantized:
    """Quantizes as `Tokenizer.encode` does, and keeps the input of each stage."""
    canvas = tokenizer.canvas(schedule, z.shape[0])
    rests = []
    for stage in schedule:
        rests.append(F.interpolate(z - canvas.latent, size=tokenizer.map_size(stage), mode="area"))
        canvas.add(tokenizer.nearest(rests[-1].detach(), stage), Tokens(stage))
    return Quantized(canvas.latent, tuple(rests))


def straight_through(z: Tensor, latent: Tensor) -> Tensor:
    """Returns the values of the latent with the gradient of z (straight-through)."""
    return z + (latent - z).detach()


def commitment(z: Tensor, latent: Tensor) -> Tensor:
    """Returns the commitment loss: the squared distance of z to the quantized latent."""
    return F.mse_loss(z, latent.detach())


def entropy_penalty(rests: tuple[Tensor, ...], scale: float, diversity: float) -> Tensor:
    """Returns the entropy loss in nats per bit, the mean of the stages. It is low if each bit is certain and bits vary over the batch.

    A bit is one with probability sigmoid(scale * sqrt(bits) * u) for the value u that it quantizes: sigmoid(scale) at the size of a
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
    """PatchGAN discriminator (Isola et al., 2017): images [B, 3, H, W] to scores [B, 1, about H / 8, about W / 8], high for real images."""

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
    """Returns the hinge loss of the discriminator."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


def generator_loss(fake: Tensor) -> Tensor:
    """Returns the adversarial loss of reconstructions."""
    return -fake.mean()
