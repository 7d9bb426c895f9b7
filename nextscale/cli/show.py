"""Results and progress in the terminal, and pictures that show several images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from PIL import Image, ImageFont
    from torch import Tensor

    from ..report import Report

UNLIMITED_WIDTH = 10_000
ENGINES = {"graphs": "CUDA graphs", "eager": "eager"}
REUSED, COMPUTED = (0, 34, 78), (254, 232, 56)  # colors of cells that no stage, and that all stages computed
PICTURE = 0.25  # share of the image in a map of computed cells
GOOD_FOR = {
    "dense": "no acceleration: the reference for all others",
    "skip": "leaves out late stages: the simplest speedup (skip:last=1)",
    "dropguidance": "runs late stages without guidance, that is with half of the rows",
    "sparsevar": "computes only the changing cells of late stages: by a threshold (tau=0.6) or a share (keep=0.5)",
    "fastvar": "computes only the salient tokens of late stages, at a fixed cost",
    "stagevar": "runs late stages at low rank without guidance: the largest speedup on Infinity",
    "nearmask": "computes only cells near the mask of an edit; `nextscale edit` adds it by itself",
    "auto": "chooses from measured profiles: auto:speedup=2, auto:lpips=0.1 or auto:ms=50",
}
FONT_SIZE, MARGIN = 18, 6  # pixels


def result_console() -> Console:
    """Returns standard output; file names stay on one line if it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNLIMITED_WIDTH)


IMPORTED: list[Path] = []  # files of --import, which the next command needs too


def show_next(command: str) -> None:
    """Prints the command that a user most likely wants next."""
    words = "".join(f" --import {file}" for file in IMPORTED)
    result_console().print(f"Next: {command.replace('nextscale ', f'nextscale{words} ', 1)}", markup=False, soft_wrap=True)


def plain_table(*columns: str, left: Sequence[str] = (), folded: Sequence[str] = ()) -> Table:
    """Returns a table without lines: columns are aligned to the right, except those named in `left` and `folded`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in (*left, *folded) else "right", overflow="fold" if name in folded else "ellipsis")
    return table


def method_table() -> Table:
    """Returns the methods with one line each; plug-ins are described by their classes."""
    from ..methods.registry import method_class, method_names

    table = plain_table("method", "", left=("method",), folded=("",))
    for name in method_names():
        table.add_row(name, escape(GOOD_FOR.get(name) or (method_class(name).__doc__ or "").partition("\n")[0]))
    return table


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def engines(reports: Sequence[Report]) -> str:
    """Returns the engines in the order in which they ran: "eager", "CUDA graphs" or "eager, then CUDA graphs"."""
    return ", then ".join(dict.fromkeys(ENGINES[report.engine] for report in reports))


class WholePercent(ProgressColumn):
    """Percentage rounded down: 100 % means done."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.percentage)} %")


class ImagesPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f} images/s")


class Bar(Progress):
    """A bar on a terminal, removed when it ends; elsewhere a line for each new description and each tenth of the images."""

    line = unit = ""

    def note(self, line: str) -> None:
        """Prints a line unless a terminal shows the bar."""
        if self.disable and line != self.line:
            self.line = line
            self.console.print(line, soft_wrap=True)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if "completed" in changes:
            self.note(changes.get("description", self.line))

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        task = self.tasks[task_id]
        if self.unit and int(task.percentage / 10) > int((task.completed - advance) / (task.total or 1) * 10):
            self.note(f"{task.completed:.0f} of {task.total:.0f} {self.unit}")


def share_bar() -> Bar:
    """Returns a bar for tasks with a total of 1."""
    return _bar(WholePercent())


def token_bar() -> Bar:
    """Returns a bar for tasks whose total is a number of tokens."""
    return _bar(MofNCompleteColumn(), TextColumn("tokens"))


def image_bar() -> Bar:
    """Returns a bar for tasks whose total is a number of images."""
    bar = _bar(MofNCompleteColumn(), ImagesPerSecond())
    bar.unit = "images"
    return bar


def _bar(*amount: ProgressColumn) -> Bar:
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    return Bar(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def stopping(kept: Callable[[], str]) -> Iterator[None]:
    """Adds a sentence to Ctrl-C that names the kept results; the program prints it."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept()) from None


def computed_maps(images: Sequence[Image.Image], compute_mask: Sequence[Tensor]) -> list[Image.Image]:
    """Returns faded images under a color scale of the share of the network that ran. `compute_mask`: shares per stage, [B, h, w].

    A stage has the weight of its cells, so that late stages count most.
    """
    import numpy as np
    import torch
    from PIL import Image
    from torch.nn.functional import interpolate

    size = (images[0].height, images[0].width)
    cells = sum(share[0].numel() for share in compute_mask)
    resized = [share[0].numel() / cells * interpolate(share.cpu()[:, None], size, mode="nearest-exact")[:, 0] for share in compute_mask]
    shares = torch.stack(resized).sum(dim=0)[..., None].numpy()  # [B, height, width, 1]
    colors = np.array(REUSED) + shares * (np.array(COMPUTED) - np.array(REUSED))
    faded = [PICTURE * np.asarray(image.convert("L"))[..., None] for image in images]
    return [Image.fromarray(np.rint(gray + (1 - PICTURE) * color).astype(np.uint8)) for gray, color in zip(faded, colors, strict=True)]


def compared(prompts: Sequence[str], rows: Mapping[str, Sequence[Image.Image]]) -> Image.Image:
    """Returns a sheet with a column for each prompt and a titled row of images of equal size for each method."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(FONT_SIZE)
    width, height = next(iter(rows.values()))[0].size
    headings = ["\n".join(wrapped(prompt, font, width - 2 * MARGIN)) for prompt in prompts]
    line = FONT_SIZE + 2 * MARGIN
    top = max(heading.count("\n") + 1 for heading in headings) * (FONT_SIZE + MARGIN) + 2 * MARGIN
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
    """Returns lines that fit the width; a word that is wider stands alone."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
