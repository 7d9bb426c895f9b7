"""Acceleration methods. `Method` is dense generation; a paper's method overrides the parts it changes."""

from .method import DENSE, Method, RunSetup, Span, StagePlan
from .skip import SkipStages

__all__ = ["DENSE", "Method", "RunSetup", "SkipStages", "Span", "StagePlan"]
