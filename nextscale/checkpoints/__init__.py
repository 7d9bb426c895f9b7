"""Reads published checkpoints into our modules, strictly and without executing anything in a file. Start at `load_weights`."""

from .files import Checkpoint, open_checkpoint
from .layout import Layout, Mismatch, PublishedTensor, Rule, Shape, check, fits, published_tensors
from .weights import NoInitialValues, convert, load_weights, write_weights, write_whole

__all__ = [
    "Checkpoint",
    "Layout",
    "Mismatch",
    "NoInitialValues",
    "PublishedTensor",
    "Rule",
    "Shape",
    "check",
    "convert",
    "fits",
    "load_weights",
    "open_checkpoint",
    "published_tensors",
    "write_weights",
    "write_whole",
]
