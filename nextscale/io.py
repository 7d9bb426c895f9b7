"""Atomic writing of files, the folder of weights, and images between tensors and PIL."""

import errno
import math
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from .errors import NextscaleError

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
LOSSY_QUALITY = 95


def home() -> Path:
    """Returns the folder of downloaded weights and metric networks: NEXTSCALE_HOME, or ~/.cache/nextscale."""
    return expanded(os.environ.get("NEXTSCALE_HOME") or "~/.cache/nextscale")


def expanded(path: str | Path) -> Path:
    """Returns a path in which ~ is the home folder; one of an unknown user stays; `Path.expanduser` raises RuntimeError."""
    return Path(os.path.expanduser(path))


def regular(file: Path) -> Path:
    """Returns the path if it is not a pipe or a device, which may never end; otherwise raises OSError."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise OSError(errno.EINVAL, "it must be a regular file; it is a pipe or a device", str(file))
    return file


@contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Turns an OSError into a NextscaleError that names the file."""
    try:
        yield
    except OSError as error:
        raise NextscaleError(f"{target} cannot be written ({error}). Check the free space and the permissions there") from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary file beside `target` that replaces it at the end, and is removed after any failure, Ctrl-C included."""
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, target)
    finally:
        with suppress(OSError):  # for example a parent that is a file, which the error above names
            temporary.unlink(missing_ok=True)


def write_image(image: Image.Image, target: Path) -> None:
    with replacing(target) as temporary:
        encode_image(image, temporary, target.suffix.lower())


def write_text(text: str, target: Path) -> None:
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_text(text: str, target: Path) -> None:
    """Appends lines to a file; they are on the disk when it returns."""
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


# --- images


def encode_image(image: Image.Image, target: Path | BinaryIO, suffix: str, quality: int = LOSSY_QUALITY, **more: Any) -> None:
    """Writes the image in the format of that suffix; `more` is for Pillow. quality: of lossy formats.

    PNG is compressed by run lengths only: 512 x 512 pixels take 12 ms instead of 52 on a CPU core, and no more bytes.
    """
    options = {"compress_type": zlib.Z_RLE} if suffix == ".png" else {"quality": quality}
    image.save(target, IMAGE_FORMATS[suffix], **options, **more)


def to_pil(pixels: Tensor) -> list[Image.Image]:
    """Returns images of pixels [B, 3, H, W] in [-1, 1]."""
    return [Image.fromarray(array) for array in to_arrays(pixels)]


def to_arrays(pixels: Tensor) -> NDArray[np.uint8]:
    """Returns the 8-bit levels of pixels on the host, [B, H, W, 3]."""
    return to_levels(pixels).permute(0, 2, 3, 1).contiguous().cpu().numpy()  # rearranged on the device


def to_levels(pixels: Tensor) -> Tensor:
    """Returns the 8-bit levels of pixels in [-1, 1], clamped and truncated as in the reference implementations."""
    return ((pixels.clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8)


def from_levels(levels: Tensor) -> Tensor:
    """Returns pixels in [-1, 1] of 8-bit levels."""
    return levels.float() / 127.5 - 1


def grid(images: list[Image.Image]) -> Image.Image:
    """Returns all images on one sheet, about as many across as down."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = max(image.width for image in images), max(image.height for image in images)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image, ((i % columns) * width, (i // columns) * height))
    return sheet
