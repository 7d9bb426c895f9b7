"""SkipVAR (Li et al., 2025): two numbers of cheap previews decide for every image which late stages run, and which without guidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SettingError
from ..stage import Schedule, Stage
from ..validation import is_int, is_number, require_flags
from .method import DENSE, Method, MethodRun, Plans, RunSetup, StagePlan
from .skipvar_models import Decisions, Outcome, decisions_named, published_decisions

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel

PUBLISHED_STAGES, PUBLISHED_DECISION, PUBLISHED_PREVIEW = 13, 9, 4
MOST = 3  # stages that are dropped, or run without guidance
HIGH_FREQUENCIES = 0.4  # of the smaller side's half, the radius beyond which frequencies are high


# --- features


def gradient(preview: Tensor) -> Tensor:
    """Magnitude [B, 1, H, W] of the Sobel gradient of the mean over the channels of previews [B, 3, H, W]."""
    place = torch.arange(-1, 2, dtype=preview.dtype, device=preview.device)  # made there: a capture takes nothing from the host
    kernel = (2 - place.abs())[:, None] * -place
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


class Changes(NamedTuple):
    """The first stage that an image leaves out, and the first that it runs without the unconditional branch."""

    skipped: int
    unguided: int


@dataclass(frozen=True)
class SkipVAR(Method):
    """Decides for every image, four stages before the end, to stop one to three stages earlier, or else to run as many without guidance.

    Both decisions are logistic regressions of two numbers: how much the last stage has changed the gradients of a small preview, and how
    much of it is high frequencies. Images without detail stop. Within a batch images that decide alike go on together, and those that
    have stopped are computed no further.

    The knobs that matter:
    models: the decision models: "0.84", "0.86", "0.88" (published for Infinity-2B; the structural similarity to the dense image that they
        aim at), "0.84 diff-only", or a file that `nextscale calibrate skipvar` has made. Nothing but a fit makes them right
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
    decisions: Decisions = field(init=False, repr=False)  # read once: a file that changes is another method

    routes_images = True

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        if is_number(self.models):
            object.__setattr__(self, "models", f"{self.models}")
        if not isinstance(self.models, str):
            raise SettingError(f"models is one of {', '.join(published_decisions())}, or a file; got {self.models!r}")
        for name, least in (("most", 0), ("decide_after", 1), ("preview", 0)):
            value = getattr(self, name)
            if not is_int(value, least) and not (value is None and name != "most"):
                raise SettingError(f"{name} is a whole number, {least} or more; got {value!r}")
        if self.as_released and (self.most, self.decide_after, self.preview) != (MOST, None, None):
            raise SettingError("as_released fixes most, decide_after and preview: leave them out, or as_released")
        object.__setattr__(self, "decisions", decisions_named(self.models))

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
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


@dataclass
class SkipVARRun(MethodRun):
    method: SkipVAR
    setup: RunSetup
    before: tuple[Tensor, ...] = ()  # the canvas before the stage after which is decided
    changes: Changes | None = None  # not yet decided

    def routing_inputs(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        decide, preview = self.method.stages(self.setup.schedule)
        if decide is None or stage.index != decide + 1:
            return None
        (before,), self.before = self.before, ()
        return features_of(*(preview_of(latent, self.setup.schedule[preview], canvas) for latent in (before, canvas.latent)))

    def route(self, inputs: Tensor) -> Sequence[int]:
        known = self._changes
        return [known.index(self._changes_of(outcome)) for outcome in self.method.decisions(inputs)]

    def routes(self) -> Sequence[MethodRun]:
        return [replace(self, changes=one) for one in self._changes]

    @property
    def _changes(self) -> list[Changes]:
        """All that may come of a decision; different outcomes may come to the same."""
        return list(dict.fromkeys(map(self._changes_of, self.method.decisions.outcomes)))

    def _changes_of(self, outcome: Outcome) -> Changes:
        skipped, unguided = (self.method.first_changed(self.setup.schedule, stages) for stages in outcome)
        return Changes(skipped, unguided if self.setup.guided else len(self.setup.schedule))

    def plan(self, planned: StagePlan, stage: Stage, canvas: Canvas) -> StagePlan:
        if self.changes is None:
            self.before = (canvas.latent,) if stage.index == self.method.stages(self.setup.schedule)[0] else ()
            return planned
        if stage.index >= self.changes.skipped:
            return replace(planned, skip=True)
        unguided = stage.index >= self.changes.unguided and planned.cfg_branches == "both"
        return replace(planned, cfg_branches="cond") if unguided else planned
