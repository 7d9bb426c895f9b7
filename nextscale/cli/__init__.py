"""The command line: one file per command."""

from . import bench, convert, demo, generate, models, observe, observe_ranks, plan, quality, train  # noqa: F401 - each registers its command
from .program import app

__all__ = ["app"]
