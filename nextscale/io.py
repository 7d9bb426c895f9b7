"""Files that are written whole or not at all, where they are kept, and images between tensors and PIL."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .errors import NextscaleError

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
LOSSY_QUALITY = 95


def home() -> Path:
    """The folder of downloaded weights and metric networks: NEXTSCALE_HOME, or ~/.cache/nextscale."""
    return Path(os.environ.get("NEXTSCALE_HOME") or Path.home() / ".cache" / "nextscale")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place at the end; if anything fails, Ctrl-C included, nothing is left."""
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise NextscaleError(f"{target} cannot be written ({error}). Check the free space and the permissions there") from error
    finally:
        with suppress(OSError):  # for example a parent that is a file, which the error above has named
            temporary.unlink(missing_ok=True)


def write_image(image: Image.Image, target: Path) -> None:
    with replacing(target) as temporary:
        image.save(temporary, IMAGE_FORMATS[target.suffix.lower()], quality=LOSSY_QUALITY)  # PNG has no quality and ignores it


def write_text(text: str, target: Path) -> None:
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


# --- images


def to_pil(pixels: Tensor) -> list[Image.Image]:
    """Pixels [B, 3, H, W] in [-1, 1] to images; clamped and truncated to 8 bits as the reference implementations do."""
    levels = (pixels.clamp(-1, 1) + 1) / 2 * 255
    arrays = levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()  # rearranged on the device
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
