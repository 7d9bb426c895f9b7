"""Executors of requests: eager, or by replaying CUDA graphs."""

from .captures import Captures, WarmUp
from .executor import EagerExecutor, Engine, Executor, Generated

__all__ = ["Captures", "EagerExecutor", "Engine", "Executor", "Generated", "WarmUp"]
