"""Bootstrap confidence intervals of means over images."""

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
    """Returns indices of images sampled with replacement, [resamples, images]; deterministic for a number of images and a seed."""
    if images < 1:
        raise SettingError(f"images must be at least 1 for an interval; got {images}.")
    return torch.randint(images, (resamples, images), generator=torch.Generator().manual_seed(seed))


def mean_interval(values: Tensor | Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Returns the confidence interval of the mean of one number per image. For paired comparisons, pass differences."""
    numbers = torch.as_tensor(values, dtype=torch.float64).cpu()
    means = numbers[resampled(len(numbers), resamples, seed)].mean(dim=1)
    return Interval(float(numbers.mean()), *bounds(means))


def bounds(values: Tensor) -> tuple[float, float]:
    """Returns the percentiles that enclose 95 % of resampled values."""
    tail = (1 - LEVEL) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
