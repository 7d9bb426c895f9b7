"""Image distances: LPIPS, PSNR and SSIM."""

from .lpips import Lpips

__all__ = ["Lpips"]
