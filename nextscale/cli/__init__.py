"""The command line: `nextscale generate`, `nextscale plan`, `nextscale models`, `nextscale convert`."""

from . import convert, generate, models, plan  # noqa: F401 - each registers its command
from .program import app

__all__ = ["app"]
