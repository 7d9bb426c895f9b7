"""Confidence intervals of means over images, from resampled images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..errors import SettingError

LEVEL = 0.95
RESAMPLES = 2000
MOST_RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A value and the bounds between which it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def rounded(self, digits: int = 5) -> dict[str, float]:
        """Plain values for JSON."""
        return {name: round(number, digits) for name, number in asdict(self).items()}


def resampled(images: int, resamples: int, seed: int = 0) -> Tensor:
    """Indices of images, sampled with replacement, [resamples, images]: the same for every measurement of the same images."""
    if images < 1 or not 1 <= resamples <= MOST_RESAMPLES:
        raise SettingError(f"an interval needs one or more images and 1 to {MOST_RESAMPLES} resamples; got {images} and {resamples}")
    return torch.randint(images, (resamples, images), generator=torch.Generator().manual_seed(seed))


def mean_interval(values: Tensor | Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """The interval of the mean of one number per image. Give differences to the dense images for a paired difference."""
    numbers = torch.as_tensor(values, dtype=torch.float64).cpu()
    means = numbers[resampled(len(numbers), resamples, seed)].mean(dim=1)
    return Interval(float(numbers.mean()), *_bounds(means))


def set_interval(measure: Callable[[Tensor], Tensor], images: int, resamples: int, seed: int = 0, chunk: int = 50) -> Interval:
    """The interval of a measure of a whole set, given as a function of image indices [R, images].

    A resample holds fewer different images than the set, which shifts biased measures such as Fréchet distances. So the bounds are the
    resamples' percentiles moved by the difference of the set's own value and the resamples' mean: they show the spread, not the bias.
    """
    value = float(measure(torch.arange(images)[None])[0])
    values = torch.cat([measure(part) for part in resampled(images, resamples, seed).split(chunk)]).cpu()
    low, high = _bounds(values)
    shift = value - float(values.mean())
    return Interval(value, low + shift, high + shift)


def _bounds(values: Tensor) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
