"""LPIPS (Zhang et al., 2018): perceptual distance of images from AlexNet's features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..assets import EMBEDDED
from ..checkpoints import Layout, load_weights
from ..errors import SizeError

WEIGHTS = EMBEDDED / "lpips_alex_fp16.safetensors"
CHANNELS = (64, 192, 384, 256, 256)
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # per channel
POOLED_AFTER = 2  # the first two convolutions
SMALLEST_SIDE = 31  # pixels; for smaller images a pooling layer has no output


class Lpips(nn.Module):
    """LPIPS 0.1 with AlexNet; differentiable in both images, with frozen weights."""

    shift: Tensor
    scale: Tensor

    def __init__(self, channels: tuple[int, ...] = CHANNELS) -> None:
        super().__init__()
        first, second, *rest = channels
        self.features = nn.ModuleList(
            [
                nn.Conv2d(3, first, 11, stride=4, padding=2),
                nn.Conv2d(first, second, 5, padding=2),
                *(nn.Conv2d(inner, outer, 3, padding=1) for inner, outer in zip(channels[1:], rest, strict=False)),
            ]
        )
        self.lin = nn.ModuleList(nn.Conv2d(each, 1, 1, bias=False) for each in channels)
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)

    @classmethod
    def load(cls, device: torch.device | str = "cpu") -> Lpips:
        """Loads the published weights, which come with the package."""
        network = cls()
        load_weights(network, WEIGHTS, Layout())
        return network.to(device)

    @classmethod
    def load_for(cls, size: Sequence[int], device: torch.device | str) -> Lpips | None:
        """Loads the network for images of this height and width; None if they are too small for it."""
        return cls.load(device) if min(size) >= SMALLEST_SIDE else None

    def forward(self, a: Tensor, b: Tensor, features_dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns distances [B] of images [B, 3, H, W] in [-1, 1].

        features_dtype: dtype of the convolutions; training may use bfloat16. Distances are computed in float32.
        """
        if a.shape != b.shape or a.ndim != 4 or a.shape[1] != 3 or min(a.shape[2:]) < SMALLEST_SIDE:
            raise SizeError(
                f"LPIPS images must be [B, 3, H, W] of equal shape with sides of at least {SMALLEST_SIDE} pixels; "
                f"got {list(a.shape)} and {list(b.shape)}."
            )
        with torch.autocast(a.device.type, enabled=False):
            pairs = zip(self.directions(a, features_dtype), self.directions(b, features_dtype), self.lin, strict=True)
            # [B, C, h, w]: weighted over the channels, then averaged over the map
            return torch.stack([head((ours - theirs).square()).mean((1, 2, 3)) for ours, theirs, head in pairs]).sum(0)

    def directions(self, images: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Returns the features of each layer, float32, normalized over the channels; the convolutions use `dtype`."""
        x = ((images.float() - self.shift) / self.scale).to(dtype)
        found = []
        for layer, conv in enumerate(self.features):
            assert isinstance(conv, nn.Conv2d) and conv.bias is not None
            x = F.relu(F.conv2d(x, conv.weight.to(dtype), conv.bias.to(dtype), conv.stride, conv.padding))
            features = x.float()
            # vector_norm has a zero gradient at zero; the square root of a sum of squares would have NaN
            found.append(features / (torch.linalg.vector_norm(features, dim=1, keepdim=True) + 1e-10))
            if layer < POOLED_AFTER:
                x = F.max_pool2d(x, 3, 2)
        return found
