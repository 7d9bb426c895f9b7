"""One folder of images, judged: a row of numbers with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import NextscaleError, SettingError
from ...io import from_levels
from ...metrics.dists import Dists
from ...metrics.frechet import Moments, frechet_distance
from ...metrics.intervals import Interval, mean_interval, set_interval
from ...metrics.library import inception_score, kernel_distance, torchmetrics_image
from ...metrics.lpips import Lpips
from ...metrics.neighbours import precision_recall
from ...metrics.pixels import psnr, ssim
from ..results import Row, where
from .cache import OnImages, features_of
from .images import ImageFolder, by_shape
from .networks import INCEPTION_FEATURES, NETWORKS, Network

BENCHMARK = "evaluate"
PAIR_METRICS = ("lpips", "dists", "ssim", "psnr")
NAMES = {"inception": ("fid", "kid", "precision", "recall")}  # other networks: fd_NAME, kd_NAME, precision_NAME, recall_NAME
DEVIATIONS = 1.96  # of a normal distribution, between which 95 % lie

PairMetric = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class EvaluationSetup:
    """What folders are judged by; set metrics need `real`, pair metrics `dense`."""

    device: torch.device
    metrics: Path | None = None  # folder of the networks
    networks: Sequence[str] = ()
    pairs: Sequence[str] = ()
    real: ImageFolder | None = None
    dense: ImageFolder | None = None
    resamples: int = 100
    batch: int = 64
    cache: Path | None = None
    on_images: OnImages | None = None
    _loaded: dict[str, Any] = field(default_factory=dict)

    def network(self, name: str) -> Network:
        if name not in NETWORKS:
            raise SettingError(f"network {name!r}: choose one of {', '.join(NETWORKS)}")
        if name not in self._loaded:
            self._loaded[name] = NETWORKS[name](self.metrics, self.device)
        found: Network = self._loaded[name]
        return found

    def pair_metric(self, name: str) -> PairMetric:
        if name not in PAIR_METRICS:
            raise SettingError(f"metric {name!r} of pairs: choose one of {', '.join(PAIR_METRICS)}")
        if name in ("ssim", "psnr"):
            return ssim if name == "ssim" else psnr
        if name not in self._loaded:
            self._loaded[name] = Lpips.load(self.device) if name == "lpips" else Dists.load(self.metrics, self.device)
        found: PairMetric = self._loaded[name]
        return found

    def watched(self, on_images: OnImages) -> EvaluationSetup:
        """The same, with what is loaded; `on_images` is told how many images were seen."""
        return replace(self, on_images=on_images)

    def load(self, folders: Sequence[ImageFolder] = ()) -> None:
        """Loads every network and what measures its features, and checks that `folders` can be judged by it: what is missing is said
        before hours of work."""
        if self.real is not None:
            _ = self.real.files
        if self.dense is not None:
            for folder in folders:
                folder.partners(self.dense)
        for name in self.networks:
            if self.network(name).text is not None:
                for folder in folders:
                    folder.prompts()
            elif self.real is not None:
                torchmetrics_image("kid")
            if name == "inception":
                torchmetrics_image("inception")
        for name in self.pairs:
            self.pair_metric(name)


def evaluate_folder(folder: ImageFolder, judged: EvaluationSetup) -> Row:
    """A row for the results file. Intervals are 95 % and come from resampled images, for kernel distances and the Inception score
    from the deviation over subsets."""
    row = described(folder, judged)
    for name in judged.networks:
        network = judged.network(name)
        ours = features_of(folder, network, judged.device, batch=judged.batch, cache=judged.cache, on_images=judged.on_images)
        row |= by_text(ours, network, folder) if network.text is not None else by_set(ours, network, judged)
    if judged.dense is not None and judged.pairs:
        row |= by_pairs(folder, judged.dense, judged)
    return row


def described(folder: ImageFolder, judged: EvaluationSetup) -> Row:
    """What the row is about; model, method and settings are those of the manifest where all images agree."""
    settings = [entry.settings for entry in folder.entries.values()]
    alike = {name: value for name, value in settings[0].items() if all(one.get(name) == value for one in settings)} if settings else {}
    first = folder.load(folder.files[0])
    return {
        "benchmark": BENCHMARK,
        "folder": folder.path.name,
        "model": alike.get("model"),
        "method": alike.get("method"),
        "settings": {name: value for name, value in alike.items() if name not in ("model", "method", "stages")},
        "size": [first.shape[1], first.shape[2]],
        "images": len(folder.files),
        "against": None if judged.real is None else judged.real.path.name,
        "dense": None if judged.dense is None else judged.dense.path.name,
        **where(judged.device),
    }


def by_set(ours: Tensor, network: Network, judged: EvaluationSetup) -> Row:
    """Distances of the whole set to the real images, and the Inception score, which needs none."""
    row: Row = {}
    logits = ours[:, INCEPTION_FEATURES:] if network.name == "inception" else None
    ours = ours[:, :INCEPTION_FEATURES] if network.name == "inception" else ours
    if judged.real is not None:
        real = features_of(judged.real, network, judged.device, batch=judged.batch, cache=judged.cache)[:, : ours.shape[1]]
        ours, real = ours.to(judged.device), real.to(judged.device)
        names = NAMES.get(network.name) or tuple(f"{measure}_{network.name}" for measure in ("fd", "kd", "precision", "recall"))
        row |= dict(zip(names, set_measures(ours, real, judged.resamples), strict=True))
    if logits is not None:
        row["inception_score"] = spread(*inception_score(logits))
    return row


def set_measures(ours: Tensor, real: Tensor, resamples: int) -> list[dict[str, float]]:
    """Fréchet distance, kernel distance, precision and recall of features. The first takes longest, and the others may be refused."""
    kernel = spread(*kernel_distance(ours.cpu(), real.cpu()))
    precise, recalled = (mean_interval(flags.double()).rounded() for flags in precision_recall(ours, real))
    return [frechet_interval(ours, real, resamples), kernel, precise, recalled]


def frechet_interval(ours: Tensor, real: Tensor, resamples: int) -> dict[str, float]:
    moments = Moments.of(real)

    def distance(numbers: Tensor) -> Tensor:
        return torch.stack([frechet_distance(ours[part.to(ours.device)], moments) for part in numbers])

    if resamples < 1:
        return {"value": round(float(frechet_distance(ours, moments)), 5)}
    return set_interval(distance, len(ours), resamples).rounded()


def spread(mean: float, deviation: float) -> dict[str, float]:
    if not math.isfinite(deviation):  # a single part has none
        return {"value": round(mean, 7)}
    return Interval(mean, mean - DEVIATIONS * deviation, mean + DEVIATIONS * deviation).rounded(7)


@torch.inference_mode()
def by_text(ours: Tensor, network: Network, folder: ImageFolder) -> Row:
    """CLIP score: 100 times the cosine of image and prompt, 0 where it is negative."""
    prompts = folder.prompts()
    assert network.text is not None
    told = torch.cat([network.text(prompts[first : first + 64]).cpu() for first in range(0, len(prompts), 64)])
    scores = 100 * torch.cosine_similarity(ours, told.float(), dim=1).clamp(min=0)
    return {"clip_score": mean_interval(scores).rounded()}


@torch.inference_mode()
def by_pairs(folder: ImageFolder, dense: ImageFolder, judged: EvaluationSetup) -> Row:
    """Means of the distances of every image to the dense one of the same name."""
    measures = {name: judged.pair_metric(name) for name in judged.pairs}
    values: dict[str, list[Tensor]] = {name: [] for name in measures}
    partners = folder.partners(dense)
    for images, others in zip(folder.batches(folder.files, judged.batch), dense.batches(partners, judged.batch), strict=True):
        for name, found in pair_values(images, others, measures, judged.device).items():
            values[name].append(found)
        if judged.on_images is not None:
            judged.on_images(len(images))
    return {name: pair_interval(torch.cat(found)) for name, found in values.items()}


def pair_values(
    images: Sequence[Tensor], others: Sequence[Tensor], measures: Mapping[str, PairMetric], device: torch.device
) -> dict[str, Tensor]:
    if any(a.shape != b.shape for a, b in zip(images, others, strict=True)):
        raise NextscaleError("an image and its dense partner have different sizes: generate both folders at the same size")
    found: dict[str, list[Tensor]] = {name: [] for name in measures}
    for numbers in by_shape(images).values():
        a, b = (from_levels(torch.stack([some[number] for number in numbers]).to(device)) for some in (images, others))
        for name, measure in measures.items():
            found[name].append(measure(a, b).cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}


def pair_interval(values: Tensor) -> dict[str, float]:
    """Equal images have no finite PSNR: the mean is that of the others, and `equal` counts them."""
    finite = values[values.isfinite()]
    if not len(finite):
        return {"equal": len(values)}
    equal = {} if len(finite) == len(values) else {"equal": len(values) - len(finite)}
    return mean_interval(finite.double()).rounded() | equal
