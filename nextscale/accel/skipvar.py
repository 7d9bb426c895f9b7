"""SkipVAR (Li et al., 2025): two numbers of cheap previews decide for every image which late stages run, and which without guidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import is_number, is_whole
from ..errors import SettingError
from ..stage import Schedule, Stage
from .method import DENSE, ImageGroup, Method, MethodRun, Plans, RunSetup, StagePlan

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel

PUBLISHED_STAGES, PUBLISHED_DECISION, PUBLISHED_PREVIEW = 13, 9, 4
MOST = 3  # stages that are dropped, or run without guidance
HIGH_FREQUENCIES = 0.4  # of the smaller side's half, the radius beyond which frequencies are high
SOBEL = ((1.0, 0.0, -1.0), (2.0, 0.0, -2.0), (1.0, 0.0, -1.0))


# --- decision models


class Classifier(NamedTuple):
    """A logistic regression of standardised features; its classes are numbers of stages."""

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
        numbers = [*found.mean, *found.scale, *found.bias, *(one for row in found.weights for one in row)] if fits else []
        if not fits or not all(map(is_number, numbers)) or 0 in found.scale or any(len(row) != features for row in found.weights):
            raise SettingError(f"{where}: mean and scale have one number per feature, weights one row and bias one number per class")
        if not all(is_whole(number) for number in found.classes):
            raise SettingError(f"{where}: classes are numbers of stages; got {list(found.classes)}")
        return found

    def scores(self, features: Tensor) -> Tensor:
        """Features [B, 2] to one score per class, [B, classes], in double precision. A model of one feature reads the first."""
        numbers = [torch.tensor(values, dtype=torch.float64) for values in (self.mean, self.scale, self.weights, self.bias)]
        mean, scale, weights, bias = numbers
        return (features.double()[:, : len(self.mean)] - mean) / scale @ weights.T + bias

    def __call__(self, features: Tensor) -> list[int]:
        return [self.classes[place] for place in self.scores(features).argmax(dim=1).tolist()]


class Decisions(NamedTuple):
    skip: Classifier
    uncond: Classifier

    @classmethod
    def read(cls, content: Any, where: str) -> Decisions:
        return cls(*(Classifier.read(content.get(name) if isinstance(content, Mapping) else None, where) for name in cls._fields))

    def __call__(self, features: Tensor) -> list[Outcome]:
        """What becomes of every image, from features [B, 2]."""
        pairs = zip(self.skip(features), self.uncond(features), strict=True)
        return [Outcome(skipped, 0 if skipped else unguided) for skipped, unguided in pairs]


class Outcome(NamedTuple):
    """How many of the last stages an image leaves out, and how many it runs without the unconditional branch."""

    skipped: int
    unguided: int


@cache
def published_decisions() -> dict[str, Decisions]:
    content = json.loads(files(__package__).joinpath("skipvar.json").read_text())
    return {name: Decisions.read(entry, name) for name, entry in content.items() if name != "note"}


def decisions_named(name: str) -> Decisions:
    """Published ones, or those of a file."""
    if name in published_decisions():
        return published_decisions()[name]
    try:
        if not name.endswith(".json"):
            raise FileNotFoundError("its name ends with .json")
        content = json.loads(Path(name).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingError(
            f"SkipVAR: models {name!r} are none of {', '.join(published_decisions())}, and no file of `nextscale fit skipvar`: {error}"
        ) from None
    return Decisions.read(content, name)


# --- features


def gradient(preview: Tensor) -> Tensor:
    """Magnitude [B, 1, H, W] of the Sobel gradient of the mean over the channels of previews [B, 3, H, W]."""
    kernel = torch.tensor(SOBEL, dtype=preview.dtype, device=preview.device)
    both = F.conv2d(preview.mean(dim=1, keepdim=True), torch.stack([kernel, kernel.T])[:, None], padding=1)
    return both.square().sum(dim=1, keepdim=True).sqrt()


def high_frequencies(preview: Tensor) -> Tensor:
    """The share [B] of high frequencies in the amplitudes of the mean over the channels of previews [B, 3, H, W]."""
    height, width = preview.shape[2:]
    amplitude = torch.fft.fftshift(torch.fft.fft2(preview.mean(dim=1)), dim=(1, 2)).abs()
    down, across = (torch.arange(side, device=preview.device) - side // 2 for side in (height, width))
    far = (down[:, None] ** 2 + across**2).float().sqrt() > int(HIGH_FREQUENCIES * min(height, width) / 2)
    return (amplitude * far).sum(dim=(1, 2)) / (amplitude.sum(dim=(1, 2)) + 1e-6)


def features_of(old: Tensor, new: Tensor) -> Tensor:
    """Previews after two stages that follow each other, [B, 3, H, W], to how much their gradients differ and how much of the newer one is
    high frequencies: [B, 2]."""
    return torch.stack([(gradient(new) - gradient(old)).abs().mean(dim=(1, 2, 3)), high_frequencies(new)], dim=1)


def preview_of(latent: Tensor, stage: Stage, canvas: Canvas) -> Tensor:
    """The image that a canvas would give at the size of an early stage, in [-1, 1]."""
    tokenizer: Any = canvas.tokenizer  # type: ignore[attr-defined]
    return tokenizer.decode(shrunk(latent, tokenizer.map_size(stage))).clamp(-1, 1)


def shrunk(latent: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(latent.float(), size=size, mode="bilinear").contiguous()


# --- the method


@dataclass(frozen=True)
class SkipVAR(Method):
    """Decides for every image, four stages before the end, to stop one to three stages earlier, or else to run as many without guidance.

    Both decisions are logistic regressions of two numbers: how much the last stage has changed the gradients of a small preview, and how
    much of it is high frequencies. Images without detail stop. Within a batch images that decide alike go on together, and those that
    have stopped are computed no further.

    The knobs that matter:
    models: the decision models: "0.84", "0.86", "0.88" (published for Infinity-2B; the structural similarity to the dense image that they
        aim at), "0.84 diff-only", or a file that `nextscale fit skipvar` has made for another model. Nothing but a fit makes them right
        elsewhere.
    most: at most this number of stages is dropped or runs without guidance. 0 is dense generation.

    To tinker with:
    decide_after: the stage after which is decided. None is the published one, 9 of 13; of other schedules the fourth from the end.
    preview: the stage of whose size previews are. None is the published one, 4 of 13, scaled to other schedules.
    as_released: numbers of stages are counted from 13, and nothing is decided where there are 10 stages or fewer.
    """

    models: str = "0.84"
    most: int = MOST
    decide_after: int | None = None
    preview: int | None = None
    as_released: bool = False

    splits_batches = True

    def __post_init__(self) -> None:
        if is_number(self.models):
            object.__setattr__(self, "models", f"{self.models}")
        if not isinstance(self.models, str):
            raise SettingError(f"models is one of {', '.join(published_decisions())}, or a file; got {self.models!r}")
        for name, least in (("most", 0), ("decide_after", 1), ("preview", 0)):
            value = getattr(self, name)
            if not is_whole(value, least) and not (value is None and name != "most"):
                raise SettingError(f"{name} is a whole number, {least} or more; got {value!r}")
        if self.as_released and (self.most, self.decide_after, self.preview) != (MOST, None, None):
            raise SettingError("as_released fixes most, decide_after and preview: leave them out, or as_released")

    @property
    def capturable(self) -> bool:
        """Which images go on is decided by the host."""
        return self.most == 0

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        decisions_named(self.models)
        decide, preview = self.stages(schedule)
        if decide is not None and not 1 <= decide < len(schedule):
            raise SettingError(f"SkipVAR: decide_after {decide} is no stage from 1 to {len(schedule) - 1} of this schedule")
        if preview >= len(schedule):
            raise SettingError(f"SkipVAR: there is no stage {preview} to preview; this schedule has stages 0 to {len(schedule) - 1}")
        return (DENSE,) * len(schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        return SkipVARRun(self, setup)

    def stages(self, schedule: Schedule) -> tuple[int | None, int]:
        """The stage after which is decided, None if that is no stage, and the one of whose size previews are."""
        last = len(schedule) - 1
        preview = round(PUBLISHED_PREVIEW * last / (PUBLISHED_STAGES - 1)) if self.preview is None else self.preview
        if self.as_released:
            return (PUBLISHED_DECISION if last > PUBLISHED_DECISION else None), min(PUBLISHED_PREVIEW, last)
        if self.most == 0 or last < 2:
            return None, preview
        return (max(1, last - MOST) if self.decide_after is None else self.decide_after), preview

    def first_changed(self, schedule: Schedule, stages: int) -> int:
        """The first of the last `stages` stages, of which those up to the decision have run."""
        if self.as_released:
            return PUBLISHED_STAGES - stages if stages else len(schedule)
        return len(schedule) - min(stages, self.most, len(schedule) - 1 - (self.stages(schedule)[0] or 0))


@dataclass(frozen=True)
class SkipVARRun(MethodRun):
    method: SkipVAR
    setup: RunSetup
    old: tuple[Tensor, ...] = ()  # the canvas before the stage after which is decided
    outcome: Outcome | None = None  # not yet decided

    def split(self, stage: Stage, canvas: Canvas) -> Sequence[ImageGroup] | None:
        decide, preview = self.method.stages(self.setup.schedule)
        everyone = tuple(range(canvas.latent.shape[0]))
        if decide is None or stage.index not in (decide, decide + 1):
            return None
        if stage.index == decide:
            return [ImageGroup(everyone, replace(self, old=(canvas.latent,)))]
        small = self.setup.schedule[preview]
        features = features_of(*(preview_of(latent, small, canvas) for latent in (*self.old, canvas.latent)))
        outcomes = decisions_named(self.method.models)(features.cpu())
        different = sorted(set(outcomes))
        groups = (tuple(image for image in everyone if outcomes[image] == one) for one in different)
        return [ImageGroup(images, replace(self, old=(), outcome=one)) for images, one in zip(groups, different, strict=True)]

    def plan(self, planned: StagePlan, stage: Stage, canvas: Canvas) -> StagePlan:
        if self.outcome is None:
            return planned
        skip, unguided = (stage.index >= self.method.first_changed(self.setup.schedule, stages) for stages in self.outcome)
        if skip:
            return replace(planned, skip=True)
        return replace(planned, cfg_branches="cond") if unguided and planned.cfg_branches == "both" else planned
