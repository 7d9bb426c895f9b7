"""Values passed between the nodes, and conversion of images."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nextscale
from nextscale.errors import SettingError
from nextscale.profiles import require_own
from nextscale.text.prompts import ClassReader


@dataclass(frozen=True)
class Loaded:
    """Pipeline and the methods to use with it. All nodes after one Load share the pipeline, so it is not changed."""

    pipeline: nextscale.Pipeline
    methods: tuple[str, ...] = ()

    def accelerated(self, method: str) -> Loaded:
        """Returns a copy with a further method, or several joined by +; "dense" removes all."""
        return replace(self, methods=() if method == "dense" else (*self.methods, method))


def read_prompts(pipeline: nextscale.Pipeline, name: str, text: str, images: int) -> list[Any]:
    """Returns one prompt per image. For class models: comma-separated class numbers, or one number for all images."""
    if not isinstance(pipeline.reader, ClassReader):
        return [text] * images
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, images):
        expected = "a class number such as 207" + (f", or {images} of them, separated by commas" if images > 1 else "")
        raise SettingError(f"{name} must be {expected}; got {text!r}. {pipeline.name} is a class model.")
    return numbers * images if len(numbers) == 1 else numbers


def read_size(text: str) -> str | tuple[int, int] | None:
    """Parses an empty text, a pixel budget such as 0.25M, a side, or WIDTHxHEIGHT."""
    text = text.strip()
    if not text or text.endswith("M"):
        return text or None
    try:
        sides = [int(side) for side in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2):
        raise SettingError(f"size {text!r}: write WIDTHxHEIGHT such as 768x1024, the side of a square, or a budget such as 0.25M.")
    return sides[-1], sides[0]


def profile_method(pipeline: nextscale.Pipeline, file: str, point: int) -> str:
    """Returns the method of one point of a tuning profile of this model."""
    if not file.strip():
        raise SettingError(f"profile must be the file of a tuning profile; got {file!r}. `nextscale tune` writes one.")
    profile = nextscale.Profile.load(os.path.expanduser(file))
    require_own(profile, pipeline.model)
    methods = [one.method for one in profile.points]
    if not 0 <= point < len(methods):
        raise SettingError(f"point must be from 0 to {len(methods) - 1}; got {point}. The points of {file} are {', '.join(methods)}")
    return methods[point]


def as_comfy(pixels: Tensor) -> Tensor:
    """Converts pixels [B, 3, H, W] in [-1, 1] to an IMAGE: [B, H, W, C] in 0..1, float32, on the CPU."""
    return ((pixels.float().clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 1).contiguous().cpu()


def stages_as_comfy(output: nextscale.Output) -> Tensor:
    """Returns all stages as one batch, first stage first, in the size of the result."""
    height, width = output.report.size
    assert output.stages is not None  # kept by Generate
    with torch.inference_mode():
        decoded = [output.stages.pixels(stage).float() for stage in range(len(output.stages))]
        sized = [F.interpolate(pixels, size=(height, width), mode="bilinear") for pixels in decoded]  # FlexVAR's grow with the stage
    return as_comfy(torch.cat(sized).clone())


def mask_as_comfy(output: nextscale.Output, stage: int) -> Tensor:
    """Returns a MASK [B, H, W] in 0..1, the share of the network that ran per cell of a stage; -1 is the last."""
    masks = output.compute_mask
    if masks is None:
        raise SettingError("this image has no compute mask. Switch on compute_mask in Generate.")
    if not -len(masks) <= stage < len(masks):
        raise SettingError(f"stage must be 0 to {len(masks) - 1}, or -1 for the last; got {stage}.")
    height, width = output.report.size
    return F.interpolate(masks[stage][:, None].float(), size=(height, width), mode="nearest")[:, 0].cpu()


def darkened(image: Tensor, mask: Tensor) -> Tensor:
    """Returns an IMAGE that is dark where less was computed."""
    return image * (0.25 + 0.75 * mask[..., None])
