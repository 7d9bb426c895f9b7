"""The command line: one file per command."""

from . import bench, calibrate, compare, convert, download, evaluate, generate, models, plan, sample, serve, tune
from .options import grouped
from .program import Command, app

for module in (generate, sample, serve, models, download, convert, plan, compare, tune, calibrate, bench, evaluate):
    app.command(cls=Command)(grouped(vars(module)[module.__name__.rpartition(".")[2]]))

__all__ = ["app"]
