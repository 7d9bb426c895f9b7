"""Executors of requests: eager, or CUDA graphs that were captured before."""

from .captures import Captures, WarmUp
from .executor import EagerExecutor, Engine, Executor, Generated

__all__ = ["Captures", "EagerExecutor", "Engine", "Executor", "Generated", "WarmUp"]
