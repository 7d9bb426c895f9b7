"""How requests are run: kernel by kernel (eager), or as CUDA graphs that were captured before."""

from .captures import Captures, WarmUp
from .eager import Eager
from .executor import Engine, Executor

__all__ = ["Captures", "Eager", "Engine", "Executor", "WarmUp"]
