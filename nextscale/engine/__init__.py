"""Ways to run the stage loop: at once (eager), or as graphs that were recorded beforehand."""

from .graphs import Captures

__all__ = ["Captures"]
