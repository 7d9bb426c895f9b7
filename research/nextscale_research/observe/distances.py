"""Distances of the image after every stage to the final one, and the stage from which little is left.

StageVAR's stages follow from such curves: semantics (CLIP, DINO) settle before structure (LPIPS, DISTS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import CheckpointError
from nextscale.metrics import Lpips
from nextscale_research.metrics.dists import Dists
from nextscale_research.metrics.networks import NETWORKS, Network

from .numbers import Curve

SETTLED = 0.1  # of the distance after the first stage

Distance = Callable[[Tensor, Tensor], Tensor]
"""Distances [B] of two batches of images [B, 3, H, W] in [-1, 1]."""


TextScore = Callable[[Tensor, Sequence[str]], Tensor]
"""Likeness [B] of images [B, 3, H, W] in [-1, 1] and prompts."""


def available_distances(metrics: Path | None, device: torch.device) -> dict[str, Distance]:
    """Returns LPIPS, and DISTS, CLIP and DINOv2 if their weights are in the folder of metric networks."""
    found: dict[str, Distance] = {"lpips": Lpips.load(device)}
    with suppress(CheckpointError):
        found["dists"] = Dists.load(metrics, device)
    for name in ("clip", "dinov2"):
        with suppress(CheckpointError):
            found[name] = cosine_distance(NETWORKS[name](metrics, device))
    return found


def cosine_distance(network: Network) -> Distance:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        ours, theirs = (network.features(((image + 1) * 127.5).to(torch.uint8)) for image in (a, b))
        return 1 - torch.cosine_similarity(ours.float(), theirs.float(), dim=1)

    return distance


def available_text_score(metrics: Path | None, device: torch.device) -> TextScore | None:
    """Returns the cosine of CLIP's features of image and text, if its weights are in the folder of metric networks."""
    try:
        network = NETWORKS["clip"](metrics, device)
    except CheckpointError:
        return None

    def score(images: Tensor, prompts: Sequence[str]) -> Tensor:
        assert network.text is not None
        seen, told = network.features(((images + 1) * 127.5).to(torch.uint8)), network.text(list(prompts))
        return torch.cosine_similarity(seen.float(), told.float(), dim=1)

    return score


def text_scores(images: Sequence[Tensor], prompts: Sequence[str], score: TextScore) -> Tensor:
    """Returns the likeness of the image after each stage to its prompt, [B, stages]."""
    return torch.stack([score(image.clamp(-1, 1), prompts).cpu() for image in images], dim=1)


def stage_distances(images: Sequence[Tensor], final: Tensor, distances: Mapping[str, Distance]) -> dict[str, Tensor]:
    """Per measure, the distance of the image after each stage to the final one, [B, stages]; smaller images are enlarged."""
    final = final.clamp(-1, 1)
    sized = [image.clamp(-1, 1) for image in images]
    sized = [image if image.shape == final.shape else F.interpolate(image, final.shape[2:], mode="bilinear") for image in sized]
    return {name: torch.stack([measure(image, final).cpu() for image in sized], dim=1) for name, measure in distances.items()}


def boundary(curve: Curve) -> int | None:
    """The first stage after which at most a tenth of the distance that the first stage leaves is left; None: only the last one."""
    first = curve.mean[0]
    if first is None or first <= 0:
        return None
    settled = [stage for stage, value in enumerate(curve.mean[:-1]) if value is not None and value <= SETTLED * first]
    return settled[0] if settled else None
