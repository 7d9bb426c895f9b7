"""SkipVAR (Li et al., 2025): two numbers of cheap previews decide for every image which late stages run, and which without guidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.methods.drop_guidance import DropGuidance
from nextscale.methods.method import DENSE, Method, Plans
from nextscale.methods.skip import SkipStages
from nextscale.methods.strategy import Call, Strategy, combined
from nextscale.stage import Schedule, Stage
from nextscale.validation import is_int, is_number, require_flags

from .groups import Group, JoinedStages, codes_by_stage, join_outputs, revise_only, unread_codes
from .rewind import continue_from, only
from .skipvar_models import Decisions, Outcome, decisions_named, published_decisions

if TYPE_CHECKING:
    from nextscale.canvas import Canvas
    from nextscale.models.base import NextScaleModel

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


NONE = Changes(-1, -1)


@dataclass(frozen=True)
class SkipVAR(Strategy):
    """Decides for every image, four stages before the end, to stop one to three stages earlier, or else to run as many without guidance.

    Both decisions are logistic regressions of two numbers: how much the last stage has changed the gradients of a small preview, and how
    much of it is high frequencies. Images without detail stop. Within a batch images that decide alike go on together, and those that
    have stopped are computed no further.

    The knobs that matter:
    models: the decision models: "0.84", "0.86", "0.88" (published for Infinity-2B; the structural similarity to the dense image that they
        aim at), "0.84 diff-only", or a file that `python -m nextscale_research calibrate-skipvar` has made. Only a
        fit makes them right elsewhere.
    most: at most this number of stages is dropped or runs without guidance. 0 is dense generation.

    To tinker with:
    decide_after: the stage after which is decided. None is the published one, 9 of 13; of other schedules the fourth from the end.
    preview: the stage of whose size previews are. None is the published one, 4 of 13, scaled to other schedules.
    as_released: numbers of stages are counted from 13, and nothing is decided for 10 stages or fewer.
    """

    models: str = "0.84"
    most: int = MOST
    decide_after: int | None = None
    preview: int | None = None
    as_released: bool = False
    decisions: Decisions = field(init=False, repr=False)  # read once: a file that changes is another method

    exclusive = frozenset({"tokens"})  # which groups of images would choose apart

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
            raise SettingError(f"SkipVAR: decide_after must be a stage from 1 to {len(schedule) - 1} of this schedule; got {decide}")
        if preview >= len(schedule):
            raise SettingError(f"SkipVAR: preview must be a stage from 0 to {len(schedule) - 1}; got {preview}")
        return (DENSE,) * len(schedule)

    def stages(self, schedule: Schedule) -> tuple[int | None, int]:
        """Returns the stage after which is decided, or None, and the stage whose size previews have."""
        last = len(schedule) - 1
        preview = round(PUBLISHED_PREVIEW * last / (PUBLISHED_STAGES - 1)) if self.preview is None else self.preview
        if self.as_released:
            return (PUBLISHED_DECISION if last > PUBLISHED_DECISION else None), min(PUBLISHED_PREVIEW, last)
        if self.most == 0 or last < 2:
            return None, preview
        return (max(1, last - MOST) if self.decide_after is None else self.decide_after), preview

    def first_changed(self, schedule: Schedule, stages: int) -> int:
        """Returns the first of the last `stages` stages; stages up to the decision have run."""
        if self.as_released:
            return PUBLISHED_STAGES - stages if stages else len(schedule)
        return len(schedule) - min(stages, self.most, len(schedule) - 1 - (self.stages(schedule)[0] or 0))

    def decision(self, schedule: Schedule) -> int | None:
        """Returns the stage after which is decided; None if no stage would follow."""
        decide, _ = self.stages(schedule)
        return None if decide is None or decide + 1 >= len(schedule) else decide

    def changes(self, outcome: Outcome, schedule: Schedule, guided: bool) -> Changes:
        skipped, unguided = (self.first_changed(schedule, stages) for stages in outcome)
        return Changes(skipped, unguided if guided else len(schedule))

    def generate(self, pipe: Any, call: Call, beside: Method) -> Any:
        """Runs all images up to the decision, then each group that goes on alike. Images that stop run nothing more."""
        on_stage, decide = call["on_stage"], self.decision(call["size"])
        if decide is None:
            return pipe(**{**call, "method": beside})
        first = FirstCall(self, pipe, call, beside, decide)
        groups = first.groups()
        stopped = groups.pop(next((changes for changes in groups if changes.skipped == decide + 1), NONE), [])
        later = JoinedStages(on_stage, [preview for index, preview in first.previews.items() if index > decide]) if on_stage else None
        outputs: list[Group] = []
        for changes, images in groups.items():
            watch = None if later is None else later.hold(images, last=len(outputs) == len(groups) - 1)
            outputs.append((images, first.go_on(images, changes, watch)))
        if later is not None and not groups:
            later.show()
        return join_outputs(first.output, decide + 1, outputs, (stopped, first.decoded(stopped)))

    def warmup(self, pipe: Any, call: Call, beside: Method) -> None:
        schedule, decide = call["size"], self.decision(call["size"])
        call = {**call, "warmup": True, "on_stage": None}
        if decide is None:
            pipe(**{**call, "method": beside})
            return
        first = FirstCall(self, pipe, call, beside, decide)
        for changes in {self.changes(outcome, schedule, first.guided) for outcome in self.decisions.outcomes}:
            if changes.skipped > decide + 1:
                first.go_on(range(first.batch), changes, None)


class FirstCall:
    """The stages of all images up to the decision."""

    def __init__(self, method: SkipVAR, pipe: Any, call: Call, beside: Method, decide: int) -> None:
        self.method, self.pipe, self.call, self.beside, self.decide = method, pipe, call, beside, decide
        self.schedule, self.batch = call["size"], len(call["prompt"])
        self.rng = only(call["seed"], range(self.batch))  # as it is before the first stage
        self.previews: dict[int, Any] = {}
        asked = {
            "method": combined([beside, SkipStages(len(self.schedule) - decide - 1)]),
            "prefix_codes": call["prefix_codes"][: decide + 1],
            "on_stage": self._watch,
            "decode": False,
        }
        self.output = pipe(**{**call, **asked})
        self.guided = any(stage.cfg_branches == 2 for stage in self.output.report.stages)

    def _watch(self, preview: Any) -> None:
        index = preview.done.stage.index
        if index >= self.decide - 1:
            self.previews[index] = replace(preview, done=preview.done.without_logits())
        if index <= self.decide and self.call["on_stage"] is not None:
            self.call["on_stage"](preview)

    @torch.inference_mode()
    def groups(self) -> dict[Changes, list[int]]:
        """Returns the images by their outcome."""
        small = self.schedule[self.method.stages(self.schedule)[1]]
        old, new = (self.previews[stage] for stage in (self.decide - 1, self.decide))
        features = features_of(*(preview_of(preview.latent, small, preview.canvas) for preview in (old, new)))
        groups: dict[Changes, list[int]] = {}
        for image, outcome in enumerate(self.method.decisions(features.cpu())):
            groups.setdefault(self.method.changes(outcome, self.schedule, self.guided), []).append(image)
        return groups

    def go_on(self, images: Sequence[int], changes: Changes, on_stage: Callable[[Any], None] | None) -> Any:
        """Returns the output of these images. They read the stages up to the decision."""
        call, own = self.call, list(images)
        revise, negative, given = call["revise"], call["negative"], call["prefix_codes"][self.decide + 1 :]
        drawn = zip(self.schedule, codes_by_stage(self.output)[: self.decide + 1], strict=False)
        prefix = [unread_codes(self.pipe.model, stage.cells, self.batch) if codes is None else codes for stage, codes in drawn]
        asked = {
            "prompt": call["prompt"].take(own),
            "negative": negative.take(own) if negative is not None and len(negative) == self.batch else negative,
            "seed": only(self.rng, own),
            "method": combined([self.beside, *self._changed(changes)]),
            "prefix_codes": [codes[own] for codes in (*prefix, *given)],
            "revise": None if revise is None else revise_only(revise, own, self.batch),
            "on_stage": on_stage,
        }
        output = self.pipe(**{**call, **asked})
        continue_from(call["seed"], asked["seed"])
        return output

    def _changed(self, changes: Changes) -> list[Method]:
        """Returns the changes of the outcome to the stages that `beside` plans."""
        plans = self.beside.forecast(self.pipe.model, self.schedule, self.guided)
        dropped = next((stage for stage, plan in enumerate(plans) if plan.cfg_branches != "both"), len(plans))
        skipping = [SkipStages(len(plans) - changes.skipped)] if changes.skipped < len(plans) else []
        return [*skipping, *([DropGuidance(changes.unguided)] if changes.unguided < dropped else [])]

    @torch.inference_mode()
    def decoded(self, images: Sequence[int]) -> Tensor | None:
        """Returns the pixels of images that stop."""
        return self.pipe.tokenizer.decode(self.output.latent[list(images)]) if images and self.call["decode"] else None
