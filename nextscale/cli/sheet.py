"""A picture that compares rows of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

LETTERS, MARGIN = 18, 6  # pixels


def compared(prompts: Sequence[str], rows: Mapping[str, Sequence[Image.Image]]) -> Image.Image:
    """A column for each prompt, which is written above it, and a row of images under each title; all images have one size."""
    font = ImageFont.load_default(LETTERS)
    width, height = next(iter(rows.values()))[0].size
    headings = ["\n".join(wrapped(prompt, font, width - 2 * MARGIN)) for prompt in prompts]
    line = LETTERS + 2 * MARGIN
    top = max(heading.count("\n") + 1 for heading in headings) * (LETTERS + MARGIN) + 2 * MARGIN
    across = max(width * len(prompts), *(round(font.getlength(title)) + 2 * MARGIN for title in rows))
    picture = Image.new("RGB", (across, top + (line + height) * len(rows)), "white")
    pen = ImageDraw.Draw(picture)
    for column, heading in enumerate(headings):
        pen.multiline_text((column * width + MARGIN, MARGIN), heading, "black", font, spacing=MARGIN)
    for number, (title, images) in enumerate(rows.items()):
        edge = top + (line + height) * number
        pen.text((MARGIN, edge + MARGIN), title, "black", font)
        for column, image in enumerate(images):
            picture.paste(image, (column * width, edge + line))
    return picture


def wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Lines that are as wide as fits; a word that is wider stands alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
