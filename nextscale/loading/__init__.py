"""Pipelines from a model's name and its published files."""

from .load import load
from .presets import MODELS, ModelSpec

__all__ = ["MODELS", "ModelSpec", "load"]
