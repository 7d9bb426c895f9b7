"""How far two images are apart, pixel by pixel (PSNR) and window by window (SSIM).

torchmetrics gives the same numbers, as a test shows, but for the windows of SSIM that reach over the margin, which it reflects and counts
and the paper does not. These run with torch alone, on machines where nothing can be installed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SettingError

WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (BT.601)
STRIP = 2**18  # pixels whose windows are compared at once: 2600 x 4000 pixels take 0.05 GB more memory, all at once 1.9 GB


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Decibels per image [B], over all channels; infinite where the images are equal. a, b [B, 3, H, W] in [-1, 1], clamped."""
    _require_pairs(a, b)
    a, b = _unit(a, b)
    return -10 * (a - b).square().mean(dim=(1, 2, 3)).log10()


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity per image [B] of the luma, in windows that lie inside the image: an 11 x 11 Gaussian with sigma 1.5, K1 0.01,
    K2 0.03, as Wang et al. (2004) publish it. a, b [B, 3, H, W] in [-1, 1], clamped."""
    _require_pairs(a, b)
    height, width = a.shape[2:]
    if min(height, width) < WINDOW:
        raise SettingError(f"SSIM looks at windows of {WINDOW} x {WINDOW} pixels; the images have {height} x {width}")
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
    """Raises SettingError unless both are batches of images of one size."""
    if a.shape != b.shape or a.ndim != 4 or a.shape[1] != 3:
        raise SettingError(f"two batches of images [B, 3, H, W] of the same size are compared; got {tuple(a.shape)} and {tuple(b.shape)}")


def _unit(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both batches in [0, 1]."""
    first, second = ((image.float().clamp(-1, 1) + 1) / 2 for image in (a, b))
    return first, second


def _blurred(maps: Tensor) -> Tensor:
    """Gaussian means of every map [B, C, H, W] at the windows inside it."""
    offsets = torch.arange(WINDOW, device=maps.device, dtype=maps.dtype) - WINDOW // 2
    kernel = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    kernel = (kernel / kernel.sum()).expand(maps.shape[1], 1, 1, WINDOW)
    across = F.conv2d(maps, kernel, groups=maps.shape[1])
    return F.conv2d(across, kernel.mT, groups=maps.shape[1])
