"""Fréchet distance of EfficientNet-lite0 features: how far apart two sets of images are as a whole.

It is the distance of FID with another network, and not comparable with FID. It is biased: even two sets generated from the same
prompts with other seeds are some distance apart, the more the fewer images there are. With 500 images the covariance of 1280 features is
singular and most of the distance is this bias. So sets are best compared along a few fixed directions (`Directions`, the principal ones
of real images), where 500 images determine a covariance, and only between sets of the same number of images.

torchmetrics and torch-fidelity give the same distance of the same features, as tests show; this one runs with torch alone, and takes many
resamples of a set at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nextscale.errors import SettingError


@dataclass(frozen=True, eq=False)
class Directions:
    """The directions along which a set of features varies most."""

    mean: Tensor  # [D], float64
    basis: Tensor  # [D, K], float64

    @staticmethod
    def of(features: Tensor, count: int) -> Directions:
        """`count` principal directions of `features` [N, D], or as many as there are."""
        x = _checked(features)
        mean = x.mean(dim=0)
        directions = torch.linalg.svd(x - mean, full_matrices=False).Vh
        return Directions(mean, directions[: min(count, x.shape[0] - 1)].mT)

    def __call__(self, features: Tensor) -> Tensor:
        """Coordinates [..., K] of features [..., D], in float64."""
        return (features.to(self.mean) - self.mean) @ self.basis


class Moments(NamedTuple):
    """The mean and the covariance of a set of features, the latter as its trace and as R of C = R R^T."""

    mean: Tensor  # [..., D], float64
    variance: Tensor  # [...]
    root: Tensor  # [..., D, D]

    @staticmethod
    def of(features: Tensor) -> Moments:
        mean, covariance = _moments(_checked(features))
        values, vectors = torch.linalg.eigh(covariance)  # in ascending order
        rounding = values[..., -1:] * values.shape[-1] * torch.finfo(values.dtype).eps
        return Moments(mean, _trace(covariance), vectors * values.where(values > rounding, 0).sqrt().unsqueeze(-2))


def frechet_distance(a: Tensor, b: Tensor | Moments) -> Tensor:
    """Squared Fréchet distance of the normal distributions with the means and covariances of a [..., N, D] and b [..., M, D]: [...].

    |mean_a - mean_b|^2 + trace(C_a) + trace(C_b) - 2 trace((R^T C_a R)^1/2) with C_b = R R^T, in float64. All roots are taken of
    eigenvalues of symmetric matrices; rounding errors count as zero, so singular covariances do no harm. To compare many sets with b,
    pass its moments.
    """
    b = b if isinstance(b, Moments) else Moments.of(b)
    mean, covariance = _moments(_checked(a))
    inner = b.root.mT @ covariance @ b.root
    shared = torch.linalg.eigvalsh((inner + inner.mT) / 2).clamp(min=0).sqrt().sum(dim=-1)
    return ((mean - b.mean).square().sum(dim=-1) + _trace(covariance) + b.variance - 2 * shared).clamp(min=0)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(dim=-1)


def _checked(features: Tensor) -> Tensor:
    if features.ndim < 2 or features.shape[-2] < 2:
        raise SettingError(f"a Fréchet distance compares sets of two or more feature vectors [N, D]; got {tuple(features.shape)}")
    return features.double()


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(dim=-2)
    centered = x - mean.unsqueeze(-2)
    return mean, centered.mT @ centered / (x.shape[-2] - 1)
