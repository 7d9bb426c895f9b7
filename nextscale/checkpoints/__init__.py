"""Reads published checkpoints into our modules, strictly and without ever executing anything in a file. Start at `load_weights`."""

from .files import Checkpoint, open_checkpoint
from .layout import Layout, Mismatch, Rule, Shape, Slot, check, fits, published_slots
from .meta import NoInitialValues
from .weights import convert, load_weights, write_weights, write_whole

__all__ = [
    "Checkpoint",
    "Layout",
    "Mismatch",
    "NoInitialValues",
    "Rule",
    "Shape",
    "Slot",
    "check",
    "convert",
    "fits",
    "load_weights",
    "open_checkpoint",
    "published_slots",
    "write_weights",
    "write_whole",
]
