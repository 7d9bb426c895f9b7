"""Acceleration methods. `Method` is dense generation; a paper's method overrides the parts it changes."""

from .method import DENSE, Method, Span, StagePlan
from .skip import SkipStages

__all__ = ["DENSE", "Method", "SkipStages", "Span", "StagePlan"]
