"""PSNR and SSIM of image pairs.

A test compares them with torchmetrics. SSIM differs from it at the margin: torchmetrics reflects the image and counts windows beyond its
edge, the paper does not. These versions need torch only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SettingError

WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (BT.601)
STRIP = 2**18  # pixels compared at once: 2600 x 4000 pixels take 0.05 GB of extra memory in strips and 1.9 GB at once


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Returns the PSNR in dB of each image pair, [B]; infinite for equal images. a, b [B, 3, H, W] in [-1, 1] are clamped."""
    _require_pairs(a, b)
    a, b = _unit(a, b)
    return -10 * (a - b).square().mean(dim=(1, 2, 3)).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Returns the SSIM of the luma of each image pair, [B], as published by Wang et al. (2004): 11 x 11 Gaussian windows inside the image,
    sigma 1.5, K1 0.01, K2 0.03. a, b [B, 3, H, W] in [-1, 1] are clamped."""
    _require_pairs(a, b)
    height, width = a.shape[2:]
    if min(height, width) < WINDOW:
        raise SettingError(f"SSIM images must be at least {WINDOW} x {WINDOW} pixels; got {height} x {width}.")
    rows = max(STRIP // (len(a) * width), 1)
    strips = (slice(row, row + rows + WINDOW - 1) for row in range(0, height - WINDOW + 1, rows))
    return torch.cat([_similarity(*_unit(a[:, :, strip], b[:, :, strip])) for strip in strips], dim=1).mean(dim=(1, 2))


def _similarity(a: Tensor, b: Tensor) -> Tensor:
    """Returns the similarity [B, H - 10, W - 10] of every window of two batches [B, 3, H, W] in [0, 1]."""
    weights = a.new_tensor(LUMA).view(1, 3, 1, 1)
    x, y = ((image * weights).sum(dim=1, keepdim=True) for image in (a, b))
    mean_x, mean_y, xx, yy, xy = _blurred(torch.cat((x, y, x * x, y * y, x * y), dim=1)).unbind(dim=1)
    variances = xx - mean_x**2 + yy - mean_y**2
    covariance = xy - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    return (2 * mean_x * mean_y + c1) * (2 * covariance + c2) / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))


def _require_pairs(a: Tensor, b: Tensor) -> None:
    """Raises SettingError unless both are batches of images of equal size."""
    if a.shape != b.shape or a.ndim != 4 or a.shape[1] != 3:
        raise SettingError(f"images must be two batches [B, 3, H, W] of equal shape; got {tuple(a.shape)} and {tuple(b.shape)}.")


def _unit(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both batches in [0, 1]."""
    first, second = ((image.float().clamp(-1, 1) + 1) / 2 for image in (a, b))
    return first, second


def _blurred(maps: Tensor) -> Tensor:
    """Returns Gaussian means of every map [B, C, H, W] for the windows inside it."""
    offsets = torch.arange(WINDOW, device=maps.device, dtype=maps.dtype) - WINDOW // 2
    kernel = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    kernel = (kernel / kernel.sum()).expand(maps.shape[1], 1, 1, WINDOW)
    across = F.conv2d(maps, kernel, groups=maps.shape[1])
    return F.conv2d(across, kernel.mT, groups=maps.shape[1])
