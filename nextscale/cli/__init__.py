"""The command line: one file per command."""

from . import bench, convert, demo, fit, generate, models, observe, plan, quality, train  # noqa: F401 - each registers its command
from .program import app

__all__ = ["app"]
