"""The command line: `nextscale generate`, `nextscale models`, `nextscale convert`."""

from . import convert, generate, models  # noqa: F401 - each registers its command
from .program import app

__all__ = ["app"]
