"""A contact sheet of composed training pictures with their captions, to be looked at before a GPU learns from them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw

from nextscale.io import to_pil
from nextscale.stage import Schedule

from .scenes import Scenes

ROWS_OF_TEXT, LINE, LETTER = 3, 12, 6  # pixels


def contact_sheet(scenes: Scenes, schedules: Sequence[Schedule], pixels_per_token: int, pictures: int, seed: int) -> Image.Image:
    """A row of `pictures` pictures for each schedule."""
    rows = []
    for number, schedule in enumerate(schedules):
        height, width = (cells * pixels_per_token for cells in schedule.grid)
        plan = scenes.plan((height, width), pictures, seed + number)
        row = Image.new("RGB", (pictures * (width + 4), height + ROWS_OF_TEXT * LINE + 4), "white")
        draw = ImageDraw.Draw(row)
        for place, (image, caption) in enumerate(zip(to_pil(scenes.draw(plan)), plan.captions, strict=True)):
            left = place * (width + 4)
            row.paste(image, (left, 0))
            for line, text in enumerate(textwrap.wrap(caption, max(1, width // LETTER))[:ROWS_OF_TEXT]):
                draw.text((left, height + line * LINE), text, fill="black")
        rows.append(row)
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "gray")
    for number, row in enumerate(rows):
        sheet.paste(row, (0, sum(above.height for above in rows[:number])))
    return sheet
