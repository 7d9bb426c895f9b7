"""Features of folders, stored on disk part by part, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.eval.folders import ImageFolder, by_shape
from nextscale.io import home, regular, replacing

from .networks import Network

PART = 256  # images in a file
CACHE = ".features"  # inside the folder of images

OnImages = Callable[[int], None]


@torch.inference_mode()
def features_of(
    folder: ImageFolder,
    network: Network,
    device: torch.device,
    *,
    batch: int = 64,
    cache: Path | None = None,
    on_images: OnImages | None = None,
) -> Tensor:
    """Features [N, D] of all images, in the order of their names. `cache`: where they are kept, by default inside the folder, or in the
    home folder where the images are read-only."""
    inside, outside = folder.path / CACHE, (cache or home() / "features") / folder_key(folder)
    places = [place / f"{network.name}-{network.fingerprint[:12]}" for place in ([outside] if cache else [inside, outside])]
    found = []
    for first in range(0, len(folder.files), PART):
        files = folder.files[first : first + PART]
        stored, state = [place / f"{first // PART:06d}.safetensors" for place in places], states(folder, files)
        part = next((part for part in (read_part(file, state, len(files)) for file in stored) if part is not None), None)
        if part is None:
            part = torch.cat([one for images in folder.batches(files, batch) for one in [_computed(network, images, device)]])
            write_part(stored, part, state)
        if on_images is not None:
            on_images(len(files))
        found.append(part)
    return torch.cat(found)


def _computed(network: Network, images: Sequence[Tensor], device: torch.device) -> Tensor:
    """Features [B, D] on the host; images of one shape are run together."""
    rows: dict[int, Tensor] = {}
    for numbers in by_shape(images).values():
        found = network.features(torch.stack([images[number] for number in numbers]).to(device)).float().cpu()
        rows |= dict(zip(numbers, found, strict=True))
    return torch.stack([rows[number] for number in range(len(images))])


def folder_key(folder: ImageFolder) -> str:
    return f"{folder.path.name}-{hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:8]}"


def states(folder: ImageFolder, files: Sequence[Path]) -> str:
    """Names, sizes and times of the files: features of other files are not theirs."""
    stats = [(str(file), (folder.path / file).stat()) for file in files]
    return json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


def read_part(file: Path, state: str, images: int) -> Tensor | None:
    """Returns the stored features, a row per image; None if the file is absent, damaged or of other images."""
    try:
        with safe_open(regular(file), framework="pt") as stored:
            if (stored.metadata() or {}).get("files") != state:
                return None
            found: Tensor = stored.get_tensor("features")
            return found if found.dim() == 2 and len(found) == images else None
    except (OSError, SafetensorError):
        return None


def write_part(files: Sequence[Path], features: Tensor, state: str) -> None:
    """Writes the first of the files that can be written."""
    content = save({"features": features.contiguous()}, metadata={"files": state})
    try:
        with replacing(files[0]) as temporary:
            temporary.write_bytes(content)
    except NextscaleError as error:
        if len(files) == 1:
            raise NextscaleError(f"{error} Features are kept in the folder of images, or in the home folder (NEXTSCALE_HOME).") from error
        write_part(files[1:], features, state)
