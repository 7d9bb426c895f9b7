"""Prompts of an evaluation, with their real images where a shard has them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nextscale.errors import PromptError
from nextscale.io import from_levels
from nextscale.offline.prompts import caption_of, evenly_spread, read_lines, read_prompts, read_shard, word_of


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt of an evaluation; style, label and the encoded real image are None where they are not known."""

    text: Any  # or a class number
    style: str | None = None
    label: str | None = None
    encoded: bytes | None = None

    def image(self, side: int) -> Tensor:
        """Returns the real image [1, 3, side, side] in [-1, 1]."""
        assert self.encoded is not None
        try:
            return from_pil(Image.open(io.BytesIO(self.encoded)), (side, side))
        except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise PromptError(f"the image of {self.text!r} is damaged ({error}): fetch its file again") from error


def read_eval_prompts(path: Path, limit: int | None = None) -> list[EvalPrompt]:
    """Reads the files of `nextscale.offline.prompts.read_prompts`; lines of a .jsonl file or a .tar shard may have a style and a label."""
    if path.suffix not in (".tar", ".jsonl"):
        return [EvalPrompt(text) for text in read_prompts(path, limit)]
    images: Sequence[bytes | None]
    if path.suffix == ".tar":
        lines, images = read_shard(path)
    else:
        lines = read_lines(path.read_text(encoding="utf-8-sig"), path.name)
        images = [None] * len(lines)
    found = [
        EvalPrompt(caption_of(line), word_of(line, "style"), word_of(line, "label"), image)
        for line, image in zip(lines, images, strict=True)
    ]
    if not found:
        raise PromptError(f"{path} holds no prompt. Give a .jsonl file or a .tar shard with captions.")
    return evenly_spread(found, limit)


def from_pil(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """Returns an image as [1, 3, height, width] in [-1, 1], resized to cover `size`, then cropped around the center."""
    height, width = size
    factor = max(height / image.height, width / image.width)
    covering = (max(width, round(image.width * factor)), max(height, round(image.height * factor)))
    resized = image.convert("RGB").resize(covering, Image.Resampling.LANCZOS)
    left, top = (covering[0] - width) // 2, (covering[1] - height) // 2
    pixels = np.array(resized.crop((left, top, left + width, top + height)))
    return from_levels(torch.from_numpy(pixels).permute(2, 0, 1)[None])
