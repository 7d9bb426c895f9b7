"""Pipelines from a model's name and its published files."""

from ..pipeline import Pipeline
from . import saved
from .load import load
from .presets import MODELS, ModelSpec

Pipeline.persistence = saved  # a pipeline knows that it can be saved, and not how

__all__ = ["MODELS", "ModelSpec", "load"]
