"""Benchmarks that others score: their prompt sets, and folders of images as their scorers expect them."""

from .export import export
from .suite import SUITES, Suite, suite

__all__ = ["SUITES", "Suite", "export", "suite"]
