"""The command line: one file per command."""

from . import bench, calibrate, compare, convert, download, evaluate, generate, models, sample, serve, tune
from .options import grouped
from .program import Command, app

for module in (generate, sample, serve, models, download, convert, compare, tune, calibrate, bench, evaluate):
    app.command(cls=Command)(grouped(vars(module)[module.__name__.rpartition(".")[2]]))

from . import plan  # noqa: E402, F401 - registers its command

__all__ = ["app"]
