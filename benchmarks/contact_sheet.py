"""Uncurated samples of `nano`: `python -m benchmarks.contact_sheet SHARD [PICTURE]` generates images for 48 held-out captions.

Image i has seed i; * marks subjects that are not in the training data. The shard alone determines the selection.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import nextscale
from nextscale.cli.show import wrapped
from nextscale.io import write_image
from nextscale.offline.prompts import caption_of, evenly_spread, read_shard

COLUMNS, ROWS = 8, 6
SIDE, LETTERS, LINES = 192, 12, 3  # pixels of an image and of a letter; lines of caption
BATCH = 8


def sheet(captions: list[str], images: list[Image.Image]) -> Image.Image:
    font = ImageFont.load_default(LETTERS)
    height = SIDE + LINES * (LETTERS + 2) + 6
    picture = Image.new("RGB", (COLUMNS * SIDE, ROWS * height), "white")
    pen = ImageDraw.Draw(picture)
    for position, (caption, image) in enumerate(zip(captions, images, strict=True)):
        left, top = position % COLUMNS * SIDE, position // COLUMNS * height
        picture.paste(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS), (left, top))
        pen.multiline_text((left + 4, top + SIDE + 2), "\n".join(wrapped(caption, font, SIDE - 8)[:LINES]), "black", font, spacing=2)
    return picture


def main(shard: str, target: str = "docs/pictures/nano.webp", *files: str) -> None:
    """Writes the sheet. `files`: weights, tokenizer and words to use instead of those in the package."""
    pipe = nextscale.load("nano", **dict(zip(("weights", "tokenizer", "text_encoder")[: len(files)], files, strict=True)))
    records = evenly_spread(read_shard(Path(shard))[0], COLUMNS * ROWS)
    captions = [caption_of(record) for record in records]
    images = [image for first in range(0, len(captions), BATCH) for image in pipe(captions[first : first + BATCH], seed=first).images]
    titles = [f"* {caption}" if fields.get("unseen") else caption for caption, (_, fields) in zip(captions, records, strict=True)]
    write_image(sheet(titles, images), Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
