"""Confidence intervals of means over images, from resampled images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..errors import SettingError

LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % confidence bounds."""

    value: float
    low: float
    high: float

    def rounded(self, digits: int = 5) -> dict[str, float]:
        """Returns plain values for JSON."""
        return {name: round(number, digits) for name, number in asdict(self).items()}


def resampled(images: int, resamples: int, seed: int = 0) -> Tensor:
    """Returns indices of images, sampled with replacement, [resamples, images]; the same for every measurement of the same images."""
    if images < 1:
        raise SettingError("an interval needs one or more images; got none.")
    return torch.randint(images, (resamples, images), generator=torch.Generator().manual_seed(seed))


def mean_interval(values: Tensor | Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Returns the interval of the mean of one number per image. For a paired difference, pass differences to the dense images."""
    numbers = torch.as_tensor(values, dtype=torch.float64).cpu()
    means = numbers[resampled(len(numbers), resamples, seed)].mean(dim=1)
    return Interval(float(numbers.mean()), *bounds(means))


def bounds(values: Tensor) -> tuple[float, float]:
    """Returns the percentiles of resampled values between which 95 % of them are."""
    tail = (1 - LEVEL) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
