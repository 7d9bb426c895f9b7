"""The images of a folder: their files, their pixels, and what the folder's manifest says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...errors import NextscaleError
from ...io import IMAGE_FORMATS
from ...offline.manifest import Entry, manifest_files, read_folder


@dataclass(frozen=True)
class ImageFolder:
    """A folder of images, also in folders below it. Hidden files do not count."""

    path: Path

    @cached_property
    def files(self) -> list[Path]:
        """Relative to the folder, in order of their names."""
        if not self.path.is_dir():
            raise NextscaleError(f"{self.path} is no folder: give a folder of images")
        inside = (file.relative_to(self.path) for file in self.path.rglob("*") if file.suffix.lower() in IMAGE_FORMATS and file.is_file())
        found = sorted(file for file in inside if not any(part.startswith(".") for part in file.parts))
        if not found:
            raise NextscaleError(f"{self.path} holds no images: expected files that end in {', '.join(IMAGE_FORMATS)}")
        return found

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """What `nextscale sample` wrote about the images, by file name; empty for other folders."""
        return read_folder(self.path) if manifest_files(self.path) else {}

    def prompts(self) -> list[str]:
        """Returns one per file."""
        if not all(str(file) in self.entries for file in self.files):
            raise NextscaleError(
                f"{self.path} has no manifest with a prompt for every image: CLIP score needs the folder of `nextscale sample`"
            )
        return [str(self.entries[str(file)].prompt) for file in self.files]

    def load(self, file: Path) -> Tensor:
        """Pixels [3, H, W] in 8 bits."""
        try:
            with Image.open(self.path / file) as image:
                return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
        except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise NextscaleError(f"{self.path / file} cannot be read as an image ({error}): remove it, or write it again") from error

    def by_stem(self) -> dict[Path, Path]:
        """Returns the files by their paths without endings."""
        found: dict[Path, Path] = {}
        for file in self.files:
            if (first := found.setdefault(file.with_suffix(""), file)) != file:
                raise NextscaleError(f"{self.path} holds {first} and {file}, and pairs are images of one name: remove one of the two")
        return found

    def partners(self, other: ImageFolder) -> list[Path]:
        """Returns the file of `other` that has the same stem, for each of ours."""
        ours, theirs = self.by_stem(), other.by_stem()
        if absent := [file for stem, file in ours.items() if stem not in theirs]:
            raise NextscaleError(
                f"{other.path} lacks {len(absent)} of the {len(self.files)} images of {self.path}, such as {absent[0]}: pairs are images of"
                f" one prompt and seed under one name; generate both folders from the same prompts"
            )
        return [theirs[stem] for stem in ours]

    def batches(self, files: Sequence[Path], batch: int) -> Iterator[list[Tensor]]:
        with ThreadPoolExecutor() as threads:
            for first in range(0, len(files), batch):
                yield list(threads.map(self.load, files[first : first + batch]))


def by_shape(images: Sequence[Tensor]) -> dict[tuple[int, ...], list[int]]:
    """Numbers of the images of every shape."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, image in enumerate(images):
        found.setdefault(tuple(image.shape), []).append(number)
    return found
