"""Between tensors in [-1, 1] and PIL images."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def to_pil(pixels: Tensor) -> list[Image.Image]:
    """[B, 3, H, W] in [-1, 1] to images; clamped and truncated to 8 bits as the authors' programs do."""
    levels = (pixels.clamp(-1, 1) + 1) / 2 * 255
    arrays = levels.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(np.ascontiguousarray(array)) for array in arrays]


def from_pil(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """An image as [1, 3, height, width] in [-1, 1]: resized to cover `size`, then cropped around the centre."""
    height, width = size
    factor = max(height / image.height, width / image.width)
    covering = (max(width, round(image.width * factor)), max(height, round(image.height * factor)))
    resized = image.convert("RGB").resize(covering, Image.Resampling.LANCZOS)
    left, top = (covering[0] - width) // 2, (covering[1] - height) // 2
    pixels = np.array(resized.crop((left, top, left + width, top + height)))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1


def grid(images: list[Image.Image]) -> Image.Image:
    """All images on one sheet, about as many across as down."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = max(image.width for image in images), max(image.height for image in images)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image, ((i % columns) * width, (i // columns) * height))
    return sheet
