"""Files that are whole or not there at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from PIL import Image

from .errors import NextscaleError

IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
LOSSY_QUALITY = 95


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
        with suppress(OSError):  # say of a parent that is a file, which has been told already
            temporary.unlink(missing_ok=True)


def write_image(image: Image.Image, target: Path) -> None:
    with replacing(target) as temporary:
        image.save(temporary, IMAGE_FORMATS[target.suffix.lower()], quality=LOSSY_QUALITY)  # PNG has no quality and ignores it


def write_text(text: str, target: Path) -> None:
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
