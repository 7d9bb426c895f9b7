"""EfficientNet-lite0, an ImageNet classifier whose features describe the content of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.checkpoints import Layout, load_weights

from .files import EFFICIENTNET, metric_file

FEATURES, CLASSES = 1280, 1000
SHORT_SIDE, CROP = 256, 224
STAGES = (  # repeats, kernel, stride of the first, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv(nn.Conv2d):
    """A convolution padded as in TensorFlow: the size is divided by the stride and rounded up, the odd pixel is at the right and bottom."""

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        vertical, horizontal = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[2:])
        x = F.pad(x, (horizontal // 2, horizontal - horizontal // 2, vertical // 2, vertical - vertical // 2))
        return super().forward(x)


class InvertedResidual(nn.Module):
    def __init__(self, dim: int, channels: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = dim * expansion
        self.expand = SameConv(dim, inner, 1) if expansion > 1 else None
        self.depthwise = SameConv(inner, inner, kernel, stride, groups=inner)
        self.project = SameConv(inner, channels, 1)
        self.adds_input = stride == 1 and dim == channels

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.adds_input else y


class EfficientNetLite0(nn.Module):
    """Batch norm is folded into the convolutions; no squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = SameConv(3, 32, 3, 2)
        blocks, dim = [], 32
        for repeats, kernel, first_stride, expansion, channels in STAGES:
            for repeat in range(repeats):
                blocks.append(InvertedResidual(dim, channels, kernel, first_stride if repeat == 0 else 1, expansion))
                dim = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = SameConv(dim, FEATURES, 1)
        self.fc = nn.Linear(FEATURES, CLASSES)

    @classmethod
    def load(cls, given: Path | None = None, device: str | torch.device = "cpu") -> Self:
        """Loads from the folder of metric networks `given`, or wherever `metric_file` looks; in float32."""
        with torch.device("meta"):
            network = cls()
        load_weights(network, metric_file(EFFICIENTNET, given), Layout(), device=torch.device(device), dtype=torch.float32)
        return network.eval().requires_grad_(False)

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] of any size to features [B, 1280]."""
        pixels = central_crop(images.to(self.fc.weight).clamp(-1, 1))
        return self.pooled(((pixels + 1) * 127.5 - 127) / 128)

    def pooled(self, x: Tensor) -> Tensor:
        """Features of normalized images."""
        x = self.blocks(F.relu6(self.stem(x)))
        return F.relu6(self.head(x)).mean(dim=(2, 3))


def central_crop(images: Tensor) -> Tensor:
    """Images with the short side resized to 256, cropped to 224 x 224 pixels around the center."""
    height, width = images.shape[2:]
    if min(height, width) != SHORT_SIDE:
        factor = SHORT_SIDE / min(height, width)
        size = (max(SHORT_SIDE, round(height * factor)), max(SHORT_SIDE, round(width * factor)))
        images = F.interpolate(images, size, mode="bicubic", align_corners=False, antialias=True).clamp(-1, 1)
    top, left = ((side - CROP) // 2 for side in images.shape[2:])
    return images[:, :, top : top + CROP, left : left + CROP]
