"""SkipVAR's decision models: logistic regressions, published or of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.io import expanded, regular
from nextscale.validation import is_finite, is_int


class Classifier(NamedTuple):
    """A logistic regression of standardized features; its classes are numbers of stages."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    classes: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]

    @classmethod
    def read(cls, entry: Any, where: str) -> Classifier:
        """Reads one of the decisions of a file; SettingError if it is none."""
        try:
            fields: list[Any] = [tuple(tuple(one) if isinstance(one, list) else one for one in entry[name]) for name in cls._fields]
            found = cls(*fields)
        except (TypeError, KeyError) as error:
            raise SettingError(f"{where}: expected {', '.join(cls._fields)}, each a list; got {error!r}") from None
        features = len(found.mean)
        fits = features in (1, 2) and len(found.scale) == features and len(found.classes) == len(found.weights) == len(found.bias) > 0
        fits = fits and all(isinstance(row, tuple) and len(row) == features for row in found.weights)
        numbers = [*found.mean, *found.scale, *found.bias, *(one for row in found.weights for one in row)] if fits else []
        if not fits or not all(map(is_finite, numbers)) or 0 in found.scale:
            raise SettingError(
                f"{where}: mean and scale are one number per feature, weights one such row and bias one number per class, all finite"
            )
        if not all(is_int(number) for number in found.classes):
            raise SettingError(f"{where}: classes are numbers of stages; got {list(found.classes)}")
        return found

    def scores(self, features: Tensor) -> Tensor:
        """Features [B, 2] to one score per class, [B, classes], in double precision. A model of one feature reads the first."""
        mean, scale, _, weights, bias = (torch.tensor(values, dtype=torch.float64) for values in self)
        return (features.double()[:, : len(self.mean)] - mean) / scale @ weights.T + bias

    def __call__(self, features: Tensor) -> list[int]:
        return [self.classes[place] for place in self.scores(features).argmax(dim=1).tolist()]


class Decisions(NamedTuple):
    skip: Classifier
    uncond: Classifier

    @classmethod
    def read(cls, content: Any, where: str) -> Decisions:
        return cls(*(Classifier.read(content.get(name) if isinstance(content, Mapping) else None, where) for name in cls._fields))

    @property
    def outcomes(self) -> list[Outcome]:
        """All that may become of an image."""
        go_on = [Outcome(0, number) for number in self.uncond.classes] if 0 in self.skip.classes else []
        return [*go_on, *(Outcome(number, 0) for number in self.skip.classes if number)]

    def __call__(self, features: Tensor) -> list[Outcome]:
        """Returns the outcome of every image, from features [B, 2]."""
        return [Outcome(skip, 0 if skip else uncond) for skip, uncond in zip(self.skip(features), self.uncond(features), strict=True)]


class Outcome(NamedTuple):
    """Numbers of last stages that an image leaves out, or runs without the unconditional branch."""

    skipped: int
    unguided: int


@cache
def published_decisions() -> dict[str, Decisions]:
    content = json.loads(files(__package__).joinpath("skipvar.json").read_text())
    return {name: Decisions.read(entry, name) for name, entry in content.items() if name != "note"}


def decisions_named(name: str) -> Decisions:
    """Returns the published models, or the models of a file."""
    published = published_decisions()
    if name in published:
        return published[name]
    try:
        if not name.endswith(".json"):
            raise FileNotFoundError("no name of such a file, which ends in .json")
        content = json.loads(regular(expanded(name)).read_text())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither text nor JSON
        raise SettingError(
            f"models must be one of {', '.join(published)} or a file of calibrate-skipvar; got {name!r} ({error})."
        ) from None
    return Decisions.read(content, name)
