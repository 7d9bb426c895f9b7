"""The command line: one file per command."""

from . import bench, calibrate, compare, convert, download, edit, evaluate, generate, models, plan, sample, serve, tune
from .options import grouped
from .program import Command, app

PANELS = {
    "Make images": (generate, edit, sample, serve),
    "Models": (models, download, convert),
    "Measure and tune": (plan, compare, tune, calibrate, bench, evaluate),
}

for panel, modules in PANELS.items():
    for module in modules:
        app.command(cls=Command, rich_help_panel=panel)(grouped(vars(module)[module.__name__.rpartition(".")[2]]))

__all__ = ["app"]
