"""From a model's name and its published files to a pipeline."""

from .load import load
from .presets import MODELS, ModelSpec

__all__ = ["MODELS", "ModelSpec", "load"]
