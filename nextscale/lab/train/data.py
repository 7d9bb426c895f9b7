"""Captioned pictures from tar shards, held in memory as bytes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ...errors import NextscaleError

CAPTIONS = "captions.jsonl"


class DataError(NextscaleError):
    """A shard that cannot be read, or not in the expected form."""


@dataclass(frozen=True)
class Record:
    """What is known of one picture. Only file and caption are required of a shard."""

    file: str
    caption: str
    style: str = ""
    label: str = ""
    group: str = ""
    subject: str = ""  # the part of the caption that names what is shown
    alt: str = ""  # another name of it
    keywords: tuple[str, ...] = ()
    caption_color: str = ""  # the caption with a colour
    unseen: bool = False  # held-out pictures: nothing of this subject is in the training shards

    @classmethod
    def of(cls, line: Any) -> Record:
        """From a line of captions.jsonl; fields that are not ours are left out."""
        if not isinstance(line, dict):
            raise ValueError(f"{str(line)[:80]!r} is no object")
        known = {field.name: line[field.name] for field in fields(cls) if line.get(field.name) is not None}
        kinds = {"keywords": list, "unseen": bool}
        if odd := [name for name, value in known.items() if not isinstance(value, kinds.get(name, str))]:
            raise ValueError(f"{odd[0]} is {known[odd[0]]!r}: expected texts, a list of them as keywords, true or false as unseen")
        if not known.get("file") or not known.get("caption", "").strip():
            raise ValueError(f"{str(line)[:80]!r} lacks its file or its caption")
        return cls(**known | {"keywords": tuple(map(str, known.get("keywords", ())))})

    @property
    def mirrored_alike(self) -> bool:
        """Whether the mirrored picture still shows what the caption says: not signs, flags, clocks and directions."""
        sided = ("left", "right", "clock", "hand", "keycap", "thirty", "twelve", "button")
        return self.group not in ("Symbols", "Flags") and not any(word in self.label.lower() for word in sided)


class Pictures:
    """Square pictures of one size, [N, 3, side, side] bytes, on the device where they are used."""

    largest_zoom = 0.08
    largest_shift = 0.05  # of the side

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
        """Float32 pictures in [-1, 1]; with a generator half of them zoomed, all shifted a little, some mirrored."""
        images = self.pixels[indices].float() / 127.5 - 1
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
    """All pictures of some shards, by side. A shard is a tar file with captions.jsonl and the pictures that its lines name."""
    records: list[Record] = []
    files: list[bytes] = []
    for shard in shards:
        found, contents = read_shard(shard)
        records += found
        files += contents
    if not records:
        raise DataError("no pictures: name at least one shard (.tar) that holds captions.jsonl and pictures")
    pixels = {side: torch.empty(len(records), 3, side, side, dtype=torch.uint8) for side in sides}

    def decode(position: int) -> None:
        try:
            image = on_white(Image.open(io.BytesIO(files[position])))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{records[position].file} is no picture that Pillow can read: {error}") from error
        if image.width != image.height:
            raise DataError(f"{records[position].file} has {image.width}x{image.height} pixels; expected a square picture")
        for side, target in pixels.items():
            resized = image if image.width == side else image.resize((side, side), Image.Resampling.LANCZOS)
            target[position] = torch.from_numpy(np.array(resized)).permute(2, 0, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without the interpreter lock
        list(pool.map(decode, range(len(records))))
    return {side: Pictures(of_side, records) for side, of_side in pixels.items()}


def on_white(image: Image.Image) -> Image.Image:
    """As RGB; what is transparent becomes white."""
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def fingerprint(sets: Mapping[int, Pictures]) -> str:
    """Of which pictures a run learns from: their names and captions in their order, and the sides."""
    known = {side: [(record.file, record.caption) for record in pictures.records] for side, pictures in sorted(sets.items())}
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def read_shard(shard: Path) -> tuple[list[Record], list[bytes]]:
    """The records of a shard and the bytes of their pictures."""
    try:
        with tarfile.open(shard, "r:") as tar:
            members = {member.name.removeprefix("./"): member for member in tar if member.isfile()}
            if CAPTIONS not in members:
                raise DataError(f"{shard} holds no {CAPTIONS}: expected a tar file with that and the pictures it names")
            lines = _content(tar, members[CAPTIONS]).decode().splitlines()
            records = [Record.of(json.loads(line)) for line in lines if line.strip()]
            if absent := [record.file for record in records if record.file not in members]:
                raise DataError(f"{shard} lacks {len(absent)} pictures that its {CAPTIONS} names, such as {absent[0]}")
            return records, [_content(tar, members[record.file]) for record in records]
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{shard} cannot be read as a tar file without compression: {error}") from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{CAPTIONS} of {shard} has a line that is no record with a file and a caption: {error}") from error


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # only regular files are asked for
    return file.read()
