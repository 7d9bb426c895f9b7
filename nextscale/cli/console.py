"""Where results and progress are shown."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

UNLIMITED_WIDTH = 10_000


def result_console() -> Console:
    """Standard output; file names stay on one line where a program reads them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNLIMITED_WIDTH)


class WholePercent(ProgressColumn):
    """Rounds down: 100 % is shown for what is done."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.percentage)} %")


def share_bar() -> Progress:
    """A bar for tasks with a total of 1."""
    return _bar(WholePercent())


def token_bar() -> Progress:
    """A bar for tasks whose total is a number of tokens."""
    return _bar(MofNCompleteColumn(), TextColumn("tokens"))


class ImagesPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.2f} images/s")


def image_bar() -> Progress:
    """A bar for tasks whose total is a number of images."""
    return _bar(MofNCompleteColumn(), ImagesPerSecond())


def _bar(*amount: ProgressColumn) -> Progress:
    """A bar that is shown on a terminal only, and gone when it ends."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
