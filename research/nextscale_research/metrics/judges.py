"""Metrics of folders by networks: distances to real images, DISTS to dense ones, the Inception score, and agreement with the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nextscale.errors import NextscaleError, SettingError
from nextscale.eval.folders import ImageFolder, PairJudge
from nextscale.eval.results import Row
from nextscale.metrics.intervals import Interval, bounds, mean_interval, resampled

from .cache import features_of
from .dists import Dists
from .frechet import Moments, frechet_distance
from .library import inception_score, kernel_distance, torchmetrics_image
from .neighbors import precision_recall
from .networks import INCEPTION_FEATURES, NETWORKS, Network

METRICS = {  # name to the network that it needs
    **dict.fromkeys(("fid", "kid", "precision", "recall", "inception-score"), "inception"),
    "fd-dinov2": "dinov2",
    "fd-efficientnet": "efficientnet",
    "clip-score": "clip",
    "dists": "dists",
}
WITHOUT_REAL = ("inception-score", "clip-score", "dists")
RESAMPLES = 100  # sets behind the interval of a Fréchet distance
NAMES = {"inception": ("fid", "kid", "precision", "recall")}  # other networks: fd_NAME, kd_NAME, precision_NAME, recall_NAME
DEVIATIONS = 1.96  # of a normal distribution, within which 95 % are


class Judge(Protocol):
    """Metrics of folders that are measured in one pass over the images."""

    def check(self, folder: ImageFolder) -> None:
        """Raises an error if the folder cannot be judged."""

    def row(self, folder: ImageFolder, on_images: Callable[[int], None]) -> Row:
        """Returns the columns of a folder; calls `on_images` with the number of images of every batch."""


def judges(names: Sequence[str], real: ImageFolder | None, dense: ImageFolder | None, device: torch.device) -> list[Judge]:
    """Returns judges for the metrics `names`, and loads their networks."""
    for name in names:
        if name not in METRICS:
            raise SettingError(f"--metric must be one of lpips, ssim, psnr, {', '.join(METRICS)}; got {name!r}.")
        if real is None and name not in WITHOUT_REAL:
            raise SettingError(f"--metric {name} compares with real images. Add --real FOLDER.")
        if dense is None and name == "dists":
            raise SettingError("--metric dists compares with dense images. Add --dense FOLDER.")
    found: list[Judge] = []
    for network in dict.fromkeys(METRICS[name] for name in names):
        if network == "dists":
            assert dense is not None
            found.append(PairJudge({"dists": Dists.load(device=device)}, dense, device))
        else:
            found.append(NetworkJudge(NETWORKS[network](None, device), real, device))
    return found


@dataclass(frozen=True, eq=False)
class NetworkJudge:
    """Metrics of the features of one network."""

    network: Network
    real: ImageFolder | None
    device: torch.device

    def __post_init__(self) -> None:
        if self.network.text is None and self.real is not None:
            torchmetrics_image("kid")
        if self.network.name == "inception":
            torchmetrics_image("inception")

    def check(self, folder: ImageFolder) -> None:
        if self.network.text is not None:
            prompts_of(folder)
        elif self.real is not None:
            _ = self.real.files

    def row(self, folder: ImageFolder, on_images: Callable[[int], None]) -> Row:
        features = features_of(folder, self.network, self.device, on_images=on_images)
        return self.by_text(features, folder) if self.network.text is not None else self.by_set(features)

    def by_set(self, features: Tensor) -> Row:
        """Returns distances of the whole set to the real images, and the Inception score."""
        is_inception = self.network.name == "inception"
        ours, row = features[:, :INCEPTION_FEATURES] if is_inception else features, Row()
        if self.real is not None:
            real = features_of(self.real, self.network, self.device)[:, : ours.shape[1]]
            names = NAMES.get(self.network.name) or tuple(f"{kind}_{self.network.name}" for kind in ("fd", "kd", "precision", "recall"))
            row |= dict(zip(names, set_measures(ours.to(self.device), real.to(self.device)), strict=True))
        if is_inception:
            row["inception_score"] = spread(*inception_score(features[:, INCEPTION_FEATURES:]))
        return row

    @torch.inference_mode()
    def by_text(self, features: Tensor, folder: ImageFolder) -> Row:
        """Returns the CLIP score: 100 times the cosine of image and prompt, 0 if it is negative."""
        prompts = prompts_of(folder)
        assert self.network.text is not None
        told = torch.cat([self.network.text(prompts[first : first + 64]).cpu() for first in range(0, len(prompts), 64)])
        return {"clip_score": mean_interval(100 * torch.cosine_similarity(features, told.float(), dim=1).clamp(min=0)).rounded()}


def prompts_of(folder: ImageFolder) -> list[str]:
    """Returns one prompt per file."""
    if not all(str(file) in folder.entries for file in folder.files):
        raise NextscaleError(f"{folder.path} must have a manifest with a prompt for every image. Pass a folder of `nextscale sample`.")
    return [str(folder.entries[str(file)].prompt) for file in folder.files]


def set_measures(ours: Tensor, real: Tensor) -> list[dict[str, float]]:
    """Returns Fréchet distance, kernel distance, precision and recall of features. The first takes longest, the others may be refused."""
    kernel = spread(*kernel_distance(ours.cpu(), real.cpu()))
    precise, recalled = (mean_interval(flags.double()).rounded() for flags in precision_recall(ours, real))
    return [frechet_interval(ours, real, RESAMPLES), kernel, precise, recalled]


def frechet_interval(ours: Tensor, real: Tensor, resamples: int) -> dict[str, float]:
    moments = Moments.of(real)

    def distance(numbers: Tensor) -> Tensor:
        return torch.stack([frechet_distance(ours[part.to(ours.device)], moments) for part in numbers])

    return set_interval(distance, len(ours), resamples).rounded()


def set_interval(measure: Callable[[Tensor], Tensor], images: int, resamples: int, seed: int = 0, chunk: int = 50) -> Interval:
    """Returns the interval of a measure of a whole set, given as a function of image indices [R, images].

    A resample holds fewer different images than the set, which shifts biased measures such as Fréchet distances. So the bounds are the
    resamples' percentiles moved by the difference of the set's own value and the resamples' mean: they show the spread, not the bias.
    """
    value = float(measure(torch.arange(images)[None])[0])
    values = torch.cat([measure(part) for part in resampled(images, resamples, seed).split(chunk)]).cpu()
    low, high = bounds(values)
    shift = value - float(values.mean())
    return Interval(value, low + shift, high + shift)


def spread(mean: float, deviation: float) -> dict[str, float]:
    if not math.isfinite(deviation):  # a single part has none
        return {"value": round(mean, 7)}
    return Interval(mean, mean - DEVIATIONS * deviation, mean + DEVIATIONS * deviation).rounded(7)
