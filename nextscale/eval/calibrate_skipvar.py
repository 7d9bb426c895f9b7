"""SkipVAR's decision models, fitted for a model from images of its own.

An image's two classes are the most stages that can be left out, and the most that can run without guidance, with an image that is still
as similar to the dense one as was asked for. Logistic regressions of the two features learn them, as the published ones did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SettingError
from ..methods.method import DENSE, Method, Plans, StagePlan
from ..methods.skip import SkipStages
from ..methods.skipvar import MOST, SkipVAR, features_of, preview_of
from ..methods.skipvar_models import Classifier, Decisions
from ..metrics.pixels import ssim
from ..models.base import NextScaleModel
from ..output import Preview
from ..pipeline import Pipeline
from ..stage import Schedule

STRENGTH = 1.0  # of the data against the squared weights, as in the published fits
STEPS = 500


@dataclass(frozen=True)
class Unguided(Method):
    """Runs the last stages without the unconditional branch."""

    last: int

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return (DENSE,) * (len(schedule) - self.last) + (StagePlan(cfg_branches="cond"),) * self.last


@dataclass(frozen=True)
class Measured:
    """Features [N, 2] of every image, and its structural similarity to the dense one with 1, 2, 3 stages left out or unguided."""

    features: Tensor
    skipped: Tensor  # [N, stages]
    unguided: Tensor


def measure(
    pipe: Pipeline,
    prompts: Sequence[Any],
    schedule: Schedule,
    seed: int = 0,
    batch: int = 8,
    on_progress: Callable[[float], None] | None = None,
) -> Measured:
    """Generates every prompt densely and with every number of stages changed."""
    decide, preview = SkipVAR().stages(schedule)
    if decide is None:
        raise SettingError(f"{schedule} has too few stages to decide anything: SkipVAR needs three at least")
    stages = range(1, min(MOST, len(schedule) - 1 - decide) + 1)
    methods: list[Method] = [*(SkipStages(number) for number in stages), *(Unguided(number) for number in stages)]
    found: list[tuple[Tensor, ...]] = []
    for start in range(0, len(prompts), batch):
        some = list(prompts[start : start + batch])
        latents: dict[int, Tensor] = {}
        last: list[Preview] = []

        def keep(shown: Preview, latents: dict[int, Tensor] = latents, last: list[Preview] = last) -> None:
            latents[shown.done.stage.index] = shown.latent
            last[:] = [shown]

        request: dict[str, Any] = {"seed": seed + start, "size": schedule}
        dense = pipe(some, method=Method(), on_stage=keep, **request).pixels
        with torch.inference_mode():
            small = (preview_of(latents[stage], schedule[preview], last[0].canvas) for stage in (decide - 1, decide))
            features = features_of(*small)
        similar = torch.stack([ssim(pipe(some, method=method, **request).pixels, dense) for method in methods], dim=1)
        found.append((features.cpu().double(), *similar.cpu().double().split(len(stages), dim=1)))
        if on_progress is not None:
            on_progress(min(1.0, (start + batch) / len(prompts)))
    return Measured(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def fit(measured: Measured, similarity: float) -> Decisions:
    """The decision models that keep images at least this similar to the dense ones, as far as two features tell."""
    require_similarity(similarity)
    skip, uncond = (most_within(similar, similarity) for similar in (measured.skipped, measured.unguided))
    kept = skip == 0
    return Decisions(
        logistic_regression(measured.features, skip),
        logistic_regression(measured.features[kept], uncond[kept]) if kept.any() else constant(measured.features.shape[1], 0),
    )


def require_similarity(similarity: float) -> None:
    """SettingError unless images can be as similar to others as this."""
    if not 0 < similarity <= 1:
        raise SettingError(f"similarity is above 0 and at most 1, such as 0.84; got {similarity!r}")


def most_within(similar: Tensor, limit: float) -> Tensor:
    """The largest number of stages [N] whose image is similar enough, from similarities [N, stages] with 1, 2, ... of them changed."""
    numbers = torch.arange(1, similar.shape[1] + 1)
    return torch.where(similar >= limit, numbers, 0).amax(dim=1)


def constant(features: int, number: int) -> Classifier:
    return Classifier((0.0,) * features, (1.0,) * features, (number,), ((0.0,) * features,), (0.0,))


def logistic_regression(features: Tensor, labels: Tensor) -> Classifier:
    """A multinomial logistic regression of standardised features [N, F]: cross-entropy summed over the images, and half the squared
    weights. Of a single class it is that class."""
    classes, target = labels.unique(return_inverse=True)
    if len(classes) == 1:
        return constant(features.shape[1], int(classes[0]))
    features = features.double()
    mean, scale = features.mean(dim=0), features.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    standard = (features - mean) / scale
    weights = torch.zeros(len(classes), features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(classes), dtype=torch.float64, requires_grad=True)
    exact = {"max_iter": STEPS, "tolerance_grad": 1e-10, "tolerance_change": 1e-14, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([weights, bias], **exact)  # type: ignore[arg-type]

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = STRENGTH * F.cross_entropy(standard @ weights.T + bias, target, reduction="sum") + weights.square().sum() / 2
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        centred = bias - bias.mean()
    rows = tuple(tuple(row) for row in weights.tolist())
    return Classifier(tuple(mean.tolist()), tuple(scale.tolist()), tuple(classes.tolist()), rows, tuple(centred.tolist()))
