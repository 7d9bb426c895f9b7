"""Measurements of models, methods and folders of images."""

from .compare import Comparison, compare

__all__ = ["Comparison", "compare"]
