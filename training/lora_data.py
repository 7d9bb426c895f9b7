"""Pictures and captions that an adapter learns from: a folder, a tar shard or a JSONL file, cropped to the model's aspect ratios."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nextscale.errors import PromptError
from nextscale.io import IMAGE_FORMATS, from_levels, regular
from nextscale.offline.prompts import caption_of, read_lines, word_of
from nextscale.pipeline import Pipeline
from nextscale.schedules import INFINITY_SIZES, SizeLike
from nextscale.stage import Schedule
from nextscale.text import TextFeatures

from .data import on_white
from .records import read_records

METADATA = "metadata.jsonl"  # of a folder: file_name and text, as the datasets library writes it
FILE_FIELDS = ("file_name", "file", "image")
HELD_OUT = 10  # every tenth picture is held out


@dataclass(frozen=True, eq=False)
class Captioned:
    """One picture with its caption. content: a path, or the bytes of the file."""

    name: str
    caption: str
    content: Path | bytes

    def image(self) -> Image.Image:
        try:
            source = regular(self.content) if isinstance(self.content, Path) else io.BytesIO(self.content)
            return on_white(Image.open(source))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise PromptError(f"{self.name} must be a picture that Pillow reads ({error}). Remove or replace it.") from error


def read_captioned(data: Path) -> list[Captioned]:
    """Reads a tar shard, a .jsonl file with file names and captions, or a folder with such a file or with a .txt file per picture."""
    if data.is_dir():
        found = from_jsonl(data / METADATA) if (data / METADATA).is_file() else from_texts(data)
    elif data.suffix == ".jsonl":
        found = from_jsonl(data)
    else:
        records, contents = read_records(data)
        found = [Captioned(record.file, record.caption, content) for record, content in zip(records, contents, strict=True)]
    if len(found) < 2:
        raise PromptError(f"{data} must have at least 2 pictures with captions (one is held out); got {len(found)}.")
    return found


def from_texts(folder: Path) -> list[Captioned]:
    pictures = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_FORMATS)
    if without := [file.name for file in pictures if not file.with_suffix(".txt").is_file()]:
        raise PromptError(
            f"{folder} lacks captions of {len(without)} pictures, such as {without[0]}. Write one .txt file for each, or a {METADATA}."
        )
    return [Captioned(file.name, text_of(file.with_suffix(".txt")), file) for file in pictures]


def text_of(file: Path) -> str:
    try:
        text = " ".join(file.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file} must be a text file in UTF-8 ({error}).") from error
    if not text:
        raise PromptError(f"{file} must hold a caption; it is empty.")
    return text


def from_jsonl(file: Path) -> list[Captioned]:
    found = []
    try:
        lines = read_lines(file.read_text(encoding="utf-8"), file.name)
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file} must be a JSONL file in UTF-8 ({error}).") from error
    for line in lines:
        name = next((word for word in (word_of(line, field) for field in FILE_FIELDS) if word), None)
        if name is None:
            raise PromptError(f"{line[0]} must name a picture under one of {', '.join(FILE_FIELDS)}.")
        found.append(Captioned(name, caption_of(line), file.parent / name))
    return found


@dataclass(frozen=True, eq=False)
class Bucket:
    """Pictures of one aspect ratio as the model reads them."""

    schedule: Schedule
    features: Tensor  # [N, bits, h, w], float16, of the tokenizer's encoder
    text: TextFeatures  # on the host

    def __len__(self) -> int:
        return self.features.shape[0]


def encoded(pipe: Pipeline, pictures: Sequence[Captioned], size: SizeLike, together: int = 8) -> list[Bucket]:
    """Crops every picture to the nearest aspect ratio, and encodes pictures and captions once."""
    by_schedule: dict[Schedule, list[tuple[Captioned, Image.Image]]] = {}
    for picture in pictures:
        image = picture.image()
        by_schedule.setdefault(schedule_for(pipe, image, size), []).append((picture, image))
    buckets = []
    for schedule, members in by_schedule.items():
        height, width = (side * pipe.tokenizer.pixels_per_token for side in schedule.grid)
        pixels = torch.stack([torch.from_numpy(np.array(cropped(image, width, height))).permute(2, 0, 1) for _, image in members])
        with torch.inference_mode():
            parts = [pipe.tokenizer.features(from_levels(part.to(pipe.model.device))).half() for part in pixels.split(together)]
            text = pipe.reader.read([picture.caption for picture, _ in members])
        assert isinstance(text, TextFeatures)
        buckets.append(Bucket(schedule, torch.cat(parts).clone(), text.to("cpu").clone()))
    return buckets


def schedule_for(pipe: Pipeline, image: Image.Image, size: SizeLike) -> Schedule:
    if isinstance(size, int | tuple | Schedule):
        return pipe.settings.schedules.choose(size, None)
    ratio = image.height / image.width
    return pipe.settings.schedules.choose(size, min(INFINITY_SIZES, key=lambda template: abs(math.log(template / ratio))))


def cropped(image: Image.Image, width: int, height: int) -> Image.Image:
    """Returns the middle of a picture at this size."""
    scale = max(width / image.width, height / image.height)
    box_width, box_height = width / scale, height / scale
    left, top = (image.width - box_width) / 2, (image.height - box_height) / 2
    return image.resize((width, height), Image.Resampling.LANCZOS, box=(left, top, left + box_width, top + box_height))


def split(pictures: Sequence[Captioned]) -> tuple[list[Captioned], list[Captioned]]:
    """Returns pictures to train on and held-out ones: every tenth, at least one."""
    held_out = list(pictures[HELD_OUT - 1 :: HELD_OUT]) or [pictures[-1]]
    names = {id(one) for one in held_out}
    return [one for one in pictures if id(one) not in names], held_out
