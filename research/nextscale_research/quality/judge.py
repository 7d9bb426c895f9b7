"""Comparisons that also judge whole sets: Fréchet distances of EfficientNet features, and agreement with the prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nextscale.eval.compare import METRIC_BATCH, Comparison, Distance, compare, mixed_batches
from nextscale.eval.results import DENSE, Row
from nextscale.io import from_levels
from nextscale.methods import Method
from nextscale.metrics.intervals import mean_interval
from nextscale.pipeline import Pipeline

from ..metrics.efficientnet import EfficientNetLite0
from ..metrics.frechet import Directions, Moments, frechet_distance
from ..metrics.judges import set_interval
from .agreement import Agreement, real_features
from .prompts import EvalPrompt

DIRECTIONS = 64  # principal directions of the features along which Fréchet distances are taken; see metrics.frechet
IMAGES_PER_DIRECTION = 4  # fewer images than that determine no covariance,
FEWEST_DIRECTIONS = 16  # and along fewer directions than these a distance says nothing: 64 images are needed
FRECHET_RESAMPLES = 100


@dataclass(frozen=True, eq=False)
class SetJudge:
    """Features of the images of every method; prompts and features are in one order."""

    network: EfficientNetLite0
    agreement: Agreement | None = None
    features: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @torch.inference_mode()
    def add(self, name: str, images: Tensor) -> None:
        """Adds features of images [B, 3, H, W] in 8 bits."""
        self.features[name] += [self.network.features(from_levels(part)) for part in images.split(METRIC_BATCH)]

    def rows(self, prompts: Sequence[EvalPrompt]) -> dict[str, Row]:
        """Returns the columns of all methods that generated an image for every prompt."""
        has_images = all(prompt.encoded is not None for prompt in prompts)
        references = real_features(self.network, prompts).cpu() if has_images else None
        joined = {name: torch.cat(parts) for name, parts in self.features.items()}
        found = {name: SetRows(features, joined[DENSE], prompts, references) for name, features in joined.items()}
        whole = {name: rows for name, rows in found.items() if len(rows.ours) == len(prompts)}
        return {name: rows.frechet() | rows.agreement(self.agreement) for name, rows in whole.items()}


@dataclass(frozen=True, eq=False)
class SetRows:
    """Features [N, D] of one method and of dense generation, and of real images, if given."""

    ours: Tensor
    dense: Tensor
    prompts: Sequence[EvalPrompt]
    references: Tensor | None

    def frechet(self) -> Row:
        """Returns distances to real images, which stay as they are while ours are resampled, and to dense ones, resampled in pairs."""
        if self.directions is None:
            return {}
        ours, theirs = (self.directions(features.cpu()) for features in (self.ours, self.dense))
        row: Row = {"frechet_directions": ours.shape[1]}
        if self.references is not None:
            fixed = Moments.of(self.directions(self.references))
            row["frechet_real"] = self.distance(lambda part: frechet_distance(ours[part], fixed))
        if self.ours is not self.dense:
            row["frechet_dense"] = self.distance(lambda part: frechet_distance(ours[part], theirs[part]))
        return row

    def distance(self, of_images: Callable[[Tensor], Tensor]) -> dict[str, float]:
        found = set_interval(of_images, len(self.prompts), FRECHET_RESAMPLES).rounded()
        return found | {"low": max(found["low"], 0.0)}

    @cached_property
    def directions(self) -> Directions | None:
        """The directions in which real images vary most, or dense ones without real ones; None for too few images."""
        number = min(DIRECTIONS, len(self.prompts) // IMAGES_PER_DIRECTION)
        if number < FEWEST_DIRECTIONS:
            return None
        return Directions.of(self.dense.cpu() if self.references is None else self.references, number)

    def agreement(self, probes: Agreement | None) -> Row:
        """Returns the share of images that agree with the prompt, and its difference to the dense images of the same seeds."""
        if probes is None:
            return {}
        row: Row = {}
        before = probes.hits(self.dense, self.prompts)
        for name, (flags, _) in probes.hits(self.ours, self.prompts).items():
            if not len(flags):
                continue
            row[name] = mean_interval(flags.double()).rounded() | {"images": len(flags), "real": probes.real.get(name)}
            if self.ours is not self.dense:
                row[f"{name}_change"] = mean_interval(flags.double() - before[name][0].double()).rounded()
        return row


def judge(
    pipeline: Pipeline,
    methods: Mapping[str, Method],
    prompts: Sequence[EvalPrompt],
    lpips: Distance,
    sets: SetJudge | None = None,
    *,
    batch: int = 64,
    **options: Any,
) -> Comparison:
    """Compares methods as `nextscale.eval.compare` does, whose `options` it takes, and adds the columns of `sets`."""
    options |= {"on_images": sets.add} if sets else {}
    found = compare(pipeline, methods, [prompt.text for prompt in prompts], lpips, batch=batch, **options)
    if sets is not None:
        columns = sets.rows([prompts[number] for numbers in mixed_batches(len(prompts), batch) for number in numbers])
        for row in found.rows:
            row |= columns.get(row["method"], {})
    return found
