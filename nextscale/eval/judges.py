"""The networks that judge images, and what they find in those of one method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..io import from_levels
from ..metrics import Lpips
from ..metrics.efficientnet import EfficientNetLite0
from ..metrics.pixels import psnr, ssim
from ..report import Report
from .agreement import Agreement

METRIC_BATCH = 64  # images that are measured at a time


@dataclass(eq=False)
class Measured:
    """What was seen of one method, batch by batch; images in the order in which they were generated."""

    error: str | None = None
    untimed: list[Report] = field(default_factory=list)  # of the warm-up
    reports: list[Report] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # [B, 1280]
    pairs: dict[str, list[Tensor]] = field(default_factory=lambda: {"psnr": [], "ssim": [], "lpips": []})  # [B] against dense

    def pair(self, name: str) -> Tensor:
        """Distances of all images to the dense ones, [N]."""
        return torch.cat(self.pairs[name]).double().cpu()


@dataclass(frozen=True, eq=False)
class Judges:
    """LPIPS, the network whose features stand for what an image shows, and probes of these features. Without it only pairs are compared."""

    lpips: Callable[[Tensor, Tensor], Tensor]
    features: EfficientNetLite0 | None = None
    agreement: Agreement | None = None

    @staticmethod
    def load(features: Path | None, probe: Path | None, device: torch.device) -> Judges:
        """Loads LPIPS, and the other networks from their files; without `features` there are none."""
        network = None if features is None else EfficientNetLite0.load(features, device)
        return Judges(Lpips.load(device), network, None if probe is None else Agreement.load(probe, device))

    @torch.inference_mode()
    def measure(self, images: Tensor, dense: Tensor, result: Measured) -> None:
        """Adds what images [B, 3, H, W] in 8 bits show; those that are not `dense` themselves are compared with it."""
        for ours, theirs in zip(images.split(METRIC_BATCH), dense.split(METRIC_BATCH), strict=True):
            a, b = from_levels(ours), from_levels(theirs)
            if self.features is not None:
                result.features.append(self.features.features(a))
            if images is not dense:
                found = {"psnr": psnr(a, b), "ssim": ssim(a, b), "lpips": self.lpips(a, b)}
                for name, values in found.items():
                    result.pairs[name].append(values)
