"""The command line: one file per command."""

from . import convert, download, generate, models, plan, sample, serve
from .options import grouped
from .program import Command, app

for module in (generate, sample, serve, models, download, convert, plan):
    app.command(cls=Command)(grouped(vars(module)[module.__name__.rpartition(".")[2]]))

from . import (  # noqa: E402, F401 - each registers its command
    bench,
    demo,
    evaluate,
    fit,
    observe_ranks,
    quality,
    tune,
)

__all__ = ["app"]
