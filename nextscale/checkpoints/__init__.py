"""Loads published checkpoints into our modules, strictly and without executing code from files. Start at `load_weights`."""

from .files import Checkpoint, open_checkpoint
from .layout import Layout, Rule, Shape, check, published_tensors
from .weights import NoInitialValues, convert, load_weights, write_weights, write_whole

__all__ = [
    "Checkpoint",
    "Layout",
    "NoInitialValues",
    "Rule",
    "Shape",
    "check",
    "convert",
    "load_weights",
    "open_checkpoint",
    "published_tensors",
    "write_weights",
    "write_whole",
]
