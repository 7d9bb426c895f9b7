"""AREdit (ICCV 2025): edits by text, which find their region by themselves.

Early stages keep the image's codes. Later a code is sampled again only where the new prompt makes the image's code much less likely than
the prompt that describes the image. Defaults are those of a public re-implementation; the paper's are not known to us, and its swaps of
attention maps are not part of this. BitResEdit is not here: at every stage it mixes in what the source prompt predicts on the edited
canvas, which takes rows of a second prompt in the same request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nextscale import EditOptions, Method, MethodRun, Output, Pipeline
from nextscale.canvas import Canvas
from nextscale.edit import EditCanvas
from nextscale.edit_inputs import read_edit
from nextscale.errors import SettingError
from nextscale.methods.method import Restored, RunSetup
from nextscale.stage import Stage, Tokens
from nextscale.validation import is_int, is_number, require

KEPT = 1e4  # logit of a code that is kept; the others have 0, and a probability of 0 in float32


def aredit(
    pipe: Pipeline, image: Any, source: Any, prompt: Any, *, tau: float = 0.2, gamma: int = 2, seed: Any = None, **call: Any
) -> Output:
    """Changes an image from what `source` describes to `prompt`.

    tau: largest loss of probability at which a code stays, from -1 (every code is sampled again) to 1 (none is).
    gamma: index of the first stage that may change. The number of stages changes none.
    call: `size`, `aspect`, `guidance` and other arguments of `Pipeline.edit`.
    """
    require(is_number(tau), "tau", "a number", tau)
    require(is_int(gamma), "gamma", "a stage index from 0", gamma)
    shape = pipe.settings.schedules, call.pop("size", None), call.pop("aspect", None)
    options = EditOptions(from_stage=0, paste=False)
    inputs = read_edit(image, None, None, options, *shape, pipe.tokenizer.pixels_per_token)
    stages = len(inputs.schedule)
    first, tau = (gamma, float(tau)) if gamma < stages else (stages - 1, 1.0)
    reading = SourceReading()
    unchanged = replace(inputs, mask=torch.zeros_like(inputs.mask))  # the canvas keeps the image: every stage reads it
    pipe.edit(unchanged, source, seed=seed, method=reading, decode=False, **call)
    return pipe.edit(replace(inputs, from_stage=(first,) * len(inputs)), prompt, seed=seed, method=AREdit(reading, tau), **call)


@dataclass(frozen=True, eq=False)
class SourceReading(Method):
    """Notes how likely the image's codes are. Serves one request."""

    likely: dict[int, Tensor] = field(default_factory=dict)  # by stage, [B, cells] or [B, cells, bits]

    capturable = False

    @property
    def label(self) -> str:
        return "SourceReading"

    def start(self, setup: RunSetup) -> MethodRun:
        return SourceRun(self)


@dataclass(frozen=True, eq=False)
class AREdit(Method):
    """Samples codes again where a prompt makes them less likely by more than tau."""

    reading: SourceReading
    tau: float

    capturable = False

    @property
    def label(self) -> str:
        return f"AREdit(tau={self.tau})"

    def start(self, setup: RunSetup) -> MethodRun:
        return AREditRun(self)


@dataclass(eq=False)
class SourceRun(MethodRun):
    settings: Any
    codes: Tensor | None = None  # of the image at the stage that runs

    def count(self, stage: Stage, canvas: Canvas) -> None:
        if not isinstance(canvas, EditCanvas):
            raise SettingError("AREdit needs an image: call aredit(pipe, image, source, prompt).")
        self.codes = canvas.edit.codes[stage.index]

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        self.settings.likely[tokens.stage.index] = self.likely(logits, tokens)
        return Restored(logits, tokens)

    def likely(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Returns the probabilities of the image's codes at these tokens."""
        return logits.softmax(dim=-1).gather(-1, self.image(tokens)[..., None])[..., 0]

    def image(self, tokens: Tokens) -> Tensor:
        assert self.codes is not None
        return Tokens(tokens.stage).move(self.codes, tokens)


class AREditRun(SourceRun):
    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        source = Tokens(tokens.stage).move(self.settings.reading.likely[tokens.stage.index], tokens)
        stays = source - self.likely(logits, tokens) <= self.settings.tau
        kept = torch.zeros_like(logits).scatter(-1, self.image(tokens)[..., None], KEPT)
        return Restored(torch.where(stays[..., None], kept, logits), tokens)
