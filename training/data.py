"""Captioned pictures, held in memory as bytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from nextscale.errors import PromptError
from nextscale.io import from_levels

from .records import Record, read_records


class Pictures:
    """Square pictures of one size, [N, 3, side, side] bytes, on the device where they are used."""

    largest_zoom = 0.08
    largest_shift = 0.05  # share of the side

    def __init__(self, pixels: Tensor, records: Sequence[Record]) -> None:
        self.pixels = pixels
        self.records = tuple(records)
        self.mirrors = torch.tensor([record.mirrored_alike for record in records], device=pixels.device)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def side(self) -> int:
        return self.pixels.shape[-1]

    def to(self, device: torch.device | str) -> Pictures:
        return Pictures(self.pixels.to(device), self.records)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Returns pictures in [-1, 1], float32. With a generator, half are zoomed, all are shifted and some are mirrored."""
        images = from_levels(self.pixels[indices])
        return images if generator is None else self._varied(images, self.mirrors[indices], generator)

    def _varied(self, images: Tensor, may_mirror: Tensor, generator: torch.Generator) -> Tensor:
        count, device, side = images.shape[0], images.device, self.side
        uniform = torch.rand(5, count, device=device, generator=generator)
        zoom = torch.where(uniform[0] < 0.5, 1 + self.largest_zoom * (2 * uniform[1] - 1), 1.0)
        shift = ((2 * uniform[2:4] - 1) * self.largest_shift * side).round() * 2 / side  # whole pixels, so that shifts alone stay sharp
        mirror = torch.where(may_mirror & (uniform[4] < 0.5), -1.0, 1.0)
        zero = torch.zeros_like(zoom)
        matrix = torch.stack([torch.stack([zoom * mirror, zero, shift[0]], 1), torch.stack([zero, zoom, shift[1]], 1)], 1)
        places = F.affine_grid(matrix, list(images.shape), align_corners=False)
        return F.grid_sample(images, places, mode="bicubic", padding_mode="border", align_corners=False).clamp(-1, 1)


def read_pictures(shards: Sequence[Path], sides: Sequence[int]) -> dict[int, Pictures]:
    """Returns all pictures of the shards by side."""
    records: list[Record] = []
    files: list[bytes] = []
    for shard in shards:
        found, contents = read_records(shard)
        records += found
        files += contents
    if not records:
        raise PromptError("no pictures: name at least one shard (.tar) that holds captions.jsonl and pictures")
    return decoded(records, files, sides)


def decoded(records: Sequence[Record], files: Sequence[bytes], sides: Sequence[int]) -> dict[int, Pictures]:
    """Decodes pictures at several sides."""
    pixels = {side: torch.empty(len(records), 3, side, side, dtype=torch.uint8) for side in sides}

    def decode(position: int) -> None:
        try:
            image = on_white(Image.open(io.BytesIO(files[position])))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise PromptError(f"{records[position].file} must be a picture that Pillow can read: {error}") from error
        if image.width != image.height:
            raise PromptError(f"{records[position].file} has {image.width}x{image.height} pixels; expected a square picture")
        for side, target in pixels.items():
            resized = image if image.width == side else image.resize((side, side), Image.Resampling.LANCZOS)
            target[position] = torch.from_numpy(np.array(resized)).permute(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without the interpreter lock
        list(pool.map(decode, range(len(records))))
    return {side: Pictures(of_side, records) for side, of_side in pixels.items()}


def on_white(image: Image.Image) -> Image.Image:
    """Returns the image as RGB on a white background."""
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def fingerprint(sets: Mapping[int, Pictures]) -> str:
    """Returns a hash of training pictures: names and captions in order, and sides."""
    known = {side: [(record.file, record.caption) for record in pictures.records] for side, pictures in sorted(sets.items())}
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
