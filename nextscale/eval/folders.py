"""Scores of folders of images: distances to dense images of the same names; other metrics come from the research package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import NextscaleError
from ..io import IMAGE_FORMATS, from_levels
from ..metrics.intervals import mean_interval
from ..metrics.lpips import Lpips
from ..metrics.pixels import psnr, ssim
from ..offline.manifest import Entry, manifest_files, read_folder
from .results import Row, where

BATCH = 64

PairMetric = Callable[[Tensor, Tensor], Tensor]
"""Distances [B] of two batches of images [B, 3, H, W] in [-1, 1]."""
PAIR_METRICS: Mapping[str, Callable[[torch.device], PairMetric]] = {
    "lpips": Lpips.load,
    "ssim": lambda device: ssim,
    "psnr": lambda device: psnr,
}
"""Name to a function that loads the metric."""


@dataclass(frozen=True)
class ImageFolder:
    """A folder of images, including folders below it. Hidden files are ignored."""

    path: Path

    @cached_property
    def files(self) -> list[Path]:
        """Paths relative to the folder, sorted by name."""
        if not self.path.is_dir():
            raise NextscaleError(f"{self.path} must be a directory. Pass a folder of images.")
        inside = (file.relative_to(self.path) for file in self.path.rglob("*") if file.suffix.lower() in IMAGE_FORMATS and file.is_file())
        found = sorted(file for file in inside if not any(part.startswith(".") for part in file.parts))
        if not found:
            raise NextscaleError(f"{self.path} must contain images, files that end in {', '.join(IMAGE_FORMATS)}; got none.")
        return found

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Manifest entries that `nextscale sample` wrote, by file name; empty for other folders."""
        return read_folder(self.path) if manifest_files(self.path) else {}

    def load(self, file: Path) -> Tensor:
        """Returns pixels [3, H, W] in 8 bits."""
        try:
            with Image.open(self.path / file) as image:
                return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
        except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise NextscaleError(f"{self.path / file} cannot be read as an image ({error}). Remove it, or write it again.") from error

    def by_stem(self) -> dict[Path, Path]:
        """Returns the files by their paths without endings."""
        found: dict[Path, Path] = {}
        for file in self.files:
            if (first := found.setdefault(file.with_suffix(""), file)) != file:
                raise NextscaleError(f"{self.path} must have one image per name; got {first} and {file}. Remove one of the two.")
        return found

    def partners(self, other: ImageFolder) -> list[Path]:
        """Returns the file of `other` that has the same stem, for each of ours."""
        ours, theirs = self.by_stem(), other.by_stem()
        if absent := [file for stem, file in ours.items() if stem not in theirs]:
            raise NextscaleError(
                f"{other.path} lacks {len(absent)} of the {len(self.files)} images of {self.path}, such as {absent[0]}. Generate both"
                " folders from the same prompts and seeds."
            )
        return [theirs[stem] for stem in ours]

    def batches(self, files: Sequence[Path], batch: int = BATCH) -> Iterator[list[Tensor]]:
        with ThreadPoolExecutor() as threads:
            for first in range(0, len(files), batch):
                yield list(threads.map(self.load, files[first : first + batch]))


@dataclass(frozen=True, eq=False)
class PairJudge:
    """Mean distances of every image to the dense image of the same name."""

    measures: Mapping[str, PairMetric]
    dense: ImageFolder
    device: torch.device

    def check(self, folder: ImageFolder) -> None:
        folder.partners(self.dense)

    @torch.inference_mode()
    def row(self, folder: ImageFolder, on_images: Callable[[int], None]) -> Row:
        values: dict[str, list[Tensor]] = {name: [] for name in self.measures}
        for images, others in zip(folder.batches(folder.files), self.dense.batches(folder.partners(self.dense)), strict=True):
            if any(a.shape != b.shape for a, b in zip(images, others, strict=True)):
                raise NextscaleError("an image and its dense partner must have the same size. Generate both folders at one size.")
            for numbers in by_shape(images).values():
                a, b = (from_levels(torch.stack([some[number] for number in numbers]).to(self.device)) for some in (images, others))
                for name, measure in self.measures.items():
                    values[name].append(measure(a, b).cpu())
            on_images(len(images))
        return {name: pair_interval(torch.cat(found)) for name, found in values.items()}


def by_shape(images: Sequence[Tensor]) -> dict[tuple[int, ...], list[int]]:
    """Returns the numbers of the images of every shape."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, image in enumerate(images):
        found.setdefault(tuple(image.shape), []).append(number)
    return found


def pair_interval(values: Tensor) -> dict[str, float]:
    """Returns the interval of the mean. Equal images have no finite PSNR: they are counted as `equal`, and the mean is of the others."""
    finite = values[values.isfinite()]
    equal = {"equal": len(values) - len(finite)} if len(finite) < len(values) else {}
    return (mean_interval(finite.double()).rounded() if len(finite) else {}) | equal


def describe(folder: ImageFolder, device: torch.device) -> Row:
    """Returns the columns of the folder and the machine; model, method and settings are those that all manifest entries share."""
    settings = [entry.settings for entry in folder.entries.values()]
    shared = {name: value for name, value in settings[0].items() if all(one.get(name) == value for one in settings)} if settings else {}
    return {
        "benchmark": "evaluate",
        "folder": folder.path.name,
        "model": shared.pop("model", None),
        "method": shared.pop("method", None),
        "settings": {name: value for name, value in shared.items() if name != "stages"},
        "size": [*folder.load(folder.files[0]).shape[1:]],
        "images": len(folder.files),
        **where(device),
    }
