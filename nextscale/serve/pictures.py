"""Encodes images in memory with their settings, and decodes images of clients."""

import base64
import binascii
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from ..io import LOSSY_QUALITY, encode_image, from_levels
from .errors import refused

CHUNK = "nextscale"  # the PNG's text chunk that holds the settings, as JSON


def encoded(image: Image.Image, form: str = "png", compression: int | None = None, settings: Mapping[str, Any] | None = None) -> str:
    """Returns the encoded file in base64. settings: stored in a PNG, so that the studio can restore them."""
    buffer = io.BytesIO()
    if form == "png":
        info = PngImagePlugin.PngInfo()
        if settings is not None:
            info.add_text(CHUNK, json.dumps(settings, ensure_ascii=True))
        encode_image(image, buffer, ".png", pnginfo=info)
    else:
        encode_image(image, buffer, f".{form}", LOSSY_QUALITY if compression is None else compression)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def mask_picture(mask: Tensor) -> Image.Image:
    """Returns shares [h, w] as gray levels, a pixel per cell; white is the whole network."""
    return Image.fromarray((mask.float().clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def decoded_png(text: str, param: str, most_pixels: int) -> Tensor:
    """Returns pixels [1, 3, H, W] in [-1, 1] of a client's image. Only opens a PNG of at most `most_pixels`."""
    try:
        content = base64.b64decode(text, validate=True)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.width * image.height > most_pixels:
                raise refused(param, f"{param} must have at most {most_pixels} pixels; got {image.width}x{image.height}")
            pixels = np.array(image.convert("RGB"))
    except (binascii.Error, ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise refused(param, f"{param} must be a PNG in base64") from error
    return from_levels(torch.from_numpy(pixels).permute(2, 0, 1)[None])
