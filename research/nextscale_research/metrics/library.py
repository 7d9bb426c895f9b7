"""torchmetrics, which does the measures that many use: imported where it is needed, since the runtime does without it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor, nn

from nextscale.errors import MissingExtra


def torchmetrics_image(name: str) -> ModuleType:
    """A module of torchmetrics.image."""
    try:
        return import_module(f"torchmetrics.image.{name}")
    except Exception as error:  # besides a missing package, a torchvision that does not fit the torch that is installed
        raise MissingExtra(
            f"kernel distances and the Inception score need torchmetrics, which cannot be imported ({error}): pip install 'nextscale[eval]'"
        ) from error


class Given(nn.Module):
    """Stands for a network whose features are given in place of images."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def kernel_distance(generated: Tensor, real: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Kernel distance of features (KID where they are Inception's), mean and standard deviation over random subsets."""
    size = min(subset_size, len(generated), len(real))
    metric = torchmetrics_image("kid").KernelInceptionDistance(feature=Given(real.shape[1]), subsets=subsets, subset_size=size)
    metric.update(real, real=True)
    metric.update(generated, real=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)


def inception_score(logits: Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Inception score of logits [N, classes], mean and standard deviation over splits."""
    metric = torchmetrics_image("inception").InceptionScore(feature=Given(logits.shape[1]), splits=splits)
    metric.update(logits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)
