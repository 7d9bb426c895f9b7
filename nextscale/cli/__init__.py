"""The command line: one file per command."""

from . import bench, convert, demo, evaluate, generate, models, observe, plan, quality, sample, train  # noqa: F401 - each registers its command
from .program import app

__all__ = ["app"]
