"""Ways to run the stage loop: at once (eager), or as graphs that were recorded beforehand."""

from .graphs import Recordings

__all__ = ["Recordings"]
